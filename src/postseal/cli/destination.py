"""`postseal destination`: create, list, change, disable, enable, test, rotate-secret."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from typer import Argument, BadParameter, Option, Typer, echo

from postseal.admin import destinations
from postseal.admin.actor import Actor
from postseal.admin.destinations import CreatedDestination, Secrets
from postseal.admin.secrets import MAX_OVERLAP_S, Schemes, ShownSecret, schemes_of
from postseal.cli.arguments import ProjectName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.failures import fail
from postseal.cli.output import print_json, print_record, print_table, record
from postseal.outbound.holding import move_mail
from postseal.outbound.probing import probe
from postseal.postgres.database import Connection, Database, Part
from postseal.postgres.destinations import Destination
from postseal.rules.delivery import Attempted
from postseal.settings import SECONDS_AN_HOUR
from postseal.worker_service import deployment_key, http_sender

DestinationName = Annotated[str, Argument(metavar="DESTINATION", help="The destination.", show_default=False)]
MaxPending = Annotated[
    int | None, Option(min=1, max=100_000_000, help="How many deliveries may be pending.", show_default=False)
]
DEFAULT_OVERLAP_HOURS = 24
PAGE_ROWS = 1_000
COLUMNS = (
    "destination",
    "mode",
    "state",
    "pending",
    "maxPending",
    "failingSinceMs",
    "lastCode",
    "lastSuccessAtMs",
    "nextDueAtMs",
    "url",
)

app = Typer()


@command(app, "create")
def create(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    destination: DestinationName,
    *,
    mode: Annotated[Literal["push", "pull"], Option(help="Pushed to, or pulled from by the device of that id.")],
    url: Annotated[str | None, Option(metavar="URL", help="Where deliveries are pushed to.")] = None,
    scheme: Annotated[
        Schemes | None, Option(help="How requests are signed: a shared secret (v1, the default), a key pair (v1a).")
    ] = None,
    max_pending: MaxPending = None,
) -> None:
    """Make a destination. What its receiver verifies requests with is shown this once."""
    settings, actor, room = session.settings, session.actor, max_pending or session.settings.max_pending
    if mode == "pull" and (url is not None or scheme is not None):
        raise BadParameter("what is pulled from has neither --url nor --scheme")
    if mode == "push" and url is None:
        raise BadParameter("what is pushed to needs --url")
    secrets = None if url is None else Secrets(deployment_key(settings), settings.allow_http)

    async def act(connection: Connection) -> CreatedDestination:
        names = (connection, actor, tenant, project, destination)
        if url is None or secrets is None:
            return await destinations.create_pull(*names, max_pending=room)
        return await destinations.create_push(
            *names, url=url, schemes=schemes_of(scheme), max_pending=room, secrets=secrets
        )

    made = session.transact(act)
    document = record(made) | {"secrets": [record(secret) for secret in made.secrets]}
    if session.as_json:
        print_json(document)
    else:
        print_record(document | {"secrets": [secret.receiver for secret in made.secrets]})


@command(app, "list")
def list_all(session: Session, tenant: TenantName, project: ProjectName) -> None:
    """Show the destinations of a project, and how they fare."""
    rows = [record(row) for row in session.run(Part.ADMIN, lambda database: _all(database, tenant, project))]
    if session.as_json:
        print_json({"tenant": tenant, "destinations": rows})
    else:
        print_table([row | {"state": _state(row["disabledReason"])} for row in rows], COLUMNS)


@command(app, "change")
def change(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    destination: DestinationName,
    *,
    url: Annotated[
        str | None, Option(metavar="URL", help="Where deliveries are pushed to.", show_default=False)
    ] = None,
    max_pending: MaxPending = None,
) -> None:
    """Give a destination another URL, or other room. Its secrets and its mail stay."""
    if url is None and max_pending is None:
        raise BadParameter("say what is to be changed: --url, --max-pending")

    async def act(connection: Connection) -> Destination:
        return await destinations.change(
            connection,
            session.actor,
            tenant,
            project,
            destination,
            url=url,
            max_pending=max_pending,
            allow_http=session.settings.allow_http,
        )

    changed = session.transact(act)
    document = {
        "tenant": tenant,
        "project": project,
        "destination": destination,
        "mode": changed.mode,
        "url": changed.url,
        "maxPending": changed.max_pending,
    }
    if session.as_json:
        print_json(document)
    else:
        print_record(document)


@command(app, "disable")
def disable(session: Session, tenant: TenantName, project: ProjectName, destination: DestinationName) -> None:
    """Send nothing more to a destination; its mail is held."""
    _switch(session, destinations.disable, tenant, project, destination, "disabled")


@command(app, "enable")
def enable(session: Session, tenant: TenantName, project: ProjectName, destination: DestinationName) -> None:
    """Send what is held for a destination, and what comes."""
    _switch(session, destinations.enable, tenant, project, destination, "enabled")


@command(app, "test")
def test(session: Session, tenant: TenantName, project: ProjectName, destination: DestinationName) -> None:
    """Send one signed request that is no delivery. The command fails where the request does."""
    key = deployment_key(session.settings)
    found = session.transact(
        lambda connection: destinations.note_test(connection, session.actor, tenant, project, destination)
    )

    async def flow(database: Database) -> Attempted:
        async with http_sender(session.settings) as sender:
            return await probe(database, sender, key, tenant, found.stream)

    attempted = session.run(Part.DELIVERY, flow)
    if session.as_json:
        print_json({"destination": destination, "delivered": attempted.delivered, "code": attempted.code})
    elif attempted.delivered:
        echo(f"destination {destination} took the test")
    if attempted.code is not None:
        fail(f"destination {destination} did not take the test: {attempted.code}")


@command(app, "rotate-secret")
def rotate_secret(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    destination: DestinationName,
    *,
    scheme: Annotated[Schemes | None, Option(help="Only of this scheme.")] = None,
    overlap_hours: Annotated[
        int,
        Option(min=0, max=MAX_OVERLAP_S // SECONDS_AN_HOUR, help="For how long the older ones go on signing too."),
    ] = DEFAULT_OVERLAP_HOURS,
) -> None:
    """Make new secrets, shown this once. The older ones go on signing for a while."""
    key = deployment_key(session.settings)

    async def act(connection: Connection) -> list[ShownSecret]:
        return await destinations.rotate_secret(
            connection,
            session.actor,
            tenant,
            project,
            destination,
            schemes=schemes_of(scheme),
            overlap_s=overlap_hours * SECONDS_AN_HOUR,
            key=key,
        )

    rows = [record(secret) for secret in session.transact(act)]
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "destination": destination, "secrets": rows})
    else:
        print_table(rows, ("scheme", "receiver", "secret"))


async def _all(database: Database, tenant: str, project: str) -> list[Destination]:
    found: list[Destination] = []
    after = ""
    while True:
        page = await database.transact(
            lambda connection, after=after: destinations.page(connection, tenant, project, after=after, rows=PAGE_ROWS)
        )
        found += page
        if len(page) < PAGE_ROWS:
            return found
        after = page[-1].destination


def _switch(
    session: Session,
    act: Callable[[Connection, Actor, str, str, str], Awaitable[Destination]],
    tenant: str,
    project: str,
    destination: str,
    state: str,
) -> None:
    async def flow(database: Database) -> None:
        found = await database.transact(lambda connection: act(connection, session.actor, tenant, project, destination))
        await move_mail(database, tenant, found.stream)

    session.run(Part.ADMIN, flow)
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "destination": destination, "state": state})
    else:
        echo(f"destination {destination} is {state}")


def _state(disabled_reason: str | None) -> str:
    return "enabled" if disabled_reason is None else f"disabled ({disabled_reason})"

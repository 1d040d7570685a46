"""`postseal destination`: create, list, disable, enable, test, rotate-secret."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from typer import Argument, BadParameter, Option, Typer, echo

from postseal.admin import destinations
from postseal.admin.actor import Actor
from postseal.admin.destinations import MAX_OVERLAP_S, Secrets, ShownSecret
from postseal.cli.arguments import ProjectName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.failures import fail
from postseal.cli.output import SECONDS_AN_HOUR, print_json, print_record, print_table, record
from postseal.outbound.probing import probe
from postseal.postgres.database import Connection, Database, Part
from postseal.postgres.destinations import Destination
from postseal.rules.delivery import Attempted
from postseal.senders import Scheme
from postseal.worker_service import deployment_key, http_sender

DestinationName = Annotated[str, Argument(metavar="DESTINATION", help="The destination.", show_default=False)]
Schemes = Literal["v1", "v1a", "both"]
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
    max_pending: Annotated[
        int | None, Option(min=1, max=100_000_000, help="How many deliveries may be pending.", show_default=False)
    ] = None,
) -> None:
    """Make a destination; what its receiver verifies requests with is shown this once."""
    settings, room = session.settings, max_pending or session.settings.max_pending
    if mode == "pull":
        if url is not None or scheme is not None:
            raise BadParameter("what is pulled from has neither --url nor --scheme")
        made = session.transact(
            lambda connection: destinations.create_pull(
                connection, session.actor, tenant, project, destination, max_pending=room
            )
        )
    elif url is None:
        raise BadParameter("what is pushed to needs --url")
    else:
        secrets = Secrets(deployment_key(settings), settings.allow_http)
        made = session.transact(
            lambda connection: destinations.create_push(
                connection,
                session.actor,
                tenant,
                project,
                destination,
                url=url,
                schemes=_schemes(scheme) or [Scheme.V1],
                max_pending=room,
                secrets=secrets,
            )
        )
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


@command(app, "disable")
def disable(session: Session, tenant: TenantName, project: ProjectName, destination: DestinationName) -> None:
    """Send nothing more to a destination; its mail is held."""
    _change(session, destinations.disable, tenant, project, destination, "disabled")


@command(app, "enable")
def enable(session: Session, tenant: TenantName, project: ProjectName, destination: DestinationName) -> None:
    """Send what is held for a destination, and what comes."""
    _change(session, destinations.enable, tenant, project, destination, "enabled")


@command(app, "test")
def test(session: Session, tenant: TenantName, project: ProjectName, destination: DestinationName) -> None:
    """Send one signed request that is no delivery, and tell how that went; it fails where the request did."""
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
    """Make new secrets, shown this once; the older ones go on signing for a while."""
    key = deployment_key(session.settings)

    async def act(connection: Connection) -> list[ShownSecret]:
        return await destinations.rotate_secret(
            connection,
            session.actor,
            tenant,
            project,
            destination,
            schemes=_schemes(scheme),
            overlap_s=overlap_hours * SECONDS_AN_HOUR,
            key=key,
        )

    rows = [record(secret) for secret in session.transact(act)]
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "destination": destination, "secrets": rows})
    else:
        print_table(rows, ("scheme", "receiver", "secret"))


def _schemes(wanted: Schemes | None) -> list[Scheme]:
    """The schemes that were named; none where none was."""
    if wanted is None:
        return []
    return [Scheme.V1, Scheme.V1A] if wanted == "both" else [Scheme(wanted)]


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


def _change(
    session: Session,
    act: Callable[[Connection, Actor, str, str, str], Awaitable[Destination]],
    tenant: str,
    project: str,
    destination: str,
    state: str,
) -> None:
    async def flow(database: Database) -> None:
        found = await database.transact(lambda connection: act(connection, session.actor, tenant, project, destination))
        await destinations.move_mail(database, tenant, found.stream)

    session.run(Part.ADMIN, flow)
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "destination": destination, "state": state})
    else:
        echo(f"destination {destination} is {state}")


def _state(disabled_reason: str | None) -> str:
    return "enabled" if disabled_reason is None else f"disabled ({disabled_reason})"

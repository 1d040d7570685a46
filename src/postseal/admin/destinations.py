"""Destinations: made, listed, disabled and enabled, tested, and the secrets that sign the requests to them.

A secret is shown at the moment at which it is made, and never again: of a shared one (`v1`) the whole, of a key pair
(`v1a`) the public half, which is all that a receiver needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from postseal.admin.actor import Actor
from postseal.admin.names import require_id, require_projects
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import destinations, lanes, streams
from postseal.postgres.database import Database
from postseal.postgres.destinations import Destination, Mode
from postseal.postgres.transaction import Connection
from postseal.senders import Scheme, Secret
from postseal.senders.addresses import check_url
from postseal.senders.secrets import DeploymentKey
from postseal.senders.webhook import for_receiver, make_secret

MAX_OVERLAP_S = 30 * 86_400
"""How long an older secret may go on signing beside a new one."""


@dataclass(frozen=True, slots=True)
class ShownSecret:
    """What a receiver has to know, at the only moment at which it is shown; `repr` does not show it."""

    secret: UUID
    scheme: Scheme
    receiver: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class CreatedDestination:
    """A new destination, with what its receiver has to know; a pull destination has no secrets."""

    tenant: str
    project: str
    destination: str
    mode: Mode
    url: str | None
    max_pending: int
    secrets: list[ShownSecret]


@dataclass(frozen=True, slots=True)
class Secrets:
    """How secrets are made and kept, and which addresses a destination may have."""

    key: DeploymentKey
    allow_http: bool


async def create_push(
    connection: Connection,
    actor: Actor,
    tenant: str,
    project: str,
    destination: str,
    *,
    url: str,
    schemes: Sequence[Scheme],
    max_pending: int,
    secrets: Secrets,
) -> CreatedDestination:
    """Make a destination to which deliveries are pushed, with one secret a scheme.

    AdminError: no such project, not an id, there already, or an address that nothing may be pushed to.
    """
    try:
        check_url(url, allow_http=secrets.allow_http)
    except ValueError as error:
        raise AdminError(Reason.REQUEST_INVALID, str(error)) from None
    stream = await _create(connection, tenant, project, destination, mode="push", url=url, max_pending=max_pending)
    shown = [await _add_secret(connection, tenant, stream, scheme, secrets.key) for scheme in schemes]
    await actor.acted(
        connection,
        "destination.create",
        tenant=tenant,
        project=project,
        destination=destination,
        mode="push",
        maxPending=max_pending,
        secrets=_told(shown),
    )
    return CreatedDestination(tenant, project, destination, "push", url, max_pending, shown)


async def create_pull(
    connection: Connection, actor: Actor, tenant: str, project: str, device: str, *, max_pending: int
) -> CreatedDestination:
    """Make the destination from which a device pulls; enrolment has made it where it could.

    AdminError: no such project, the device is not enrolled in it, or it has one.
    """
    await require_projects(connection, tenant, [project])
    if await streams.find(connection, tenant, project, device) is None:
        raise AdminError(Reason.NOT_FOUND, f"project {project!r} has no device {device!r} that could pull")
    await _create(connection, tenant, project, device, mode="pull", url=None, max_pending=max_pending)
    await actor.acted(
        connection,
        "destination.create",
        tenant=tenant,
        project=project,
        destination=device,
        mode="pull",
        maxPending=max_pending,
    )
    return CreatedDestination(tenant, project, device, "pull", None, max_pending, [])


async def page(connection: Connection, tenant: str, project: str, *, after: str = "", rows: int) -> list[Destination]:
    """At most `rows` destinations of a project by name, behind `after`. AdminError: no such tenant or project."""
    await require_projects(connection, tenant, [project])
    return await destinations.list_of_project(connection, tenant, project, after=after, limit=rows)


async def disable(connection: Connection, actor: Actor, tenant: str, project: str, destination: str) -> Destination:
    """Let nothing more of a destination be sent; its mail is held. Afterwards the caller calls `move_mail`.

    AdminError: no such destination, or disabled already.
    """
    found = await require(connection, tenant, project, destination)
    if not await destinations.disable(connection, tenant, found.stream, reason="operator"):
        raise AdminError(Reason.CONFLICT, f"destination {destination!r} is disabled already")
    await actor.acted(connection, "destination.disable", tenant=tenant, project=project, destination=destination)
    return found


async def enable(connection: Connection, actor: Actor, tenant: str, project: str, destination: str) -> Destination:
    """Let a destination's mail be sent again. Afterwards the caller calls `move_mail`.

    AdminError: no such destination, or enabled already.
    """
    found = await require(connection, tenant, project, destination)
    if not await destinations.enable(connection, tenant, found.stream):
        raise AdminError(Reason.CONFLICT, f"destination {destination!r} is enabled already")
    await actor.acted(connection, "destination.enable", tenant=tenant, project=project, destination=destination)
    return found


async def move_mail(database: Database, tenant: str, stream: int) -> None:
    """Let the queue follow a destination that was disabled or enabled, in many short transactions.

    Each half moves nothing where the destination stands the other way, whoever changed it meanwhile.
    """
    for move in (lanes.hold, lanes.unhold):
        while await database.transact(lambda connection, move=move: move(connection, tenant, stream)):
            pass


async def rotate_secret(
    connection: Connection,
    actor: Actor,
    tenant: str,
    project: str,
    destination: str,
    *,
    schemes: Sequence[Scheme],
    overlap_s: int,
    key: DeploymentKey,
) -> list[ShownSecret]:
    """Make a new secret of each scheme; where none is given, of each that the destination has.

    The older ones sign for `overlap_s` more, so that the receiver has the time to take the new one. AdminError:
    no such destination, it is pulled from, or an overlap of more than 30 days.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise AdminError(Reason.REQUEST_INVALID, f"older secrets sign for at most {MAX_OVERLAP_S} s more")
    found = await require_push(connection, tenant, project, destination)
    has = await destinations.list_secrets(connection, tenant, found.stream)
    wanted = schemes or sorted({Scheme(secret.scheme) for secret in has})
    shown: list[ShownSecret] = []
    for scheme in wanted:
        made = await _add_secret(connection, tenant, found.stream, scheme, key)
        await destinations.let_older_sign_until(connection, tenant, found.stream, newest=made.secret, for_s=overlap_s)
        shown.append(made)
    await actor.acted(
        connection,
        "destination.rotate-secret",
        tenant=tenant,
        project=project,
        destination=destination,
        secrets=_told(shown),
        overlapSeconds=overlap_s,
    )
    return shown


async def note_test(connection: Connection, actor: Actor, tenant: str, project: str, destination: str) -> Destination:
    """Write into the trail that a destination is tested; how that went is told to whoever asked.

    AdminError: no such destination, or it is pulled from.
    """
    found = await require_push(connection, tenant, project, destination)
    await actor.acted(connection, "destination.test", tenant=tenant, project=project, destination=destination)
    return found


async def require(connection: Connection, tenant: str, project: str, destination: str) -> Destination:
    """One destination. AdminError: no such tenant, project or destination."""
    await require_projects(connection, tenant, [project])
    found = await destinations.find(connection, tenant, project, destination)
    if found is None:
        raise AdminError(Reason.NOT_FOUND, f"project {project!r} has no destination {destination!r}")
    return found


async def require_push(connection: Connection, tenant: str, project: str, destination: str) -> Destination:
    """The same, unless it is pulled from."""
    found = await require(connection, tenant, project, destination)
    if found.mode != "push":
        raise AdminError(Reason.CONFLICT, f"destination {destination!r} is pulled from: nothing is sent there")
    return found


async def _create(
    connection: Connection,
    tenant: str,
    project: str,
    destination: str,
    *,
    mode: Mode,
    url: str | None,
    max_pending: int,
) -> int:
    require_id("a destination", destination)
    await require_projects(connection, tenant, [project])
    stream = await destinations.create(
        connection, tenant, project, destination, mode=mode, url=url, max_pending=max_pending
    )
    if stream is None:
        raise AdminError(Reason.CONFLICT, f"project {project!r} has a destination {destination!r} already")
    return stream


async def _add_secret(
    connection: Connection, tenant: str, stream: int, scheme: Scheme, key: DeploymentKey
) -> ShownSecret:
    secret, made = uuid4(), make_secret(scheme)
    encrypted = key.encrypt(tenant, stream, Secret(scheme, made.key))
    await destinations.insert_secret(
        connection, tenant, stream, secret=secret, scheme=scheme.value, encrypted=encrypted
    )
    return ShownSecret(secret, scheme, for_receiver(made))


def _told(secrets: Sequence[ShownSecret]) -> list[dict[str, str]]:
    return [{"secret": str(secret.secret), "scheme": str(secret.scheme)} for secret in secrets]

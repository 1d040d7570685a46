"""Destinations: made, listed, changed, disabled and enabled, tested, and given new secrets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from postseal.admin.actor import Actor
from postseal.admin.names import require_id, require_projects
from postseal.admin.secrets import MAX_OVERLAP_S, ShownSecret, add_secret, replace_secrets, told
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import destinations, streams
from postseal.postgres.destinations import Destination, Mode
from postseal.postgres.transaction import Connection
from postseal.senders import Scheme
from postseal.senders.addresses import check_url
from postseal.senders.secrets import DeploymentKey


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
    """Make a destination to which deliveries are pushed, with one secret a scheme; where none is given, of `v1`.

    AdminError: no such project, not an id, there already, or an address that nothing may be pushed to.
    """
    _check_url(url, allow_http=secrets.allow_http)
    stream = await _create(connection, tenant, project, destination, mode="push", url=url, max_pending=max_pending)
    made = schemes or [Scheme.V1]
    shown = [await add_secret(connection, tenant, stream, scheme, secrets.key) for scheme in made]
    await actor.acted(
        connection,
        "destination.create",
        tenant=tenant,
        project=project,
        destination=destination,
        mode="push",
        maxPending=max_pending,
        secrets=told(shown),
    )
    return CreatedDestination(tenant, project, destination, "push", url, max_pending, shown)


async def create_pull(
    connection: Connection, actor: Actor, tenant: str, project: str, device: str, *, max_pending: int
) -> CreatedDestination:
    """Make the destination from which a device pulls; enrolment has made it where it could.

    AdminError: no such project, the device is not enrolled in it, is retired, or has one.
    """
    await require_projects(connection, tenant, [project])
    # Under the stream's lock: the device is not retired meanwhile.
    stream = await streams.lock(connection, tenant, project, device)
    if stream is None:
        raise AdminError(Reason.NOT_FOUND, f"project {project!r} has no device {device!r} that could pull")
    if stream.retired:
        raise AdminError(Reason.CONFLICT, f"device {device!r} is retired: enrol a new one")
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


async def change(
    connection: Connection,
    actor: Actor,
    tenant: str,
    project: str,
    destination: str,
    *,
    url: str | None,
    max_pending: int | None,
    allow_http: bool,
) -> Destination:
    """Give a destination another address, other room, or both; what is None stays, and so do secrets and mail.

    AdminError: nothing to change, no such destination, an address that nothing may be pushed to, or one for a
    destination that is pulled from.
    """
    if url is None and max_pending is None:
        raise AdminError(Reason.REQUEST_INVALID, "nothing is to be changed: give a URL, or how much may be pending")
    if url is not None:
        _check_url(url, allow_http=allow_http)
    found = await _lock(connection, tenant, project, destination)
    if url is not None:
        _require_pushed(found)
    await destinations.change(connection, tenant, found.stream, url=url, max_pending=max_pending)
    changed = replace(found, url=url or found.url, max_pending=max_pending or found.max_pending)
    await actor.acted(
        connection,
        "destination.change",
        tenant=tenant,
        project=project,
        destination=destination,
        newUrl=changed.url != found.url,
        maxPending=changed.max_pending,
    )
    return changed


async def disable(connection: Connection, actor: Actor, tenant: str, project: str, destination: str) -> Destination:
    """Let nothing more of a destination be sent; its mail is held. Afterwards the caller calls `holding.move_mail`.

    One that is disabled already stays as it is: whoever disabled it may have been cut off before its mail was moved.
    AdminError: no such destination.
    """
    found = await require(connection, tenant, project, destination)
    if await destinations.disable(connection, tenant, found.stream, reason="operator"):
        await actor.acted(connection, "destination.disable", tenant=tenant, project=project, destination=destination)
    return found


async def enable(connection: Connection, actor: Actor, tenant: str, project: str, destination: str) -> Destination:
    """Let a destination's mail be sent again. Afterwards the caller calls `holding.move_mail`.

    One that is enabled already stays so. AdminError: no such destination, or its device is retired.
    """
    found = await _lock(connection, tenant, project, destination)
    if found.disabled_reason == "retired":
        raise AdminError(Reason.CONFLICT, f"device {destination!r} is retired: nobody is to pull from its destination")
    if await destinations.enable(connection, tenant, found.stream):
        await actor.acted(connection, "destination.enable", tenant=tenant, project=project, destination=destination)
    return found


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
    no such destination, it is pulled from, an overlap of more than 30 days, or too many secrets would sign.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise AdminError(Reason.REQUEST_INVALID, f"older secrets sign for at most {MAX_OVERLAP_S} s more")
    found = _require_pushed(await _lock(connection, tenant, project, destination))
    shown = await replace_secrets(connection, tenant, found.stream, schemes=schemes, overlap_s=overlap_s, key=key)
    await actor.acted(
        connection,
        "destination.rotate-secret",
        tenant=tenant,
        project=project,
        destination=destination,
        secrets=told(shown),
        overlapSeconds=overlap_s,
    )
    return shown


async def note_test(connection: Connection, actor: Actor, tenant: str, project: str, destination: str) -> Destination:
    """Write into the trail that a destination is tested; how that went is told to whoever asked.

    AdminError: no such destination, or it is pulled from.
    """
    found = _require_pushed(await require(connection, tenant, project, destination))
    await actor.acted(connection, "destination.test", tenant=tenant, project=project, destination=destination)
    return found


async def require(connection: Connection, tenant: str, project: str, destination: str) -> Destination:
    """One destination. AdminError: no such tenant, project or destination."""
    await require_projects(connection, tenant, [project])
    return _there(await destinations.find(connection, tenant, project, destination), project, destination)


async def _lock(connection: Connection, tenant: str, project: str, destination: str) -> Destination:
    """The same, which nobody else changes until the transaction ends."""
    await require_projects(connection, tenant, [project])
    return _there(await destinations.lock(connection, tenant, project, destination), project, destination)


def _there(found: Destination | None, project: str, destination: str) -> Destination:
    if found is None:
        raise AdminError(Reason.NOT_FOUND, f"project {project!r} has no destination {destination!r}")
    return found


def _require_pushed(found: Destination) -> Destination:
    if found.mode != "push":
        raise AdminError(Reason.CONFLICT, f"destination {found.destination!r} is pulled from: nothing is sent there")
    return found


def _check_url(url: str, *, allow_http: bool) -> None:
    try:
        check_url(url, allow_http=allow_http)
    except ValueError as error:
        raise AdminError(Reason.REQUEST_INVALID, str(error)) from None


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

"""Streams: where each stands, and how its replay floor is raised (protocol section 5)."""

from dataclasses import replace

from postseal.admin.actor import Actor
from postseal.admin.names import require_projects, require_reason, require_tenant
from postseal.envelope.canonical import MAX_INTEGER
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import streams
from postseal.postgres.streams import Stream
from postseal.postgres.transaction import Connection
from postseal.rules.stream import Cursor


async def list_of_tenant(connection: Connection, tenant: str, project: str | None = None) -> list[Stream]:
    """All streams of a tenant, or of one of its projects. AdminError: no such tenant or project."""
    await require_tenant(connection, tenant)
    if project is not None:
        await require_projects(connection, tenant, [project])
    return await streams.list_of_tenant(connection, tenant, project)


async def page(connection: Connection, tenant: str, project: str, *, after: str, rows: int) -> list[Stream]:
    """At most `rows` streams of a project by producer, from the first one behind `after` on. AdminError: no such."""
    await require_projects(connection, tenant, [project])
    return await streams.page(connection, tenant, project, after=after, rows=rows)


async def show(connection: Connection, tenant: str, project: str, producer: str) -> Stream:
    """One stream. AdminError: no such tenant or stream."""
    await require_tenant(connection, tenant)
    stream = await streams.find(connection, tenant, project, producer)
    return _require(stream, project, producer)


async def raise_floor(
    connection: Connection,
    actor: Actor,
    tenant: str,
    project: str,
    producer: str,
    *,
    floor: int,
    reason: str,
    force: bool = False,
) -> Stream:
    """Raise a stream's replay floor to `floor` and return the stream as it then stands.

    Holes at or below it are closed for ever and the cursor advances. AdminError: no such stream, a floor that does
    not rise, one above the highest sequence without `force`, or a reason that is no line of text.
    """
    require_reason(reason)
    await require_tenant(connection, tenant)
    stream = _require(await streams.lock(connection, tenant, project, producer), project, producer)
    _require_rise(stream.cursor, floor, force=force)
    cursor = stream.cursor.raised_to(floor)
    await streams.set_cursor(connection, stream.key, cursor)
    await actor.acted(
        connection,
        "stream.raise-floor",
        tenant=tenant,
        project=project,
        producer=producer,
        reason=reason,
        forced=force,
        **{"from": stream.cursor.floor, "to": floor},
    )
    return replace(stream, cursor=cursor)


def _require(stream: Stream | None, project: str, producer: str) -> Stream:
    if stream is None:
        raise AdminError(Reason.NOT_FOUND, f"project {project!r} has no stream of {producer!r}")
    return stream


def _require_rise(cursor: Cursor, floor: int, *, force: bool) -> None:
    if floor <= cursor.floor:
        raise AdminError(Reason.CONFLICT, f"the floor is at {cursor.floor} and only rises")
    if floor > MAX_INTEGER:
        raise AdminError(Reason.REQUEST_INVALID, f"a sequence is at most {MAX_INTEGER}")
    if floor > cursor.highest and not force:
        raise AdminError(
            Reason.CONFLICT,
            f"{floor} is above the highest sequence, {cursor.highest}: it must be forced",
        )

"""Streams outside the hot path: how they are made, retired, shown, and how their floor is raised."""

from dataclasses import dataclass
from typing import LiteralString

from psycopg.rows import TupleRow

from postseal.postgres.ingest import StreamKey, bitmap_from_bytes, bitmap_to_bytes
from postseal.postgres.transaction import Connection
from postseal.rules.stream import Cursor


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream as it stands."""

    key: StreamKey
    project: str
    producer: str
    retired: bool
    cursor: Cursor


COLUMNS: LiteralString = """
SELECT tenant, stream, project, producer, retired, floor, contiguous, highest, above FROM streams
"""

LIST: LiteralString = (
    COLUMNS
    + """
WHERE tenant = %(tenant)s AND (%(project)s::text IS NULL OR project = %(project)s)
ORDER BY project, producer
"""
)


async def list_of_tenant(connection: Connection, tenant: str, project: str | None = None) -> list[Stream]:
    """All streams of a tenant, or of one of its projects, by project and producer."""
    cursor = await connection.execute(LIST, {"tenant": tenant, "project": project})
    return [stream_of(row) for row in await cursor.fetchall()]


PAGE: LiteralString = (
    COLUMNS
    + """
WHERE tenant = %(tenant)s AND project = %(project)s AND producer > %(after)s
ORDER BY producer LIMIT %(rows)s
"""
)


async def page(connection: Connection, tenant: str, project: str, *, after: str, rows: int) -> list[Stream]:
    """At most `rows` streams of a project by producer, from the first one behind `after` on."""
    cursor = await connection.execute(PAGE, {"tenant": tenant, "project": project, "after": after, "rows": rows})
    return [stream_of(row) for row in await cursor.fetchall()]


FIND: LiteralString = COLUMNS + "WHERE tenant = %(tenant)s AND project = %(project)s AND producer = %(producer)s"


async def find(connection: Connection, tenant: str, project: str, producer: str) -> Stream | None:
    """The stream of that name, as it stands at this moment."""
    parameters = {"tenant": tenant, "project": project, "producer": producer}
    row = await (await connection.execute(FIND, parameters)).fetchone()
    return stream_of(row) if row else None


LOCK: LiteralString = FIND + " FOR NO KEY UPDATE"


async def lock(connection: Connection, tenant: str, project: str, producer: str) -> Stream | None:
    """The stream of that name, into which nothing is taken until this transaction ends."""
    parameters = {"tenant": tenant, "project": project, "producer": producer}
    row = await (await connection.execute(LOCK, parameters)).fetchone()
    return stream_of(row) if row else None


# In id order, as the group commits lock theirs, so that none waits for another in a circle.
LOCK_OF_DEVICE: LiteralString = """
SELECT stream FROM streams WHERE tenant = %(tenant)s AND producer = %(device)s
ORDER BY stream FOR NO KEY UPDATE
"""


async def lock_of_device(connection: Connection, tenant: str, device: str) -> None:
    """Wait until nothing of the device's is being taken in, and keep it so until this transaction ends."""
    await connection.execute(LOCK_OF_DEVICE, {"tenant": tenant, "device": device})


INSERT_MISSING: LiteralString = """
INSERT INTO streams (tenant, project, producer)
SELECT %(tenant)s, project, %(device)s FROM unnest(%(projects)s::text[]) AS project
ON CONFLICT DO NOTHING
"""


async def insert_missing(connection: Connection, *, tenant: str, device: str, projects: list[str]) -> None:
    """Make the device's stream in each of `projects` where it has none."""
    await connection.execute(INSERT_MISSING, {"tenant": tenant, "device": device, "projects": projects})


PROJECTS: LiteralString = """
SELECT project FROM streams WHERE tenant = %(tenant)s AND producer = %(device)s ORDER BY project
"""


async def projects_of_device(connection: Connection, tenant: str, device: str) -> list[str]:
    """The projects in which the device has a stream, retired or not."""
    cursor = await connection.execute(PROJECTS, {"tenant": tenant, "device": device})
    return [project for (project,) in await cursor.fetchall()]


RETIRE_OF_DEVICE: LiteralString = """
UPDATE streams SET retired = true WHERE tenant = %(tenant)s AND producer = %(device)s AND NOT retired
"""


async def retire_of_device(connection: Connection, tenant: str, device: str) -> None:
    """Retire all streams of a device; the caller holds their locks."""
    await connection.execute(RETIRE_OF_DEVICE, {"tenant": tenant, "device": device})


SET_CURSOR: LiteralString = """
UPDATE streams
SET floor = %(floor)s, contiguous = %(contiguous)s, highest = %(highest)s, above = %(above)s
WHERE tenant = %(tenant)s AND stream = %(stream)s
"""


async def set_cursor(connection: Connection, key: StreamKey, cursor: Cursor) -> None:
    """Let a stream stand at `cursor`; the caller holds its lock."""
    parameters = {
        "tenant": key.tenant,
        "stream": key.stream,
        "floor": cursor.floor,
        "contiguous": cursor.contiguous,
        "highest": cursor.highest,
        "above": bitmap_to_bytes(cursor.above),
    }
    await connection.execute(SET_CURSOR, parameters)


def stream_of(row: TupleRow) -> Stream:
    """A row of COLUMNS."""
    tenant, stream, project, producer, retired, floor, contiguous, highest, above = row
    cursor = Cursor(floor, contiguous, highest, bitmap_from_bytes(above))
    return Stream(StreamKey(tenant, stream), project, producer, retired, cursor)

"""Devices. A row stays when its device is retired, so that its id is never used again."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Device:
    """A device as it stands."""

    account: str
    retired: bool


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """A device as administrators see it; of `projects` those that were asked for."""

    device: str
    account: str
    projects: list[str]
    created_at: datetime
    retired_at: datetime | None


INSERT: LiteralString = """
INSERT INTO devices (tenant, device, account) VALUES (%(tenant)s, %(device)s, %(account)s)
ON CONFLICT DO NOTHING
"""


async def insert_if_new(connection: Connection, *, tenant: str, device: str, account: str) -> bool:
    """Make a device; False if its id was ever used in the tenant."""
    cursor = await connection.execute(INSERT, {"tenant": tenant, "device": device, "account": account})
    return cursor.rowcount == 1


FIND: LiteralString = """
SELECT account, retired_at IS NOT NULL FROM devices WHERE tenant = %(tenant)s AND device = %(device)s
"""


async def find(connection: Connection, tenant: str, device: str) -> Device | None:
    """The device of that id, if there ever was one."""
    row = await (await connection.execute(FIND, {"tenant": tenant, "device": device})).fetchone()
    return Device(*row) if row else None


LOCK: LiteralString = FIND + "FOR NO KEY UPDATE"


async def lock(connection: Connection, tenant: str, device: str) -> Device | None:
    """The device of that id, which nobody else changes until this transaction ends.

    Whatever changes a device, its keys or its set of streams takes this lock first, then those of its streams.
    """
    row = await (await connection.execute(LOCK, {"tenant": tenant, "device": device})).fetchone()
    return Device(*row) if row else None


RETIRE: LiteralString = """
UPDATE devices SET retired_at = clock_timestamp()
WHERE tenant = %(tenant)s AND device = %(device)s AND retired_at IS NULL
"""


async def retire(connection: Connection, tenant: str, device: str) -> None:
    """Mark a device as retired; one that is already keeps its time."""
    await connection.execute(RETIRE, {"tenant": tenant, "device": device})


LIST: LiteralString = """
SELECT device, account, projects, created_at, retired_at
FROM (
    SELECT d.device, d.account, d.created_at, d.retired_at,
           ARRAY(SELECT s.project FROM streams s
                 WHERE s.tenant = d.tenant AND s.producer = d.device
                   AND (%(projects)s::text[] IS NULL OR s.project = ANY(%(projects)s))
                 ORDER BY s.project) AS projects
    FROM devices d
    WHERE d.tenant = %(tenant)s AND (%(after)s::text IS NULL OR d.device > %(after)s)
) AS listed
WHERE %(projects)s::text[] IS NULL OR cardinality(projects) > 0
ORDER BY device LIMIT %(limit)s
"""


async def list_of_tenant(connection: Connection, tenant: str, part: ListPart = WHOLE) -> list[ListedDevice]:
    """A tenant's devices by id, retired ones included; `part.after` is one's id."""
    cursor = await connection.execute(LIST, {"tenant": tenant, **asdict(part)})
    return [ListedDevice(*row) for row in await cursor.fetchall()]

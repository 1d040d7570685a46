"""Devices' public keys: found inside a verified scope (protocol section 4, check 3), registered and changed."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.ingest import StreamKey
from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Signer:
    """A key that a device may have signed with, and the device's stream in one project.

    All of it is immutable, so it may be remembered; whether the key may bring anything new is not in here.
    """

    keyid: str
    public_key: bytes
    stream: StreamKey


FIND_SIGNER: LiteralString = """
SELECT k.public_key, s.stream
FROM keys k
JOIN streams s ON s.tenant = k.tenant AND s.project = %(project)s AND s.producer = k.device
WHERE k.tenant = %(tenant)s AND k.keyid = %(keyid)s AND k.device = %(device)s AND k.state <> 'removed'
"""


async def find_signer(connection: Connection, *, tenant: str, device: str, project: str, keyid: str) -> Signer | None:
    """The device's key of that id; None if it has none, or is not enrolled in the project."""
    cursor = await connection.execute(
        FIND_SIGNER, {"tenant": tenant, "device": device, "project": project, "keyid": keyid}
    )
    row = await cursor.fetchone()
    if row is None:
        return None
    public_key, stream = row
    return Signer(keyid, bytes(public_key), StreamKey(tenant, stream))


INSERT: LiteralString = """
INSERT INTO keys (tenant, keyid, device, public_key)
VALUES (%(tenant)s, %(keyid)s, %(device)s, %(public_key)s)
ON CONFLICT DO NOTHING
"""


async def insert_if_new(connection: Connection, *, tenant: str, keyid: str, device: str, public_key: bytes) -> bool:
    """Register an active key; False if the tenant ever had one of that id, its device whatever."""
    parameters = {"tenant": tenant, "keyid": keyid, "device": device, "public_key": public_key}
    return (await connection.execute(INSERT, parameters)).rowcount == 1


@dataclass(frozen=True, slots=True)
class RegisteredKey:
    """Whose a key is and how it stands; the states are those of protocol section 8."""

    device: str
    state: str


FIND: LiteralString = "SELECT device, state FROM keys WHERE tenant = %(tenant)s AND keyid = %(keyid)s"


async def find(connection: Connection, tenant: str, keyid: str) -> RegisteredKey | None:
    """The tenant's key of that id, in whatever state."""
    row = await (await connection.execute(FIND, {"tenant": tenant, "keyid": keyid})).fetchone()
    return RegisteredKey(*row) if row else None


SET_STATE: LiteralString = """
UPDATE keys SET state = %(state)s, accept_until = NULL, changed_at = clock_timestamp()
WHERE tenant = %(tenant)s AND keyid = %(keyid)s
"""


async def set_state(connection: Connection, tenant: str, keyid: str, state: str) -> None:
    """Let a key stand at `state`, not `retiring`; the caller holds the locks of its device's streams."""
    await connection.execute(SET_STATE, {"tenant": tenant, "keyid": keyid, "state": state})


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as administrators see it; `age_s` is the whole seconds since it was registered."""

    keyid: str
    device: str
    state: str
    age_s: int
    accept_until: datetime | None
    registered_at: datetime
    changed_at: datetime


LIST: LiteralString = """
SELECT keyid, device, state, extract(epoch FROM clock_timestamp() - registered_at)::bigint, accept_until,
       registered_at, changed_at
FROM keys
WHERE tenant = %(tenant)s
  AND (%(device)s::text IS NULL OR device = %(device)s)
  AND (%(projects)s::text[] IS NULL
       OR EXISTS (SELECT FROM streams s
                  WHERE s.tenant = %(tenant)s AND s.producer = device AND s.project = ANY(%(projects)s)))
  AND (%(after)s::text IS NULL
       OR (device, registered_at, keyid) > (SELECT k.device, k.registered_at, k.keyid FROM keys k
                                            WHERE k.tenant = %(tenant)s AND k.keyid = %(after)s))
ORDER BY device, registered_at, keyid LIMIT %(limit)s
"""


async def list_of_tenant(
    connection: Connection, tenant: str, device: str | None = None, part: ListPart = WHOLE
) -> list[ListedKey]:
    """A tenant's keys, or those of one of its devices, by device, oldest first; `part.after` is one's id."""
    cursor = await connection.execute(LIST, {"tenant": tenant, "device": device, **asdict(part)})
    return [ListedKey(*row) for row in await cursor.fetchall()]

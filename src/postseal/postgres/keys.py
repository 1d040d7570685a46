"""Devices' public keys: found inside a verified scope (protocol section 4, check 3), registered and changed."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import LiteralString

from psycopg.rows import TupleRow

from postseal.postgres.ingest import StreamKey
from postseal.postgres.key_states import ACCEPT_UNTIL_NOW, STATE_NOW
from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection
from postseal.rules.keys import KeyState


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
    """A key and how it stands at `read_at`, by the database's clock.

    `age_s` is the whole seconds since it was registered; `accept_until` is None unless it retires.
    """

    keyid: str
    device: str
    state: KeyState
    age_s: int
    accept_until: datetime | None
    registered_at: datetime
    changed_at: datetime
    read_at: datetime


COLUMNS: LiteralString = """
SELECT k.keyid, k.device, {state}, extract(epoch FROM clock_timestamp() - k.registered_at)::bigint,
       {accept_until}, k.registered_at, k.changed_at, clock_timestamp()
FROM keys k
WHERE k.tenant = %(tenant)s
""".replace("{state}", STATE_NOW).replace("{accept_until}", ACCEPT_UNTIL_NOW)
FIND: LiteralString = COLUMNS + "AND k.keyid = %(keyid)s"


async def find(connection: Connection, tenant: str, keyid: str) -> RegisteredKey | None:
    """The tenant's key of that id, in whatever state."""
    row = await (await connection.execute(FIND, {"tenant": tenant, "keyid": keyid})).fetchone()
    return _key(row) if row else None


COUNT: LiteralString = """
SELECT count(*) FROM keys WHERE tenant = %(tenant)s AND device = %(device)s AND state <> 'removed'
"""


async def count(connection: Connection, tenant: str, device: str) -> int:
    """How many keys a device has that are not removed; they stay so many while the device is locked."""
    row = await (await connection.execute(COUNT, {"tenant": tenant, "device": device})).fetchone()
    return row[0] if row else 0


SET_STATE: LiteralString = """
UPDATE keys SET state = %(state)s, accept_until = NULL, changed_at = clock_timestamp()
WHERE tenant = %(tenant)s AND keyid = %(keyid)s
"""


async def set_state(connection: Connection, tenant: str, keyid: str, state: KeyState) -> None:
    """Let a key stand at `state`, not `retiring`; the caller holds the locks of its device's streams."""
    await connection.execute(SET_STATE, {"tenant": tenant, "keyid": keyid, "state": state})


LET_RETIRE: LiteralString = """
UPDATE keys SET state = 'retiring', changed_at = clock_timestamp(),
                accept_until = statement_timestamp() + make_interval(secs => %(overlap_s)s)
WHERE tenant = %(tenant)s AND device = %(device)s AND state = 'active'
  AND (%(keyid)s::text IS NULL OR keyid = %(keyid)s)
RETURNING keyid, accept_until
"""


async def let_retire(
    connection: Connection, tenant: str, device: str, *, overlap_s: int, keyid: str | None = None
) -> dict[str, datetime]:
    """Let a device's active keys, or that one of them, accept for `overlap_s` seconds more; until when each does.

    The caller has locked the device; where `overlap_s` can be 0, also its streams.
    """
    parameters = {"tenant": tenant, "device": device, "overlap_s": overlap_s, "keyid": keyid}
    return dict(await (await connection.execute(LET_RETIRE, parameters)).fetchall())


SPEAKING: LiteralString = """
SELECT k.keyid, k.public_key, {state} FROM keys k
WHERE k.tenant = %(tenant)s AND k.device = %(device)s AND k.state IN ('active', 'retiring')
ORDER BY k.registered_at DESC, k.keyid
""".replace("{state}", STATE_NOW)


async def speaking_for(connection: Connection, tenant: str, device: str) -> list[tuple[str, bytes, KeyState]]:
    """Id, public half and state of a device's keys that are active, or retire, or did until lately; newest first."""
    cursor = await connection.execute(SPEAKING, {"tenant": tenant, "device": device})
    return [(keyid, bytes(public_key), KeyState(state)) for keyid, public_key, state in await cursor.fetchall()]


LIST: LiteralString = """
{columns}
  AND (%(device)s::text IS NULL OR k.device = %(device)s)
  AND (%(projects)s::text[] IS NULL
       OR EXISTS (SELECT FROM streams s
                  WHERE s.tenant = %(tenant)s AND s.producer = k.device AND s.project = ANY(%(projects)s)))
  AND (%(after)s::text IS NULL
       OR (k.device, k.registered_at, k.keyid) > (SELECT a.device, a.registered_at, a.keyid FROM keys a
                                                  WHERE a.tenant = %(tenant)s AND a.keyid = %(after)s))
ORDER BY k.device, k.registered_at, k.keyid LIMIT %(limit)s
""".replace("{columns}", COLUMNS)


async def list_of_tenant(
    connection: Connection, tenant: str, device: str | None = None, part: ListPart = WHOLE
) -> list[RegisteredKey]:
    """A tenant's keys, or those of one of its devices, by device, oldest first; `part.after` is one's id."""
    cursor = await connection.execute(LIST, {"tenant": tenant, "device": device, **asdict(part)})
    return [_key(row) for row in await cursor.fetchall()]


def _key(row: TupleRow) -> RegisteredKey:
    keyid, device, state, *others = row
    return RegisteredKey(keyid, device, KeyState(state), *others)

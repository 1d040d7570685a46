"""The public halves of tenants' signing keys: registered, found, changed, published. The private ones never come here.

Whoever changes one takes the version of the tenant's set first (`postgres/keysets.py`), so such acts come one after the
other.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from psycopg.rows import TupleRow

from postseal.postgres.key_states import ACCEPT_UNTIL_NOW, STATE_NOW
from postseal.postgres.transaction import Connection
from postseal.rules.keys import KeyState


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key with which the control plane signs for a tenant, as it stands now."""

    keyid: str
    public_key: bytes
    state: str
    registered_at: datetime


# Of two that come at once the second waits for the first, and then conflicts with it: one key is active.
INSERT: LiteralString = """
INSERT INTO signing_keys (tenant, keyid, public_key) VALUES (%(tenant)s, %(keyid)s, %(public_key)s)
ON CONFLICT DO NOTHING
"""


async def insert_if_none_active(connection: Connection, *, tenant: str, keyid: str, public_key: bytes) -> bool:
    """Register the tenant's active signing key; False if it has one, or ever had one of that id."""
    parameters = {"tenant": tenant, "keyid": keyid, "public_key": public_key}
    return (await connection.execute(INSERT, parameters)).rowcount == 1


COLUMNS: LiteralString = """
SELECT k.keyid, k.public_key, {state}, k.registered_at FROM signing_keys k WHERE k.tenant = %(tenant)s
""".replace("{state}", STATE_NOW)
FIND_ACTIVE: LiteralString = COLUMNS + "AND k.state = 'active'"


async def find_active(connection: Connection, tenant: str) -> SigningKey | None:
    """The key with which new envelopes of the tenant are signed."""
    row = await (await connection.execute(FIND_ACTIVE, {"tenant": tenant})).fetchone()
    return SigningKey(*row) if row else None


LIST_SIGNING: LiteralString = COLUMNS + (
    "AND (k.state = 'active' OR k.state = 'retiring' AND clock_timestamp() < k.accept_until) "
    "ORDER BY k.registered_at, k.keyid"
)


async def list_signing(connection: Connection, tenant: str) -> list[SigningKey]:
    """The keys under which envelopes that were signed elsewhere are taken, oldest first."""
    cursor = await connection.execute(LIST_SIGNING, {"tenant": tenant})
    return [SigningKey(*row) for row in await cursor.fetchall()]


LIST_VERIFYING: LiteralString = COLUMNS + (
    "AND k.state IN ('active', 'retiring', 'verify-only') ORDER BY k.registered_at, k.keyid"
)


async def list_verifying(connection: Connection, tenant: str) -> list[SigningKey]:
    """The keys whose signatures are to be believed, oldest first: neither revoked ones nor removed ones."""
    cursor = await connection.execute(LIST_VERIFYING, {"tenant": tenant})
    return [SigningKey(*row) for row in await cursor.fetchall()]


@dataclass(frozen=True, slots=True)
class RegisteredSigningKey:
    """A signing key and how it stands at `read_at`, by the database's clock.

    `age_s` is the whole seconds since it was registered; `accept_until` is None unless it retires, and `ended_at`, when
    it ended to sign, unless it has.
    """

    keyid: str
    state: KeyState
    age_s: int
    accept_until: datetime | None
    registered_at: datetime
    changed_at: datetime
    ended_at: datetime | None
    read_at: datetime


REGISTERED: LiteralString = """
SELECT k.keyid, {state}, extract(epoch FROM clock_timestamp() - k.registered_at)::bigint, {accept_until},
       k.registered_at, k.changed_at,
       CASE WHEN k.state = 'active' OR k.accept_until > clock_timestamp() THEN NULL
            ELSE coalesce(k.accept_until, k.changed_at) END,
       clock_timestamp()
FROM signing_keys k WHERE k.tenant = %(tenant)s
""".replace("{state}", STATE_NOW).replace("{accept_until}", ACCEPT_UNTIL_NOW)
FIND: LiteralString = REGISTERED + "AND k.keyid = %(keyid)s"


async def find(connection: Connection, tenant: str, keyid: str) -> RegisteredSigningKey | None:
    """The tenant's signing key of that id, in whatever state."""
    row = await (await connection.execute(FIND, {"tenant": tenant, "keyid": keyid})).fetchone()
    return _registered(row) if row else None


LIST: LiteralString = REGISTERED + "ORDER BY k.registered_at, k.keyid"


async def list_of_tenant(connection: Connection, tenant: str) -> list[RegisteredSigningKey]:
    """All signing keys that a tenant ever had, oldest first."""
    return [_registered(row) for row in await (await connection.execute(LIST, {"tenant": tenant})).fetchall()]


SET_STATE: LiteralString = """
UPDATE signing_keys SET state = %(state)s, accept_until = NULL, changed_at = clock_timestamp()
WHERE tenant = %(tenant)s AND keyid = %(keyid)s
"""


async def set_state(connection: Connection, tenant: str, keyid: str, state: KeyState) -> None:
    """Let a signing key stand at `state`, neither `active` nor `retiring`."""
    await connection.execute(SET_STATE, {"tenant": tenant, "keyid": keyid, "state": state})


LET_RETIRE: LiteralString = """
UPDATE signing_keys SET state = 'retiring', changed_at = clock_timestamp(),
                        accept_until = statement_timestamp() + make_interval(secs => %(overlap_s)s)
WHERE tenant = %(tenant)s AND state = 'active'
RETURNING keyid, accept_until
"""


async def let_active_retire(connection: Connection, tenant: str, *, overlap_s: int) -> tuple[str, datetime] | None:
    """Let the active key be taken for `overlap_s` seconds more; its id and until when. None if there is none."""
    parameters = {"tenant": tenant, "overlap_s": overlap_s}
    row = await (await connection.execute(LET_RETIRE, parameters)).fetchone()
    return (row[0], row[1]) if row else None


# Sequences of a destination are given out under its lock, so `sealed_at` rises with them: behind the first envelope
# that was sealed after the key had ended there is none of its own, and only what is kept from before it is looked
# through.
KEPT: LiteralString = """
SELECT d.project, d.destination
FROM destinations d
CROSS JOIN LATERAL (
    SELECT v.keyid
    FROM payloads p
    JOIN deliveries v ON v.tenant = p.tenant AND v.stream = p.stream AND v.sequence = p.sequence
    WHERE p.tenant = d.tenant AND p.stream = d.stream
      AND (p.expires_at IS NULL OR clock_timestamp() < p.expires_at)
      AND (v.keyid = %(keyid)s OR v.sealed_at > %(ended_at)s::timestamptz + interval '1 minute')
    ORDER BY p.sequence LIMIT 1
) AS first
WHERE d.tenant = %(tenant)s AND first.keyid = %(keyid)s
ORDER BY d.project, d.destination LIMIT %(limit)s
"""
MAX_KEPT = 20
"""Destinations that are named at once."""


async def kept_for(connection: Connection, tenant: str, key: RegisteredSigningKey) -> list[str]:
    """The destinations (project/destination) for which envelopes are kept that a key which ended signed: MAX_KEPT.

    What was not delivered is kept, and so is what is dead and could be redriven.
    """
    parameters = {"tenant": tenant, "keyid": key.keyid, "ended_at": key.ended_at, "limit": MAX_KEPT}
    cursor = await connection.execute(KEPT, parameters)
    return [f"{project}/{destination}" for project, destination in await cursor.fetchall()]


def _registered(row: TupleRow) -> RegisteredSigningKey:
    keyid, state, *others = row
    return RegisteredSigningKey(keyid, KeyState(state), *others)

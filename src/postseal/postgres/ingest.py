"""One group of envelopes in one transaction: two exchanges with the database, a pure decision between them.

1. `open_group`: begin, lock the streams in id order, then read, with snapshots taken after the locks were had, the
   keys' states and whatever is retained under the envelopes' names
2. (the caller judges each envelope in order)
3. `close_group`: write identities, payloads, audit events and cursors set-wise, and now and then which keys were used;
   commit, and look at the commit

Locks are taken in id order, so that two groups cannot deadlock. The look-ups join by one index each under UNION ALL,
never by OR, and hash and merge joins, sequential and bitmap scans are off in this transaction: each statement is a
few index probes an envelope whatever the statistics say (a test holds the plans).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from msgspec import Struct

from postseal.postgres import arrays
from postseal.postgres.exchange import Statement, exchange
from postseal.postgres.key_states import STATE_NOW
from postseal.postgres.key_uses import KeyUse, note
from postseal.postgres.transaction import BEGIN, SET_BOUNDS_AND_PLANS, CommitWitness, Connection
from postseal.rules.keys import KeyState
from postseal.rules.stream import Cursor


class StreamKey(Struct, frozen=True, gc=False):
    """A stream's primary key."""

    tenant: str
    stream: int


class LookupNames(Struct, frozen=True, gc=False):
    """The names under which an envelope is looked up: 16 bytes of event id and of the idempotency key's SHA-256."""

    stream: StreamKey
    keyid: str
    event_id: bytes
    idempotency_hash: bytes


class LockedStream(Struct, frozen=True, gc=False):
    """A stream under this transaction's lock. `retention_s` is None where neither project nor tenant sets one."""

    cursor: Cursor
    retired: bool
    retention_s: int | None


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """What the database says of a group's streams, keys and names, true until the transaction ends."""

    streams: dict[StreamKey, LockedStream]
    keys: dict[tuple[str, str], KeyState]
    """By tenant and keyid; a key that is not there was removed."""
    identity_of_event: dict[tuple[StreamKey, bytes], bytes]
    event_of_idempotency_hash: dict[tuple[StreamKey, bytes], bytes]


class RetainedRow(Struct, frozen=True, gc=False):
    """A new envelope as it is written to `identities` and `payloads`."""

    names: LookupNames
    sequence: int
    event_identity: bytes
    payload: bytes
    signature: bytes
    retention_s: int

    def __repr__(self) -> str:
        return f"RetainedRow({self.event_identity.hex()})"  # neither payload nor signature may get into a log


class AuditRow(Struct, frozen=True, gc=False):
    """One audit event of the inbound path; the database adds time, transaction and number."""

    tenant: str
    project: str | None
    account: str
    device: str | None
    outcome: str
    reason: str | None
    event_identity: bytes | None
    undecodable: bool
    occurrences: int
    correlation_id: bytes
    salt: bytes


LOCK_STREAMS: LiteralString = """
SELECT s.tenant, s.stream, s.floor, s.contiguous, s.highest, s.above, s.retired,
       extract(epoch FROM coalesce(p.payload_retention, t.payload_retention))::bigint
FROM unnest(%(tenants)s::text[], %(streams)s::bigint[]) AS wanted (tenant, stream)
JOIN streams s ON s.tenant = wanted.tenant AND s.stream = wanted.stream
LEFT JOIN projects p ON p.tenant = s.tenant AND p.project = s.project
LEFT JOIN tenants t ON t.tenant = s.tenant
ORDER BY s.stream
FOR NO KEY UPDATE OF s
"""

# By the database's clock after the locks were had.
READ_KEYS: LiteralString = """
SELECT k.tenant, k.keyid, {state}
FROM unnest(%(tenants)s::text[], %(keyids)s::text[]) AS wanted (tenant, keyid)
JOIN keys k ON k.tenant = wanted.tenant AND k.keyid = wanted.keyid
""".replace("{state}", STATE_NOW)

# An equality join leaves the planner free to probe another index by (tenant, stream) and read a whole stream: with few
# rows or none that costs the same, and a generic plan of a fresh database lost most of its speed within seconds. An
# order over a range of rows, of which the first is asked for, leaves the one index that has that order.
LOOK_UP: LiteralString = """
SELECT true, i.tenant, i.stream, uuid_send(i.event_id), i.event_identity
FROM unnest(%(tenants)s::text[], %(streams)s::bigint[], %(event_ids)s::uuid[]) AS w (tenant, stream, event_id)
CROSS JOIN LATERAL (
    SELECT * FROM identities i
    WHERE (i.tenant, i.stream, i.event_id) >= (w.tenant, w.stream, w.event_id)
      AND (i.tenant, i.stream, i.event_id) <= (w.tenant, w.stream, w.event_id)
    ORDER BY i.tenant, i.stream, i.event_id LIMIT 1
) AS i
UNION ALL
SELECT false, i.tenant, i.stream, uuid_send(i.idempotency_hash), uuid_send(i.event_id)
FROM unnest(%(tenants)s::text[], %(streams)s::bigint[], %(hashes)s::uuid[]) AS w (tenant, stream, hash)
CROSS JOIN LATERAL (
    SELECT * FROM identities i
    WHERE (i.tenant, i.stream, i.idempotency_hash) >= (w.tenant, w.stream, w.hash)
      AND (i.tenant, i.stream, i.idempotency_hash) <= (w.tenant, w.stream, w.hash)
    ORDER BY i.tenant, i.stream, i.idempotency_hash LIMIT 1
) AS i
"""

# A cursor that did not move although its stream is locked would be a bug or somebody's trigger. It must fail before
# COMMIT, by a division by zero: the retry would find a duplicate and acknowledge it.
WRITE: LiteralString = """
WITH retained AS (
    INSERT INTO identities
        (tenant, stream, sequence, event_id, idempotency_hash, event_identity, keyid, accepted_at)
    SELECT n.*, clock_timestamp()
    FROM unnest(%(tenant)s::text[], %(stream)s::bigint[], %(sequence)s::bigint[], %(event_id)s::uuid[],
                %(idempotency_hash)s::uuid[], %(event_identity)s::bytea[], %(keyid)s::text[]) AS n
), stored AS (
    INSERT INTO payloads (tenant, stream, sequence, payload, signature, expires_at)
    SELECT n.tenant, n.stream, n.sequence, n.payload, n.signature,
           clock_timestamp() + make_interval(secs => n.retention_s)
    FROM unnest(%(tenant)s::text[], %(stream)s::bigint[], %(sequence)s::bigint[], %(payload)s::bytea[],
                %(signature)s::bytea[], %(retention_s)s::bigint[])
         AS n (tenant, stream, sequence, payload, signature, retention_s)
), audited AS (
    INSERT INTO audit_events (tenant, project, account, device, outcome, reason, event_identity, undecodable,
                              occurrences, correlation_id, salt, action)
    SELECT n.*, 'envelope'
    FROM unnest(%(a_tenant)s::text[], %(a_project)s::text[], %(a_account)s::text[], %(a_device)s::text[],
                %(a_outcome)s::text[], %(a_reason)s::text[], %(a_event_identity)s::bytea[],
                %(a_undecodable)s::bool[], %(a_occurrences)s::bigint[], %(a_correlation_id)s::uuid[],
                %(a_salt)s::bytea[]) AS n
), moved AS (
    UPDATE streams s SET contiguous = n.contiguous, highest = n.highest, above = n.above
    FROM unnest(%(s_tenant)s::text[], %(s_stream)s::bigint[], %(s_contiguous)s::bigint[], %(s_highest)s::bigint[],
                %(s_above)s::bytea[]) AS n (tenant, stream, contiguous, highest, above)
    WHERE s.tenant = n.tenant AND s.stream = n.stream
    RETURNING 1
)
SELECT 1 / (count(*) = cardinality(%(s_stream)s::bigint[]))::int FROM moved
"""


_BEGIN = Statement(BEGIN)
_SET_BOUNDS_AND_PLANS = Statement(SET_BOUNDS_AND_PLANS)
_LOCK_STREAMS = Statement(LOCK_STREAMS)
_READ_KEYS = Statement(READ_KEYS)
_LOOK_UP = Statement(LOOK_UP)
_WRITE = Statement(WRITE)
_COMMIT = Statement("COMMIT")


async def open_group(connection: Connection, names: Sequence[LookupNames]) -> OpenGroup:
    """Begin a transaction and lock the streams of `names`; a group that names none is only begun."""
    group = OpenGroup({}, {}, {}, {})
    begin = [_BEGIN(), _SET_BOUNDS_AND_PLANS()]
    if not names:
        await exchange(connection, begin)
        return group
    streams = list({name.stream for name in names})
    keys = list({(name.stream.tenant, name.keyid) for name in names})
    lock = _LOCK_STREAMS(
        tenants=arrays.texts([key.tenant for key in streams]),
        streams=arrays.int8s([key.stream for key in streams]),
    )
    read = _READ_KEYS(
        tenants=arrays.texts([tenant for tenant, _ in keys]),
        keyids=arrays.texts([keyid for _, keyid in keys]),
    )
    look_up = _LOOK_UP(
        tenants=arrays.texts([name.stream.tenant for name in names]),
        streams=arrays.int8s([name.stream.stream for name in names]),
        event_ids=arrays.uuids([name.event_id for name in names]),
        hashes=arrays.uuids([name.idempotency_hash for name in names]),
    )
    *_, locked, states, found = await exchange(connection, [*begin, lock, read, look_up])
    for tenant, stream, floor, contiguous, highest, above, retired, retention_s in locked.rows:
        cursor = Cursor(floor, contiguous, highest, bitmap_from_bytes(above))
        group.streams[StreamKey(tenant, stream)] = LockedStream(cursor, retired, retention_s)
    for tenant, keyid, state in states.rows:
        group.keys[tenant, keyid] = KeyState(state)
    for by_event_id, tenant, stream, name, value in found.rows:
        matches = group.identity_of_event if by_event_id else group.event_of_idempotency_hash
        matches[StreamKey(tenant, stream), name] = value
    return group


async def close_group(
    connection: Connection,
    witness: CommitWitness,
    *,
    retained: Sequence[RetainedRow],
    audits: Sequence[AuditRow],
    cursors: dict[StreamKey, Cursor],
    uses: Sequence[KeyUse],
) -> None:
    """Write all of it and commit; returns only when the commit is certain."""
    write = _WRITE(**_retained_columns(retained), **_audit_columns(audits), **_cursor_columns(cursors))
    noting = [note(uses)] if uses else []
    *_, committed = await exchange(connection, [write, *noting, _COMMIT()])
    witness.require_commit(committed.tag)


def _retained_columns(rows: Sequence[RetainedRow]) -> dict[str, bytes]:
    return {
        "tenant": arrays.texts([row.names.stream.tenant for row in rows]),
        "stream": arrays.int8s([row.names.stream.stream for row in rows]),
        "sequence": arrays.int8s([row.sequence for row in rows]),
        "event_id": arrays.uuids([row.names.event_id for row in rows]),
        "idempotency_hash": arrays.uuids([row.names.idempotency_hash for row in rows]),
        "event_identity": arrays.byteas([row.event_identity for row in rows]),
        "keyid": arrays.texts([row.names.keyid for row in rows]),
        "payload": arrays.byteas([row.payload for row in rows]),
        "signature": arrays.byteas([row.signature for row in rows]),
        "retention_s": arrays.int8s([row.retention_s for row in rows]),
    }


def _audit_columns(rows: Sequence[AuditRow]) -> dict[str, bytes]:
    return {
        "a_tenant": arrays.texts([row.tenant for row in rows]),
        "a_project": arrays.texts([row.project for row in rows]),
        "a_account": arrays.texts([row.account for row in rows]),
        "a_device": arrays.texts([row.device for row in rows]),
        "a_outcome": arrays.texts([row.outcome for row in rows]),
        "a_reason": arrays.texts([row.reason for row in rows]),
        "a_event_identity": arrays.byteas([row.event_identity for row in rows]),
        "a_undecodable": arrays.bools([row.undecodable for row in rows]),
        "a_occurrences": arrays.int8s([row.occurrences for row in rows]),
        "a_correlation_id": arrays.uuids([row.correlation_id for row in rows]),
        "a_salt": arrays.byteas([row.salt for row in rows]),
    }


def _cursor_columns(cursors: dict[StreamKey, Cursor]) -> dict[str, bytes]:
    return {
        "s_tenant": arrays.texts([key.tenant for key in cursors]),
        "s_stream": arrays.int8s([key.stream for key in cursors]),
        "s_contiguous": arrays.int8s([cursor.contiguous for cursor in cursors.values()]),
        "s_highest": arrays.int8s([cursor.highest for cursor in cursors.values()]),
        "s_above": arrays.byteas([bitmap_to_bytes(cursor.above) for cursor in cursors.values()]),
    }


def bitmap_to_bytes(above: int) -> bytes:
    """Least significant byte first, without trailing zero bytes: how `streams.above` keeps a bitmap."""
    return above.to_bytes((above.bit_length() + 7) // 8, "little")


def bitmap_from_bytes(above: bytes) -> int:
    """What `bitmap_to_bytes` kept."""
    return int.from_bytes(above, "little")

"""Giving out sequences: destinations under their lock, and what is new (role delivery).

1. `lock_destinations`, which also tells the database's time and the key that signs now
2. (under that lock, `sealed.py` finds what a key, an event id or a delivery's id brought before)
3. (the caller decides, builds payloads and signs)
4. `insert_sealed`: envelopes, payloads, queue, audit, and each destination's highest, by one statement

Destinations are locked first of all and in stream order (deliveries.py tells the order of all locks). What is inserted
after that has names that nobody else can have, so nothing waits while the locks are held.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, LiteralString
from uuid import UUID

from msgspec import Struct

from postseal.errors import Unavailable
from postseal.postgres import arrays
from postseal.postgres.signing_keys import FIND_ACTIVE, SigningKey
from postseal.postgres.transaction import SET_PLANS, Connection

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Lane = Literal["push", "pull", "held"]


class LockedDestination(Struct, frozen=True, gc=False):
    """A destination under this transaction's lock; the next sequence is `highest` + 1."""

    stream: int
    mode: Literal["push", "pull"]
    disabled: bool
    highest: int
    pending: int
    max_pending: int

    @property
    def lane(self) -> Lane:
        """Where what is sealed now has to wait."""
        return "held" if self.disabled else self.mode


@dataclass(frozen=True, slots=True)
class Locked:
    """What `lock_destinations` found, true until the transaction ends."""

    destinations: dict[tuple[str, str], LockedDestination]
    """By project and destination; one that is not there does not exist."""
    now_ms: int
    """The database's clock after the locks were had, in ms since 1970: for `issuedAtMs` and for what has expired."""
    signing_key: SigningKey | None
    """With which the tenant's envelopes are signed now."""


class SealedRow(Struct, frozen=True, gc=False):
    """A delivery as it is written. `account` and `correlation_id` go into its audit event."""

    stream: int
    sequence: int
    delivery: UUID
    event_id: UUID
    idempotency_key: str
    content_hash: bytes
    event_identity: bytes
    keyid: str
    payload: bytes
    signature: bytes
    lane: Lane
    attempt_limit: int
    expires_at_ms: int | None
    project: str
    account: str
    correlation_id: UUID

    def __repr__(self) -> str:
        return f"SealedRow({self.event_identity.hex()})"  # neither payload nor signature may get into a log


# The ranges are as in `deliveries`. A name stands for the same stream for ever.
NAMED: LiteralString = """
    SELECT d.tenant, d.stream
    FROM unnest(%(tenants)s::text[], %(projects)s::text[], %(names)s::text[]) AS w (tenant, project, name)
    CROSS JOIN LATERAL (
        SELECT d.tenant, d.stream FROM destinations d
        WHERE d.tenant = w.tenant AND d.project = w.project AND d.destination BETWEEN w.name AND w.name
        ORDER BY d.destination LIMIT 1
    ) AS d
    ORDER BY d.stream
"""

LOCK_DESTINATIONS: LiteralString = """
WITH named AS MATERIALIZED ({named})
SELECT d.project, d.destination, d.stream, d.mode, d.disabled_at IS NOT NULL, d.highest, d.max_pending
FROM named n
CROSS JOIN LATERAL (
    SELECT * FROM destinations d WHERE d.tenant = n.tenant AND d.stream BETWEEN n.stream AND n.stream
    ORDER BY d.stream LIMIT 1 FOR NO KEY UPDATE
) AS d
""".replace("{named}", NAMED)

# With a snapshot taken after the locks were had. What has left is never locked here: at worst a destination counts as
# full for the moment in which a settlement commits.
READ_SETTLED: LiteralString = """
WITH named AS MATERIALIZED ({named})
SELECT h.stream, h.settled
FROM named n
JOIN destination_health h ON (h.tenant, h.stream) BETWEEN (n.tenant, n.stream) AND (n.tenant, n.stream)
""".replace("{named}", NAMED)

READ_CLOCK: LiteralString = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"


async def lock_destinations(connection: Connection, tenant: str, names: Collection[tuple[str, str]]) -> Locked:
    """Lock the destinations of (project, destination), of however many projects, in stream order.

    Nobody else gives out their sequences, disables or enables them until this transaction ends. What comes behind it
    in the transaction is planned as this is.
    """
    distinct = list(dict.fromkeys(names))
    parameters = {
        "tenants": arrays.texts([tenant] * len(distinct)),
        "projects": arrays.texts([project for project, _ in distinct]),
        "names": arrays.texts([name for _, name in distinct]),
    }
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        locked = await connection.execute(LOCK_DESTINATIONS, parameters, binary=True)
        read = await connection.execute(READ_SETTLED, parameters, binary=True)
        clock = await connection.execute(READ_CLOCK, binary=True)
        active = await connection.execute(FIND_ACTIVE, {"tenant": tenant}, binary=True)
    settled = dict(await read.fetchall())
    now = await clock.fetchone()
    assert now is not None  # noqa: S101 - a SELECT without FROM has one row
    destinations = {
        (project, name): LockedDestination(stream, mode, disabled, highest, highest - settled[stream], max_pending)
        for project, name, stream, mode, disabled, highest, max_pending in await locked.fetchall()
    }
    key = await active.fetchone()
    return Locked(destinations, now[0], SigningKey(*key) if key else None)


# The destinations are locked by this transaction, so that each stays at its place.
INSERT_SEALED: LiteralString = """
WITH sealed AS (
    INSERT INTO deliveries (tenant, stream, sequence, delivery, event_id, idempotency_key, content_hash,
                            event_identity, keyid, sealed_at, expires_at)
    SELECT %(tenant)s, n.stream, n.sequence, n.delivery, n.event_id, n.idempotency_key, n.content_hash,
           n.event_identity, n.keyid, clock_timestamp(), n.expires_at
    FROM unnest(%(stream)s::bigint[], %(sequence)s::bigint[], %(delivery)s::uuid[], %(event_id)s::uuid[],
                %(idempotency_key)s::text[], %(content_hash)s::bytea[], %(event_identity)s::bytea[],
                %(keyid)s::text[], %(expires_at)s::timestamptz[])
         AS n (stream, sequence, delivery, event_id, idempotency_key, content_hash, event_identity, keyid, expires_at)
), stored AS (
    INSERT INTO payloads (tenant, stream, sequence, payload, signature)
    SELECT %(tenant)s, n.*
    FROM unnest(%(stream)s::bigint[], %(sequence)s::bigint[], %(payload)s::bytea[], %(signature)s::bytea[]) AS n
), queued AS (
    INSERT INTO queue (tenant, stream, sequence, lane, due_at, attempt_limit, expires_at)
    SELECT %(tenant)s, n.stream, n.sequence, n.lane, least(clock_timestamp(), n.expires_at), n.attempt_limit,
           n.expires_at
    FROM unnest(%(stream)s::bigint[], %(sequence)s::bigint[], %(lane)s::text[], %(attempt_limit)s::bigint[],
                %(expires_at)s::timestamptz[]) AS n (stream, sequence, lane, attempt_limit, expires_at)
), audited AS (
    INSERT INTO audit_events (tenant, project, account, action, outcome, event_identity, correlation_id)
    SELECT %(tenant)s, n.project, n.account, 'enqueue', 'accepted', n.event_identity, n.correlation_id
    FROM unnest(%(project)s::text[], %(account)s::text[], %(event_identity)s::bytea[], %(correlation_id)s::uuid[])
         AS n (project, account, event_identity, correlation_id)
), given_out AS MATERIALIZED (
    SELECT d.ctid AS place, n.lowest, n.highest, n.number
    FROM (
        SELECT tenant, stream, min(sequence) AS lowest, max(sequence) AS highest, count(*) AS number
        FROM unnest(%(tenants)s::text[], %(stream)s::bigint[], %(sequence)s::bigint[]) AS n (tenant, stream, sequence)
        GROUP BY tenant, stream
    ) AS n
    CROSS JOIN LATERAL (
        SELECT d.ctid FROM destinations d WHERE d.tenant = n.tenant AND d.stream BETWEEN n.stream AND n.stream
        ORDER BY d.stream LIMIT 1
    ) AS d
)
UPDATE destinations d SET highest = n.highest
FROM given_out n
WHERE d.ctid = n.place AND n.lowest = d.highest + 1 AND n.highest = d.highest + n.number
"""


async def insert_sealed(connection: Connection, tenant: str, rows: Sequence[SealedRow]) -> None:
    """Write deliveries whose destinations are locked, with one audit event each (`enqueue`, `accepted`).

    Raises Unavailable unless the sequences of each stream go on without a hole from its highest.
    """
    written = await connection.execute(INSERT_SEALED, _columns(tenant, rows))
    streams = {row.stream for row in rows}
    if written.rowcount != len(streams):
        # Not even a bug can bring this about while the destinations are locked; a hole would never be filled.
        raise Unavailable(f"{len(streams)} destinations were locked, {written.rowcount} were updated")


def _columns(tenant: str, rows: Sequence[SealedRow]) -> dict[str, bytes | str]:
    return {
        "tenant": tenant,
        "tenants": arrays.texts([tenant] * len(rows)),
        "stream": arrays.int8s([row.stream for row in rows]),
        "sequence": arrays.int8s([row.sequence for row in rows]),
        "delivery": arrays.uuids([row.delivery.bytes for row in rows]),
        "event_id": arrays.uuids([row.event_id.bytes for row in rows]),
        "idempotency_key": arrays.texts([row.idempotency_key for row in rows]),
        "content_hash": arrays.byteas([row.content_hash for row in rows]),
        "event_identity": arrays.byteas([row.event_identity for row in rows]),
        "keyid": arrays.texts([row.keyid for row in rows]),
        "payload": arrays.byteas([row.payload for row in rows]),
        "signature": arrays.byteas([row.signature for row in rows]),
        "lane": arrays.texts([row.lane for row in rows]),
        "attempt_limit": arrays.int8s([row.attempt_limit for row in rows]),
        "expires_at": arrays.timestamps([_moment(row.expires_at_ms) for row in rows]),
        "project": arrays.texts([row.project for row in rows]),
        "account": arrays.texts([row.account for row in rows]),
        "correlation_id": arrays.uuids([row.correlation_id.bytes for row in rows]),
    }


def _moment(unix_ms: int | None) -> datetime | None:
    return None if unix_ms is None else UNIX_EPOCH + timedelta(milliseconds=unix_ms)

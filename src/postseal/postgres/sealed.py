"""What was sealed before, found by a key, an event id or a delivery's id, and in which state it is (role delivery)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString
from uuid import UUID

from msgspec import Struct

from postseal.postgres import arrays
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import State


class SealedNames(Struct, frozen=True, gc=False):
    """The names under which a delivery is looked up before it is sealed. None: its event id is made here."""

    stream: int
    idempotency_key: str
    delivery: UUID
    event_id: UUID | None = None


class SealedBefore(Struct, frozen=True, gc=False):
    """A delivery that was sealed before, in the state in which it is now."""

    stream: int
    sequence: int
    delivery: UUID
    event_id: UUID
    idempotency_key: str
    content_hash: bytes
    event_identity: bytes
    state: State


@dataclass(frozen=True, slots=True)
class Found:
    """What `find_sealed` found."""

    by_key: dict[tuple[int, str], SealedBefore]
    """By stream and idempotency key."""
    by_event: dict[tuple[int, UUID], SealedBefore]
    """By stream and event id."""
    by_delivery: dict[UUID, SealedBefore]


STATE: LiteralString = """
CASE WHEN s.state IS NOT NULL THEN s.state
     WHEN q.stage = 'leased' AND q.due_at > clock_timestamp() THEN 'delivering'
     WHEN q.expires_at <= clock_timestamp() THEN 'expired'
     ELSE 'pending' END
"""
"""How a delivery stands, with its row of `queue` as q or of `settlements` as s. An ended lease, and an expiry that has
passed, count as soon as their time comes, before a claim has written them down."""

# The ranges are as in `deliveries`.
FIND_SEALED: LiteralString = """
SELECT f.wanted, f.stream, f.sequence, f.delivery, f.event_id, f.idempotency_key, f.content_hash, f.event_identity,
       {state}
FROM (
    SELECT 'key' AS wanted, v.*
    FROM unnest(%(tenants)s::text[], %(streams)s::bigint[], %(keys)s::text[]) AS w (tenant, stream, name)
    CROSS JOIN LATERAL (
        SELECT * FROM deliveries v
        WHERE v.tenant = w.tenant AND v.stream = w.stream AND v.idempotency_key BETWEEN w.name AND w.name
        ORDER BY v.idempotency_key LIMIT 1
    ) AS v
    UNION ALL
    SELECT 'event', v.*
    FROM unnest(%(event_tenants)s::text[], %(event_streams)s::bigint[], %(events)s::uuid[]) AS w (tenant, stream, name)
    CROSS JOIN LATERAL (
        SELECT * FROM deliveries v
        WHERE v.tenant = w.tenant AND v.stream = w.stream AND v.event_id BETWEEN w.name AND w.name
        ORDER BY v.event_id LIMIT 1
    ) AS v
    UNION ALL
    SELECT 'delivery', v.*
    FROM unnest(%(tenants)s::text[], %(deliveries)s::uuid[]) AS w (tenant, name)
    CROSS JOIN LATERAL (
        SELECT * FROM deliveries v
        WHERE v.tenant = w.tenant AND v.delivery BETWEEN w.name AND w.name
        ORDER BY v.delivery LIMIT 1
    ) AS v
) AS f
LEFT JOIN queue q ON (q.tenant, q.stream, q.sequence)
                     BETWEEN (f.tenant, f.stream, f.sequence) AND (f.tenant, f.stream, f.sequence)
LEFT JOIN settlements s ON (s.tenant, s.stream, s.sequence)
                           BETWEEN (f.tenant, f.stream, f.sequence) AND (f.tenant, f.stream, f.sequence)
""".replace("{state}", STATE)


async def find_sealed(connection: Connection, tenant: str, names: Sequence[SealedNames]) -> Found:
    """What was sealed under any of `names`; the caller has locked the destinations (`lock_destinations`)."""
    events = [(name.stream, name.event_id) for name in names if name.event_id is not None]
    parameters = {
        "tenants": arrays.texts([tenant] * len(names)),
        "streams": arrays.int8s([name.stream for name in names]),
        "keys": arrays.texts([name.idempotency_key for name in names]),
        "deliveries": arrays.uuids([name.delivery.bytes for name in names]),
        "event_tenants": arrays.texts([tenant] * len(events)),
        "event_streams": arrays.int8s([stream for stream, _ in events]),
        "events": arrays.uuids([event.bytes for _, event in events]),
    }
    cursor = await connection.execute(FIND_SEALED, parameters, binary=True)
    found = Found({}, {}, {})
    for row in await cursor.fetchall():
        wanted, *columns, state = row
        before = SealedBefore(*columns, state=State(state))
        match wanted:
            case "key":
                found.by_key[before.stream, before.idempotency_key] = before
            case "event":
                found.by_event[before.stream, before.event_id] = before
            case _:
                found.by_delivery[before.delivery] = before
    return found

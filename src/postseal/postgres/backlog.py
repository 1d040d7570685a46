"""What waits in the whole database, of all tenants: holes in streams, expired payloads, mail. Read now and then.

No index holds the cursors, because each of their updates must stay a heap-only one. So holes are found by a scan, which
is bounded in rows: 200,000 streams took 0.1 s. What has expired is found by a probe of an index for each tenant.

What is pending is told by two counters of each destination, so that destinations are scanned and not deliveries. Which
of them is due longest is told by the first entries of the workers' index for each destination that has mail in it.
"""

from dataclasses import dataclass
from typing import LiteralString

from psycopg.rows import TupleRow

from postseal.postgres.transaction import SET_PLANS, Connection

MAX_STREAMS = 200_000
MAX_EXPIRED = 10_000
MAX_TENANTS = 20_000
MAX_DESTINATIONS = 200_000
MAX_QUEUED_STREAMS = 2_000
MAX_DEAD = 10_000
MAX_INTENTS = 10_000
STATEMENT_TIMEOUT: LiteralString = "1s"


@dataclass(frozen=True, slots=True)
class Backlog:
    """The state of the whole database, of all tenants together."""

    streams: int
    """How many were looked at, at most MAX_STREAMS."""
    streams_with_holes: int
    missing_sequences: int
    oldest_payload_age_s: float
    """The greatest of those that expire next in a tenant, of MAX_TENANTS; 0 where none will."""
    held_tenants: int
    """What has expired of theirs is not to be deleted, and does not count below."""
    expired_payloads: int
    """Counted up to MAX_EXPIRED."""
    expired_age_s: float
    """How long ago the first of them expired; 0 where none has."""


@dataclass(frozen=True, slots=True)
class OutboundBacklog:
    """What is to be sent, of all tenants together."""

    pending: int
    """Waiting or out, of the first MAX_DESTINATIONS destinations."""
    held: int
    """Those of them that disabled destinations keep back."""
    failing_destinations: int
    intents: int
    """Counted up to MAX_INTENTS."""
    intent_age_s: float
    """Of the oldest of those; 0 where there are none."""
    overdue_s: float
    """How long ago the first of what waits for a worker became due; 0 where nothing is due. Held mail is not."""
    dead_letters: int
    """Counted up to MAX_DEAD."""


LIMIT_TIME: LiteralString = f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'"

READ_HOLES: LiteralString = """
SELECT count(*),
       count(*) FILTER (WHERE above <> ''),
       coalesce(sum(highest - contiguous - bit_count(above)) FILTER (WHERE above <> ''), 0)::bigint
FROM (SELECT contiguous, highest, above FROM streams LIMIT %(most)s) AS s
"""

# now() and not clock_timestamp(), which no index can be searched by. What was sent has no identity.
READ_EXPIRY: LiteralString = """
WITH of_tenants AS MATERIALIZED (
    SELECT t.tenant, EXISTS (SELECT FROM holds h WHERE h.tenant = t.tenant) AS held, first.expires_at, i.accepted_at
    FROM (SELECT tenant FROM tenants ORDER BY tenant LIMIT %(tenants)s) AS t
    LEFT JOIN LATERAL (
        SELECT p.expires_at FROM payloads p WHERE p.tenant = t.tenant AND p.expires_at <= now()
        ORDER BY p.expires_at LIMIT 1
    ) AS first ON true
    LEFT JOIN LATERAL (
        SELECT p.stream, p.sequence FROM payloads p WHERE p.tenant = t.tenant AND p.expires_at > now()
        ORDER BY p.expires_at LIMIT 1
    ) AS next ON true
    LEFT JOIN identities i ON i.tenant = t.tenant AND i.stream = next.stream AND i.sequence = next.sequence
), counted AS (
    SELECT FROM of_tenants o
    CROSS JOIN LATERAL (
        SELECT FROM payloads p WHERE p.tenant = o.tenant AND p.expires_at <= now() ORDER BY p.expires_at LIMIT %(most)s
    ) AS p
    WHERE NOT o.held AND o.expires_at IS NOT NULL
    LIMIT %(most)s
)
SELECT coalesce(max(extract(epoch FROM now() - accepted_at)), 0)::float8,
       count(*) FILTER (WHERE held),
       (SELECT count(*) FROM counted),
       coalesce(extract(epoch FROM now() - min(expires_at) FILTER (WHERE NOT held)), 0)::float8
FROM of_tenants
"""


async def read_backlog(connection: Connection) -> Backlog:
    """The backlog as it stands; takes at most STATEMENT_TIMEOUT a statement."""
    await connection.execute(LIMIT_TIME)
    holes = await _one_row(connection, READ_HOLES, {"most": MAX_STREAMS})
    await connection.execute(f"SELECT {SET_PLANS}")
    expiry = await _one_row(connection, READ_EXPIRY, {"most": MAX_EXPIRED, "tenants": MAX_TENANTS})
    return Backlog(*holes, *expiry)


READ_PENDING: LiteralString = """
SELECT coalesce(sum(d.highest - h.settled), 0)::bigint,
       coalesce(sum(d.highest - h.settled) FILTER (WHERE d.disabled_at IS NOT NULL), 0)::bigint,
       count(*) FILTER (WHERE h.failing_since IS NOT NULL)
FROM (SELECT tenant, stream, highest, disabled_at FROM destinations LIMIT %(most)s) AS d
JOIN destination_health h USING (tenant, stream)
"""

READ_INTENTS: LiteralString = """
SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8
FROM (SELECT created_at FROM intents LIMIT %(most)s) AS counted
"""

# As in `turns`, the next stream is the first entry of the index behind all entries of the last.
READ_OVERDUE: LiteralString = """
WITH RECURSIVE streams AS (
    (
        SELECT q.tenant, q.stream FROM queue q WHERE q.lane = 'push' ORDER BY q.tenant, q.stream LIMIT 1
    )
    UNION ALL
    SELECT n.tenant, n.stream
    FROM streams s
    CROSS JOIN LATERAL (
        SELECT q.tenant, q.stream FROM queue q
        WHERE q.lane = 'push' AND (q.tenant, q.stream) > (s.tenant, s.stream)
        ORDER BY q.tenant, q.stream LIMIT 1
    ) AS n
)
SELECT coalesce(greatest(extract(epoch FROM clock_timestamp() - min(first.due_at)), 0), 0)::float8
FROM (SELECT * FROM streams LIMIT %(most)s) AS s
CROSS JOIN LATERAL (
    SELECT FROM destinations d
    WHERE d.tenant = s.tenant AND d.stream BETWEEN s.stream AND s.stream AND d.disabled_at IS NULL
    ORDER BY d.stream LIMIT 1
) AS enabled
CROSS JOIN (VALUES ('fresh'), ('retry'), ('leased')) AS g (stage)
CROSS JOIN LATERAL (
    SELECT q.due_at FROM queue q
    WHERE q.tenant = s.tenant AND q.stream = s.stream AND q.lane = 'push' AND q.stage = g.stage
    ORDER BY q.due_at LIMIT 1
) AS first
"""

READ_DEAD: LiteralString = """
SELECT count(*) FROM (
    SELECT FROM settlements WHERE state = 'dead' ORDER BY tenant, project, settled_at LIMIT %(most)s
) AS counted
"""


async def read_outbound_backlog(connection: Connection) -> OutboundBacklog:
    """What is to be sent (role delivery); takes at most STATEMENT_TIMEOUT a statement."""
    await connection.execute(LIMIT_TIME)
    pending = await _one_row(connection, READ_PENDING, {"most": MAX_DESTINATIONS})
    intents = await _one_row(connection, READ_INTENTS, {"most": MAX_INTENTS})
    await connection.execute(f"SELECT {SET_PLANS}")
    overdue = await _one_row(connection, READ_OVERDUE, {"most": MAX_QUEUED_STREAMS})
    dead_letters = await _one_row(connection, READ_DEAD, {"most": MAX_DEAD})
    return OutboundBacklog(*pending, *intents, *overdue, *dead_letters)


async def _one_row(connection: Connection, statement: LiteralString, bounds: dict[str, int]) -> TupleRow:
    row = await (await connection.execute(statement, bounds)).fetchone()
    assert row is not None  # noqa: S101 - an aggregate has one row
    return row

"""What waits in the whole database, of all tenants: holes in streams, expired payloads, mail. Read now and then.

No index holds the cursors, because each of their updates must stay a heap-only one. So holes are found by a scan, which
is bounded in rows: 200,000 streams took 0.1 s. Payloads are found at both ends of their index by expiry.

What is pending is told by two counters of each destination, so that destinations are scanned and not deliveries. Which
of them is due longest is told by the first entries of the workers' index for each destination that has mail in it.
"""

from dataclasses import dataclass
from typing import LiteralString

from psycopg.rows import TupleRow

from postseal.postgres.transaction import SET_PLANS, Connection

MAX_STREAMS = 200_000
MAX_EXPIRED = 10_000
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
    """Of the payload that expires next; 0 where none will."""
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

# now() and not clock_timestamp(), which no index can be searched by.
READ_EXPIRY: LiteralString = """
SELECT coalesce((
           SELECT extract(epoch FROM now() - i.accepted_at)
           FROM (SELECT tenant, stream, sequence FROM payloads
                 WHERE expires_at > now() ORDER BY expires_at LIMIT 1) AS p
           JOIN identities i USING (tenant, stream, sequence)
       ), 0)::float8,
       count(*),
       coalesce(extract(epoch FROM now() - min(expires_at)), 0)::float8
FROM (SELECT expires_at FROM payloads WHERE expires_at <= now() ORDER BY expires_at LIMIT %(most)s) AS expired
"""


async def read_backlog(connection: Connection) -> Backlog:
    """The backlog as it stands; takes at most STATEMENT_TIMEOUT a statement."""
    await connection.execute(LIMIT_TIME)
    holes = await (await connection.execute(READ_HOLES, {"most": MAX_STREAMS})).fetchone()
    expiry = await (await connection.execute(READ_EXPIRY, {"most": MAX_EXPIRED})).fetchone()
    assert holes is not None  # noqa: S101 - an aggregate has one row
    assert expiry is not None  # noqa: S101 - so has this
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
    pending = await _one_row(connection, READ_PENDING, MAX_DESTINATIONS)
    intents = await _one_row(connection, READ_INTENTS, MAX_INTENTS)
    await connection.execute(f"SELECT {SET_PLANS}")
    overdue = await _one_row(connection, READ_OVERDUE, MAX_QUEUED_STREAMS)
    dead_letters = await _one_row(connection, READ_DEAD, MAX_DEAD)
    return OutboundBacklog(*pending, *intents, *overdue, *dead_letters)


async def _one_row(connection: Connection, statement: LiteralString, most: int) -> TupleRow:
    row = await (await connection.execute(statement, {"most": most})).fetchone()
    assert row is not None  # noqa: S101 - an aggregate has one row
    return row

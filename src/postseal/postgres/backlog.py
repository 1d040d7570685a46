"""What waits in the whole database: holes in streams, payloads that have expired. Read now and then, for all tenants.

No index holds the cursors, because each of their updates must stay a heap-only one. So holes are found by a scan, which
is bounded in rows: 200,000 streams took 0.1 s. Payloads are found at both ends of their index by expiry.
"""

from dataclasses import dataclass
from typing import LiteralString

from postseal.postgres.transaction import Connection

MAX_STREAMS = 200_000
MAX_EXPIRED = 10_000
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

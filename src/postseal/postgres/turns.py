"""Which streams have something due, for whoever shares out turns (role delivery)."""

from typing import LiteralString

from msgspec import Struct

from postseal.postgres.deliveries import WorkLane
from postseal.postgres.ingest import SET_PLANS
from postseal.postgres.transaction import Connection


class Due(Struct, frozen=True, gc=False):
    """A stream of which something is due; an expired lease counts as a retry."""

    tenant: str
    stream: int
    fresh_due: bool
    retries_due: bool


# The next stream is the first entry of the index behind all entries of the last: what lies between is not read.
_DUE_TURNS: LiteralString = """
WITH RECURSIVE streams AS (
    (
        SELECT q.tenant, q.stream FROM queue q
        WHERE q.lane = '{lane}' AND (q.tenant, q.stream) > (%(tenant)s, %(stream)s)
        ORDER BY q.tenant, q.stream LIMIT 1
    )
    UNION ALL
    SELECT n.tenant, n.stream
    FROM streams s
    CROSS JOIN LATERAL (
        SELECT q.tenant, q.stream FROM queue q
        WHERE q.lane = '{lane}' AND (q.tenant, q.stream) > (s.tenant, s.stream)
        ORDER BY q.tenant, q.stream LIMIT 1
    ) AS n
)
SELECT s.tenant, s.stream, fresh.due IS TRUE, retry.due IS TRUE OR lease.due IS TRUE
FROM streams s
CROSS JOIN LATERAL (
    SELECT FROM destinations d
    WHERE d.tenant = s.tenant AND d.stream BETWEEN s.stream AND s.stream AND d.disabled_at IS NULL
    ORDER BY d.stream LIMIT 1
) AS enabled
LEFT JOIN LATERAL (
    SELECT true AS due FROM queue q
    WHERE q.tenant = s.tenant AND q.stream = s.stream AND q.lane = '{lane}' AND q.stage = 'fresh'
      AND q.due_at <= statement_timestamp()
    ORDER BY q.due_at LIMIT 1
) AS fresh ON true
LEFT JOIN LATERAL (
    SELECT true AS due FROM queue q
    WHERE q.tenant = s.tenant AND q.stream = s.stream AND q.lane = '{lane}' AND q.stage = 'retry'
      AND q.due_at <= statement_timestamp()
    ORDER BY q.due_at LIMIT 1
) AS retry ON true
LEFT JOIN LATERAL (
    SELECT true AS due FROM queue q
    WHERE q.tenant = s.tenant AND q.stream = s.stream AND q.lane = '{lane}' AND q.stage = 'leased'
      AND q.due_at <= statement_timestamp()
    ORDER BY q.due_at LIMIT 1
) AS lease ON true
WHERE fresh.due OR retry.due OR lease.due
LIMIT %(limit)s
"""
DUE_TURNS: dict[WorkLane, LiteralString] = {
    "push": _DUE_TURNS.replace("{lane}", "push"),
    "pull": _DUE_TURNS.replace("{lane}", "pull"),
}


async def due_turns(connection: Connection, *, lane: WorkLane, after: tuple[str, int] | None, limit: int) -> list[Due]:
    """The first `limit` streams behind `after` (None: the first of all) of which something is due.

    In (tenant, stream) order; fewer than `limit` means that the end was reached. A disabled destination has none due.
    It takes a few index probes a stream with mail in the lane, due or not.
    """
    tenant, stream = after or ("", 0)
    parameters = {"tenant": tenant, "stream": stream, "limit": limit}
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(DUE_TURNS[lane], parameters)
    return [Due(*row) for row in await cursor.fetchall()]

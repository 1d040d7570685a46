"""Which streams have something due, for whoever shares out turns (role delivery).

Two ways lead there, and each is bounded by how many streams it walks over:

* `due_turns` leaps from stream to stream in the queue, so that it costs nothing where nothing waits. It walks over dead
  entries of the index too, and under a snapshot that stays open for hours those are millions: it then gives up
* `pending_turns` walks over the destinations, of which each costs two probes, whether it has mail or not. It never
  looks at the queue, so it does not know what of the mail is due
"""

from typing import LiteralString

from msgspec import Struct
from psycopg.errors import QueryCanceled

from postseal.postgres.deliveries import WorkLane
from postseal.postgres.transaction import SET_PLANS, Connection

LOOK_TIMEOUT: LiteralString = "1s"
"""Long after it the queue would be read in vain: what is pending is read in its place (`outbound.scheduler`)."""
LAST_STREAM = 2**63 - 1

Position = tuple[str, int]
"""A tenant and a stream."""
START: Position = ("", 0)
END: Position = ("~", LAST_STREAM)
"""Behind all of them: no tenant's id has a character behind z."""


class LookTimeout(Exception):
    """The streams could not be read within LOOK_TIMEOUT."""


class Due(Struct, frozen=True, gc=False):
    """A stream, and what of it is due; an expired lease counts as a retry."""

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
          AND (q.tenant, q.stream) <= (%(last_tenant)s, %(last_stream)s)
        ORDER BY q.tenant, q.stream LIMIT 1
    )
    UNION ALL
    SELECT n.tenant, n.stream
    FROM streams s
    CROSS JOIN LATERAL (
        SELECT q.tenant, q.stream FROM queue q
        WHERE q.lane = '{lane}' AND (q.tenant, q.stream) > (s.tenant, s.stream)
          AND (q.tenant, q.stream) <= (%(last_tenant)s, %(last_stream)s)
        ORDER BY q.tenant, q.stream LIMIT 1
    ) AS n
)
SELECT s.tenant, s.stream, (enabled.yes AND fresh.due) IS TRUE, (enabled.yes AND (retry.due OR lease.due)) IS TRUE
FROM (SELECT tenant, stream FROM streams LIMIT %(limit)s) AS s
LEFT JOIN LATERAL (
    SELECT true AS yes FROM destinations d
    WHERE d.tenant = s.tenant AND d.stream BETWEEN s.stream AND s.stream AND d.disabled_at IS NULL
    ORDER BY d.stream LIMIT 1
) AS enabled ON true
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
"""
DUE_TURNS: dict[WorkLane, LiteralString] = {
    "push": _DUE_TURNS.replace("{lane}", "push"),
    "pull": _DUE_TURNS.replace("{lane}", "pull"),
}


async def due_turns(
    connection: Connection, *, lane: WorkLane, after: Position, through: Position = END, limit: int
) -> list[Due]:
    """The first `limit` streams behind `after`, through `through`, that have mail in the lane; and what of it is due.

    In (tenant, stream) order; fewer than `limit` means that the end was reached. A disabled destination has none due.
    It takes a few index probes a stream. Raises LookTimeout.
    """
    limits: LiteralString = f"{SET_PLANS}, set_config('statement_timeout', '{LOOK_TIMEOUT}', true)"
    try:
        return await _read(connection, limits, DUE_TURNS[lane], _bounds(after, through, limit))
    except QueryCanceled:
        raise LookTimeout from None


# In small tables the index by name costs the same, and what it finds would have to be sorted.
SET_WALK: LiteralString = f"""{SET_PLANS},
       set_config('enable_sort', 'off', true), set_config('enable_incremental_sort', 'off', true)
"""
# The walk is bounded before anything is thrown away.
PENDING_TURNS: LiteralString = """
SELECT w.tenant, w.stream, w.has_mail AND w.highest > h.settled, w.has_mail AND w.highest > h.settled
FROM (
    SELECT d.tenant, d.stream, d.highest, d.mode = %(lane)s AND d.disabled_at IS NULL AS has_mail FROM destinations d
    WHERE (d.tenant, d.stream) > (%(tenant)s, %(stream)s)
      AND (d.tenant, d.stream) <= (%(last_tenant)s, %(last_stream)s)
    ORDER BY d.tenant, d.stream LIMIT %(limit)s
) AS w
JOIN destination_health h ON (h.tenant, h.stream) BETWEEN (w.tenant, w.stream) AND (w.tenant, w.stream)
"""


async def pending_turns(
    connection: Connection, *, lane: WorkLane, after: Position, through: Position = END, limit: int
) -> list[Due]:
    """The first `limit` streams behind `after`, through `through`, whether they have mail or not.

    What has any pending counts as due, though it may be out, or wait for a retry: a claim tells.
    """
    return await _read(connection, SET_WALK, PENDING_TURNS, _bounds(after, through, limit) | {"lane": lane})


def _bounds(after: Position, through: Position, limit: int) -> dict[str, str | int]:
    return {
        "tenant": after[0],
        "stream": after[1],
        "last_tenant": through[0],
        "last_stream": through[1],
        "limit": limit,
    }


async def _read(
    connection: Connection, settings: LiteralString, statement: LiteralString, parameters: dict[str, str | int]
) -> list[Due]:
    async with connection.pipeline():
        await connection.execute(f"SELECT {settings}")
        cursor = await connection.execute(statement, parameters)
    return [Due(*row) for row in await cursor.fetchall()]

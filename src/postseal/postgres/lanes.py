"""Which queued mail is in the workers' index: a disabled destination's is held, and let go again, in bounded steps.

A destination counts as disabled from the commit on that says so, because claims look at it. Moving its mail out of the
lane spares the workers its index entries; what was not moved back after it was enabled is not sent. The locks are those
of `deliveries`: the destination, shared, so that it stays as it is meanwhile, then the rows in order.
"""

from typing import LiteralString

from postseal.postgres.transaction import SET_PLANS, Connection

MAX_MOVED = 1000
"""By one call, which holds up the sealing for its destination meanwhile."""

LOCK: LiteralString = """
SELECT mode, disabled_at IS NOT NULL FROM destinations
WHERE tenant = %(tenant)s AND stream = %(stream)s FOR SHARE
"""


_MOVE: LiteralString = """
WITH found AS MATERIALIZED (
    SELECT q.tenant, q.stream, q.sequence FROM queue q
    WHERE q.tenant = %(tenant)s AND q.stream = %(stream)s AND q.lane = '{lane}' LIMIT %(limit)s
), mine AS MATERIALIZED (
    SELECT q.tenant, q.stream, q.sequence
    FROM found f
    JOIN queue q ON (q.tenant, q.stream, q.sequence)
                    BETWEEN (f.tenant, f.stream, f.sequence) AND (f.tenant, f.stream, f.sequence)
    ORDER BY q.sequence FOR NO KEY UPDATE OF q
), moved AS (
    UPDATE queue q SET {change}
    FROM mine m WHERE (q.tenant, q.stream, q.sequence)
                      BETWEEN (m.tenant, m.stream, m.sequence) AND (m.tenant, m.stream, m.sequence)
)
SELECT count(*) FROM found
"""
_HOLD: LiteralString = _MOVE.replace("{change}", "lane = 'held'")
HOLD: dict[str, LiteralString] = {
    "push": _HOLD.replace("{lane}", "push"),
    "pull": _HOLD.replace("{lane}", "pull"),
}
# What was due long ago is due now: claims that go on from a mark would pass it over.
UNHOLD: LiteralString = _MOVE.replace("{lane}", "held").replace(
    "{change}",
    "lane = %(mode)s, due_at = CASE WHEN stage = 'leased' THEN due_at "
    "ELSE least(greatest(due_at, clock_timestamp()), expires_at) END",
)


async def hold(connection: Connection, tenant: str, stream: int, limit: int = MAX_MOVED) -> int:
    """Take at most `limit` deliveries of a disabled destination out of its lane; returns how many, 0 at the end.

    Moves nothing if the destination is enabled. Leased ones move too, and their leases stay good.
    """
    mode, disabled = await _lock(connection, tenant, stream)
    return await _moved(connection, HOLD[mode], tenant, stream, mode, limit) if disabled else 0


async def unhold(connection: Connection, tenant: str, stream: int, limit: int = MAX_MOVED) -> int:
    """Put at most `limit` held deliveries of an enabled destination into its lane; returns how many, 0 at the end.

    Moves nothing if the destination is disabled.
    """
    mode, disabled = await _lock(connection, tenant, stream)
    return 0 if disabled else await _moved(connection, UNHOLD, tenant, stream, mode, limit)


async def _lock(connection: Connection, tenant: str, stream: int) -> tuple[str, bool]:
    row = await (await connection.execute(LOCK, {"tenant": tenant, "stream": stream})).fetchone()
    assert row is not None  # noqa: S101 - destinations are never deleted
    mode, disabled = row
    return mode, disabled


async def _moved(
    connection: Connection, statement: LiteralString, tenant: str, stream: int, mode: str, limit: int
) -> int:
    parameters = {"tenant": tenant, "stream": stream, "mode": mode, "limit": min(limit, MAX_MOVED)}
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(statement, parameters)
    row = await cursor.fetchone()
    return row[0] if row else 0


MISPLACED: LiteralString = """
WITH RECURSIVE streams AS (
    (
        SELECT q.tenant, q.stream FROM queue q WHERE q.lane = 'held'
        ORDER BY q.tenant, q.stream, q.sequence LIMIT 1
    )
    UNION ALL
    SELECT n.tenant, n.stream
    FROM streams s
    CROSS JOIN LATERAL (
        SELECT q.tenant, q.stream FROM queue q
        WHERE q.lane = 'held' AND (q.tenant, q.stream) > (s.tenant, s.stream)
        ORDER BY q.tenant, q.stream, q.sequence LIMIT 1
    ) AS n
)
(
    SELECT s.tenant, s.stream
    FROM streams s
    CROSS JOIN LATERAL (
        SELECT FROM destinations d
        WHERE d.tenant = s.tenant AND d.stream BETWEEN s.stream AND s.stream AND d.disabled_at IS NULL
        ORDER BY d.stream LIMIT 1
    ) AS enabled
    LIMIT %(limit)s
)
UNION ALL
(
    SELECT d.tenant, d.stream
    FROM destinations d
    CROSS JOIN LATERAL (
        (SELECT true FROM queue q WHERE q.tenant = d.tenant AND q.stream = d.stream AND q.lane = 'push' LIMIT 1)
        UNION ALL
        (SELECT true FROM queue q WHERE q.tenant = d.tenant AND q.stream = d.stream AND q.lane = 'pull' LIMIT 1)
        LIMIT 1
    ) AS in_lane
    WHERE d.disabled_at IS NOT NULL
    ORDER BY d.disabled_at LIMIT %(limit)s
)
"""


async def misplaced(connection: Connection, *, limit: int) -> list[tuple[str, int]]:
    """Destinations (tenant, stream) whose mail is where it should not be: whoever switched them was cut off.

    At most `limit` that are enabled and have held mail, and as many that are disabled and have mail in a lane. `hold`
    and `unhold` end it for each.
    """
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(MISPLACED, {"limit": limit})
    return [(tenant, stream) for tenant, stream in await cursor.fetchall()]

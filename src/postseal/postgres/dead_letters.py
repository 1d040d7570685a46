"""Dead letters: listed by explicit tenant and project, counted, and sent again."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, Self
from uuid import UUID

from msgspec import Struct
from psycopg.rows import TupleRow

from postseal.postgres.payloads import keep_sweep_away
from postseal.postgres.transaction import SET_PLANS, Connection

MAX_PAGE_ROWS = 100
MAX_REDRIVEN = 1000
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
POSITION_PATTERN = r"[0-9]{1,16}\.[0-9]{1,18}\.[0-9]{1,16}"


class Position(Struct, frozen=True, gc=False):
    """Where in the order of dead letters one stands; as text, three numbers with dots between them."""

    settled_at: datetime
    stream: int
    sequence: int

    def __str__(self) -> str:
        return f"{(self.settled_at - LONG_AGO) // MICROSECOND}.{self.stream}.{self.sequence}"

    @classmethod
    def read(cls, text: str) -> Self:
        """The one that `str` told. Raises ValueError."""
        if not re.fullmatch(POSITION_PATTERN, text, re.ASCII):
            raise ValueError("this is no position: it is what the page before told as `next`")
        microseconds, stream, sequence = map(int, text.split("."))
        return cls(LONG_AGO + microseconds * MICROSECOND, stream, sequence)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery that was given up: its code, how many attempts it had and may have."""

    delivery: UUID
    destination: str
    sequence: int
    event_identity: bytes
    code: str
    attempt: int
    attempt_limit: int
    sealed_at: datetime
    expires_at: datetime | None
    settled_at: datetime
    position: Position


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """Which dead letters of a project are wanted; None lets all pass. `since` <= settled_at < `until`."""

    destination: str | None = None
    code: str | None = None
    since: datetime | None = None
    until: datetime | None = None


# In the order of one index, which begins with the project or, where there is one destination alone, with its stream.
_FILTER: LiteralString = """
FROM settlements s
WHERE s.tenant = %(tenant)s AND {scope} AND s.state = 'dead'
  AND (s.settled_at, s.stream, s.sequence) > (%(settled_at)s, %(stream)s, %(sequence)s)
  AND s.settled_at >= coalesce(%(since)s::timestamptz, '-infinity')
  AND s.settled_at < coalesce(%(until)s::timestamptz, 'infinity')
  AND (%(code)s::text IS NULL OR s.code = %(code)s)
"""
_OF_PROJECT: LiteralString = _FILTER.replace("{scope}", "s.project = %(project)s")
_OF_DESTINATION: LiteralString = _FILTER.replace(
    "{scope}",
    "s.stream = (SELECT d.stream FROM destinations d WHERE d.tenant = %(tenant)s AND d.project = %(project)s "
    "AND d.destination BETWEEN %(destination)s AND %(destination)s ORDER BY d.destination LIMIT 1)",
).replace(
    "(s.settled_at, s.stream, s.sequence) > (%(settled_at)s, %(stream)s, %(sequence)s)",
    "(s.settled_at, s.sequence) > (%(settled_at)s, %(sequence)s)",
)


def _filtered(template: LiteralString) -> dict[bool, LiteralString]:
    """The statement, by whether one destination alone is wanted."""
    return {False: template.replace("{filter}", _OF_PROJECT), True: template.replace("{filter}", _OF_DESTINATION)}


PAGE = _filtered("""
SELECT v.delivery, d.destination, s.sequence, v.event_identity, s.code, s.attempt, s.attempt_limit, v.sealed_at,
       v.expires_at, s.settled_at, s.stream
FROM (SELECT s.* {filter} ORDER BY s.settled_at, s.stream, s.sequence LIMIT %(rows)s) AS s
CROSS JOIN LATERAL (
    SELECT * FROM deliveries v
    WHERE v.tenant = s.tenant AND v.stream = s.stream AND v.sequence BETWEEN s.sequence AND s.sequence
    ORDER BY v.sequence LIMIT 1
) AS v
CROSS JOIN LATERAL (
    SELECT d.destination FROM destinations d WHERE d.tenant = s.tenant AND d.stream BETWEEN s.stream AND s.stream
    ORDER BY d.stream LIMIT 1
) AS d
ORDER BY s.settled_at, s.stream, s.sequence
""")


async def page(
    connection: Connection, tenant: str, project: str, wanted: DeadFilter, *, after: Position | None, rows: int
) -> list[DeadLetter]:
    """At most `rows` (and never more than 100) dead letters behind `after`, the earliest given up first."""
    parameters = _parameters(tenant, project, wanted, after) | {"rows": min(rows, MAX_PAGE_ROWS)}
    found = await _run(connection, PAGE, wanted, parameters)
    return [DeadLetter(*row[:-1], position=Position(row[9], row[10], row[2])) for row in found]


COUNT = _filtered(
    "SELECT count(*) FROM (SELECT {filter} ORDER BY s.settled_at, s.stream, s.sequence LIMIT %(rows)s) AS counted"
)


async def count(connection: Connection, tenant: str, project: str, wanted: DeadFilter, *, at_most: int) -> int:
    """How many there are, counted up to `at_most`."""
    [[counted]] = await _run(connection, COUNT, wanted, _parameters(tenant, project, wanted) | {"rows": at_most})
    return counted


# The locks in the order that `deliveries` tells, the sweep's before all. What was found is still dead, or gone: a
# settlement changes only when its payload gets a time. That is taken away whatever the snapshot says of it, since it
# may have come meanwhile.
_REDRIVE: LiteralString = """
WITH found AS MATERIALIZED (
    {found}
), places AS MATERIALIZED (
    SELECT d.tenant, d.stream, CASE WHEN d.disabled_at IS NULL THEN d.mode ELSE 'held' END AS lane
    FROM (SELECT DISTINCT tenant, stream FROM found ORDER BY stream) AS f
    CROSS JOIN LATERAL (
        SELECT * FROM destinations d WHERE d.tenant = f.tenant AND d.stream BETWEEN f.stream AND f.stream
        ORDER BY d.stream LIMIT 1 FOR SHARE
    ) AS d
), ordered AS MATERIALIZED (
    SELECT f.tenant, f.stream, f.sequence, p.lane FROM places p JOIN found f ON f.stream = p.stream
    ORDER BY f.stream, f.sequence
), raised AS (
    DELETE FROM settlements s USING ordered o
    WHERE (s.tenant, s.stream, s.sequence) BETWEEN (o.tenant, o.stream, o.sequence) AND (o.tenant, o.stream, o.sequence)
    RETURNING s.tenant, s.stream, s.sequence, s.attempt, s.code, o.lane
), needed AS (
    UPDATE payloads p SET expires_at = NULL
    FROM raised r
    WHERE (p.tenant, p.stream, p.sequence) BETWEEN (r.tenant, r.stream, r.sequence) AND (r.tenant, r.stream, r.sequence)
), queued AS (
    INSERT INTO queue (tenant, stream, sequence, lane, stage, due_at, attempt, attempt_limit, expires_at, code)
    SELECT v.tenant, v.stream, v.sequence, r.lane, 'retry', least(clock_timestamp(), v.expires_at), r.attempt,
           r.attempt + %(budget)s, v.expires_at, r.code
    FROM raised r
    CROSS JOIN LATERAL (
        SELECT * FROM deliveries v
        WHERE v.tenant = r.tenant AND v.stream = r.stream AND v.sequence BETWEEN r.sequence AND r.sequence
        ORDER BY v.sequence LIMIT 1
    ) AS v
), fared AS MATERIALIZED (
    SELECT h.tenant, h.stream, r.number
    FROM (SELECT tenant, stream, count(*) AS number FROM raised GROUP BY tenant, stream) AS r
    JOIN destination_health h ON (h.tenant, h.stream) BETWEEN (r.tenant, r.stream) AND (r.tenant, r.stream)
    ORDER BY h.stream FOR NO KEY UPDATE OF h
), counted AS (
    UPDATE destination_health h SET settled = h.settled - f.number
    FROM fared f WHERE (h.tenant, h.stream) BETWEEN (f.tenant, f.stream) AND (f.tenant, f.stream)
)
SELECT count(*) FROM raised
"""
_NAMED: LiteralString = """
    SELECT s.tenant, s.stream, s.sequence
    FROM (
        SELECT * FROM deliveries v WHERE v.tenant = %(tenant)s AND v.delivery BETWEEN %(delivery)s AND %(delivery)s
        ORDER BY v.delivery LIMIT 1
    ) AS v
    CROSS JOIN LATERAL (
        SELECT * FROM settlements s
        WHERE s.tenant = v.tenant AND s.stream = v.stream AND s.sequence BETWEEN v.sequence AND v.sequence
        ORDER BY s.sequence LIMIT 1
    ) AS s
    WHERE s.state = 'dead' AND s.project = %(project)s
"""
_HAS_PAYLOAD: LiteralString = """
      AND (
          SELECT true FROM payloads p
          WHERE p.tenant = s.tenant AND p.stream = s.stream AND p.sequence BETWEEN s.sequence AND s.sequence
          ORDER BY p.sequence LIMIT 1
      )
"""
REDRIVE_ONE: LiteralString = _REDRIVE.replace("{found}", _NAMED + _HAS_PAYLOAD)


async def redrive_one(connection: Connection, tenant: str, project: str, delivery: UUID, *, budget: int) -> bool:
    """Let a dead letter be tried `budget` times more, from now on; False if it is not dead, or not of the project.

    False too if its payload is deleted. Attempts go on counting and their history stays. One whose expiry
    has passed is settled `expired` when claimed. To be called first in its transaction.
    """
    parameters = {"tenant": tenant, "project": project, "delivery": delivery, "budget": budget}
    await keep_sweep_away(connection)
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(REDRIVE_ONE, parameters)
    return await cursor.fetchone() == (1,)


REDRIVE_SOME = _filtered(
    _REDRIVE.replace(
        "{found}",
        """
    SELECT s.tenant, s.stream, s.sequence {filter} {has_payload}
    ORDER BY s.settled_at, s.stream, s.sequence LIMIT %(rows)s
""",
    ).replace("{has_payload}", _HAS_PAYLOAD)
)


async def redrive_some(
    connection: Connection, tenant: str, project: str, wanted: DeadFilter, *, budget: int, limit: int = MAX_REDRIVEN
) -> int:
    """Redrive at most `limit` (and never more than 1,000), the earliest given up first; returns how many.

    Those whose payload is deleted are left dead. To be called first in its transaction.
    Whoever calls this until it returns 0 sets `until`, or else meets the same ones again that died again meanwhile.
    """
    bounds = {"budget": budget, "rows": min(limit, MAX_REDRIVEN)}
    await keep_sweep_away(connection)
    [[redriven]] = await _run(connection, REDRIVE_SOME, wanted, _parameters(tenant, project, wanted) | bounds)
    return redriven


def _parameters(tenant: str, project: str, wanted: DeadFilter, after: Position | None = None) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "project": project,
        "destination": wanted.destination,
        "code": wanted.code,
        "since": wanted.since,
        "until": wanted.until,
        "settled_at": after.settled_at if after else LONG_AGO,
        "stream": after.stream if after else 0,
        "sequence": after.sequence if after else 0,
    }


async def _run(
    connection: Connection, statement: dict[bool, LiteralString], wanted: DeadFilter, parameters: dict[str, Any]
) -> list[TupleRow]:
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(statement[wanted.destination is not None], parameters)
    return await cursor.fetchall()

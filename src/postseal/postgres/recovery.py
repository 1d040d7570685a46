"""What an operator looks at after a crash or a restore, and ended leases taken back (see `postseal.recover`).

Reading is for the role of administrators, in one snapshot (`invariants.open_snapshot`); releasing is the delivery
role's. Lists are cut at MAX_LISTED, and say how many there are in all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, LiteralString, TypeVar

from psycopg.rows import TupleRow

from postseal.postgres.streams import COLUMNS, Stream, stream_of
from postseal.postgres.transaction import Connection

MAX_LISTED = 1_000
MAX_RELEASED = 1_000
"""By one transaction."""
RESTORED = "database.restore"
"""The platform's act with which a restore ends."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """The first MAX_LISTED of something, and how many there are."""

    rows: list[T]
    total: int


@dataclass(frozen=True, slots=True)
class Leases:
    """What a destination has out."""

    tenant: str
    project: str
    destination: str
    out: int
    """Under leases that have not ended: somebody may be sending them."""
    last_ends_at: datetime | None
    """When the last of those ends."""
    ended: int
    """Under leases that have."""
    exhausted: int
    """Of those, without an attempt left: they are given up by the next claim."""


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """What a destination was not sent, by why."""

    tenant: str
    project: str
    destination: str
    code: str
    number: int
    last_at: datetime


# Each list carries its own count, so that one statement reads both.
_LISTED: LiteralString = """
SELECT l.*, count(*) OVER () FROM ({rows}) AS l ORDER BY {order} LIMIT %(most)s
"""

LAST_RESTORE: LiteralString = "SELECT max(at) FROM platform_audit_events WHERE action = %(action)s"


async def last_restore(connection: Connection) -> datetime | None:
    """When this database was restored last, by its own clock; None if it never was, as far as its trail tells."""
    row = await (await connection.execute(LAST_RESTORE, {"action": RESTORED})).fetchone()
    return row[0] if row else None


LEASES: LiteralString = _LISTED.replace(
    "{rows}",
    """
    SELECT q.tenant, d.project, d.destination,
           count(*) FILTER (WHERE q.due_at > now()) AS out, max(q.due_at) FILTER (WHERE q.due_at > now()),
           count(*) FILTER (WHERE q.due_at <= now()),
           count(*) FILTER (WHERE q.due_at <= now() AND q.attempt >= q.attempt_limit)
    FROM queue q JOIN destinations d USING (tenant, stream)
    WHERE q.stage = 'leased' GROUP BY 1, 2, 3
""",
).replace("{order}", "l.tenant, l.project, l.destination")


async def list_leases(connection: Connection) -> Listed[Leases]:
    """Destinations that have something out, by name."""
    return _listed(Leases, await _list(connection, LEASES))


DEAD_LETTERS: LiteralString = _LISTED.replace(
    "{rows}",
    """
    SELECT s.tenant, s.project, d.destination, s.code, count(*), max(s.settled_at)
    FROM settlements s JOIN destinations d USING (tenant, stream)
    WHERE s.state = 'dead' GROUP BY 1, 2, 3, 4
""",
).replace("{order}", "l.tenant, l.project, l.destination, l.code")


async def list_dead_letters(connection: Connection) -> Listed[DeadLetters]:
    """Destinations that were not sent something, and why."""
    return _listed(DeadLetters, await _list(connection, DEAD_LETTERS))


HOLES: LiteralString = _LISTED.replace(
    "{rows}",
    """
    {columns} WHERE above <> ''
""".replace("{columns}", COLUMNS),
).replace("{order}", "l.tenant, l.project, l.producer")


async def list_holes(connection: Connection) -> Listed[Stream]:
    """Streams in which something is missing, by name."""
    return _streams(await _list(connection, HOLES))


# A device has written when anything of its stream was acknowledged, a duplicate too: it holds what it sent, and sends
# again what it does not know to be here.
QUIET: LiteralString = _LISTED.replace(
    "{rows}",
    """
    {columns}
    WHERE NOT retired AND NOT EXISTS (
        SELECT FROM audit_events a
        WHERE a.tenant = streams.tenant AND a.project = streams.project AND a.device = streams.producer
          AND a.action = 'envelope' AND a.outcome <> 'refused' AND a.at >= %(since)s
    )
""".replace("{columns}", COLUMNS),
).replace("{order}", "l.tenant, l.project, l.producer")


async def list_quiet(connection: Connection, since: datetime) -> Listed[Stream]:
    """Streams, the retired left out, of which nothing was acknowledged since then, by name."""
    return _streams(await _list(connection, QUIET, {"since": since}))


TENANTS_WITH_ENDED: LiteralString = """
SELECT DISTINCT tenant FROM queue
WHERE stage = 'leased' AND due_at <= now() AND attempt < attempt_limit ORDER BY tenant
"""


async def tenants_with_ended_leases(connection: Connection) -> list[str]:
    """Tenants with a lease that has ended and an attempt left."""
    return [tenant for (tenant,) in await (await connection.execute(TENANTS_WITH_ENDED)).fetchall()]


# What a claim would do with them (deliveries.py), but for counting up: the lost attempt is written down and the token
# is gone, so that whoever had it is fenced. The rows are locked in their order; what somebody claims or settles now is
# passed over. Due now: claims go on from a mark, and would not see what was due before it.
RELEASE: LiteralString = """
WITH mine AS MATERIALIZED (
    SELECT q.tenant, q.stream, q.sequence, q.attempt FROM queue q
    WHERE q.tenant = %(tenant)s AND q.stage = 'leased' AND q.due_at <= statement_timestamp()
      AND q.attempt < q.attempt_limit
    ORDER BY q.stream, q.sequence LIMIT %(most)s FOR NO KEY UPDATE SKIP LOCKED
), tried AS (
    INSERT INTO attempts (tenant, stream, sequence, attempt, code)
    SELECT tenant, stream, sequence, attempt, 'lease_expired' FROM mine
), released AS (
    UPDATE queue q
    SET stage = 'retry', due_at = least(clock_timestamp(), q.expires_at), token = NULL, code = 'lease_expired'
    FROM mine m WHERE (q.tenant, q.stream, q.sequence) = (m.tenant, m.stream, m.sequence)
)
SELECT count(*) FROM mine
"""


async def release_ended(connection: Connection, tenant: str) -> int:
    """Let at most MAX_RELEASED deliveries whose leases have ended wait again; returns how many (role delivery).

    Attempts and their limit stay as they are. What has no attempt left is a claim's to give up.
    """
    row = await (await connection.execute(RELEASE, {"tenant": tenant, "most": MAX_RELEASED})).fetchone()
    return row[0] if row else 0


async def _list(
    connection: Connection, statement: LiteralString, parameters: Mapping[str, Any] | None = None
) -> list[TupleRow]:
    return await (await connection.execute(statement, {"most": MAX_LISTED, **(parameters or {})})).fetchall()


def _listed(kind: type[T], rows: list[TupleRow]) -> Listed[T]:
    return Listed([kind(*columns) for *columns, _ in rows], rows[0][-1] if rows else 0)


def _streams(rows: list[TupleRow]) -> Listed[Stream]:
    return Listed([stream_of(row[:-1]) for row in rows], rows[0][-1] if rows else 0)

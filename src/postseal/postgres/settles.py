"""What became of leases, written behind their fences (role delivery; protocol section 7, "Claims, leases, fences").

Each change of a row that is out compares attempt and token. The order of locks is that of `deliveries`.
"""

from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, LiteralString
from uuid import UUID

from msgspec import Struct

from postseal.correlation import new_correlation_id
from postseal.postgres import arrays
from postseal.postgres.deliveries import Lease
from postseal.postgres.exchange import Statement, in_one_exchange
from postseal.postgres.transaction import SET_PLANS, Connection
from postseal.rules.delivery import Code, Verdict

Identity = tuple[int, int]
"""Stream and sequence of a tenant's delivery."""


class Settle(Struct, frozen=True, gc=False):
    """What became of a lease: `code` for retry and dead, `delay_s` for retry; a release may have both.

    `gone` also disables the destination.
    """

    stream: int
    sequence: int
    attempt: int
    token: UUID
    verdict: Verdict
    code: Code | None = None
    delay_s: float = 0.0
    gone: bool = False

    def __repr__(self) -> str:
        return f"Settle({self.stream}, {self.sequence}, {self.verdict})"


_SETTLE: LiteralString = """
WITH shown AS MATERIALIZED (
    SELECT a.*
    FROM unnest(%(tenant)s::text[], %(stream)s::bigint[], %(sequence)s::bigint[], %(attempt)s::bigint[],
                %(token)s::uuid[], %(verdict)s::text[], %(code)s::text[], %(delay_ms)s::bigint[],
                %(gone)s::bool[])
         AS a (tenant, stream, sequence, attempt, token, verdict, code, delay_ms, gone)
), {mine}, settled AS (
    INSERT INTO settlements (tenant, stream, sequence, state, code, project, attempt, attempt_limit)
    SELECT m.tenant, m.stream, m.sequence, m.verdict, m.code,
           CASE WHEN m.verdict = 'dead' THEN (
               SELECT d.project FROM destinations d WHERE d.tenant = m.tenant AND d.stream = m.stream
           ) END,
           m.attempt, m.attempt_limit
    FROM mine m WHERE m.verdict IN ('delivered', 'dead')
), tried AS (
    INSERT INTO attempts (tenant, stream, sequence, attempt, code)
    SELECT m.tenant, m.stream, m.sequence, m.attempt, m.code FROM mine m WHERE m.verdict IN ('retry', 'dead')
), fared AS MATERIALIZED (
    SELECT h.tenant, h.stream, m.ended, m.delivered, m.last_code
    FROM (
        SELECT tenant, stream, count(*) FILTER (WHERE verdict IN ('delivered', 'dead')) AS ended,
               bool_or(verdict = 'delivered') AS delivered, max(code) AS last_code
        FROM mine WHERE verdict <> 'release' GROUP BY tenant, stream
    ) AS m
    JOIN destination_health h ON (h.tenant, h.stream) BETWEEN (m.tenant, m.stream) AND (m.tenant, m.stream)
    ORDER BY h.stream FOR NO KEY UPDATE OF h
), counted AS (
    UPDATE destination_health h
    SET settled = h.settled + f.ended,
        failing_since = CASE WHEN NOT f.delivered THEN coalesce(h.failing_since, clock_timestamp()) END,
        last_success_at = CASE WHEN f.delivered THEN clock_timestamp() ELSE h.last_success_at END,
        last_failure_at = CASE WHEN f.last_code IS NULL THEN h.last_failure_at ELSE clock_timestamp() END,
        last_code = coalesce(f.last_code, h.last_code)
    FROM fared f WHERE (h.tenant, h.stream) BETWEEN (f.tenant, f.stream) AND (f.tenant, f.stream)
)
SELECT stream, sequence FROM mine
"""
# Where all of them leave the queue, one walk over the rows, in the order in which they are given, is enough.
SETTLE_ENDED: LiteralString = _SETTLE.replace(
    "{mine}",
    """mine AS (
    DELETE FROM queue q USING shown a
    WHERE (q.tenant, q.stream, q.sequence) BETWEEN (a.tenant, a.stream, a.sequence) AND (a.tenant, a.stream, a.sequence)
      AND q.attempt = a.attempt AND q.token = a.token
    RETURNING a.*, q.attempt_limit
)""",
)
# Else all are locked in order before anything is done to them: deletes and updates of one statement take turns.
_MINE: LiteralString = """mine AS MATERIALIZED (
    SELECT a.*, q.attempt_limit
    FROM shown a
    JOIN queue q ON (q.tenant, q.stream, q.sequence)
                    BETWEEN (a.tenant, a.stream, a.sequence) AND (a.tenant, a.stream, a.sequence)
                AND q.attempt = a.attempt AND q.token = a.token
    ORDER BY a.stream, a.sequence
    FOR NO KEY UPDATE OF q
), ended AS (
    DELETE FROM queue q USING mine m
    WHERE m.verdict IN ('delivered', 'dead')
      AND (q.tenant, q.stream, q.sequence) BETWEEN (m.tenant, m.stream, m.sequence) AND (m.tenant, m.stream, m.sequence)
), returned AS (
    UPDATE queue q
    SET stage = CASE WHEN m.verdict = 'release' AND q.code IS NULL THEN 'fresh' ELSE 'retry' END,
        due_at = least(clock_timestamp() + m.delay_ms * interval '1 ms', q.expires_at),
        token = NULL, code = coalesce(m.code, q.code),
        attempt_limit = q.attempt_limit + (m.verdict = 'release')::integer
    FROM mine m
    WHERE m.verdict IN ('retry', 'release')
      AND (q.tenant, q.stream, q.sequence) BETWEEN (m.tenant, m.stream, m.sequence) AND (m.tenant, m.stream, m.sequence)
)"""
SETTLE: LiteralString = _SETTLE.replace("{mine}", _MINE)
# What is fenced disables nothing. The destinations' locks are had already (LOCK_GONE).
_DISABLED: LiteralString = """gone AS MATERIALIZED (
    SELECT d.ctid AS place
    FROM (SELECT DISTINCT tenant, stream FROM mine WHERE gone) AS m
    CROSS JOIN LATERAL (
        SELECT d.ctid FROM destinations d
        WHERE d.tenant = m.tenant AND d.stream BETWEEN m.stream AND m.stream AND d.disabled_at IS NULL
        ORDER BY d.stream LIMIT 1
    ) AS d
), disabled AS (
    UPDATE destinations d SET disabled_at = clock_timestamp(), disabled_reason = 'gone'
    FROM gone g WHERE d.ctid = g.place
    RETURNING d.tenant, d.project, d.destination
), audited AS (
    INSERT INTO audit_events (tenant, project, account, action, outcome, detail, correlation_id)
    SELECT tenant, project, 'controlplane', 'destination.disable', 'done',
           jsonb_build_object('destination', destination, 'reason', 'gone'), %(correlation_id)s::uuid
    FROM disabled
)"""
SETTLE_GONE: LiteralString = _SETTLE.replace("{mine}", f"{_MINE}, {_DISABLED}")
ENDINGS = frozenset({Verdict.DELIVERED, Verdict.DEAD})

# Queue rows come after destinations, so which leases are good is read without a lock here. One that is not good any
# more when it is settled has locked a destination for nothing.
LOCK_GONE: LiteralString = """
WITH shown AS MATERIALIZED (
    SELECT a.*
    FROM unnest(%(tenant)s::text[], %(stream)s::bigint[], %(sequence)s::bigint[], %(attempt)s::bigint[],
                %(token)s::uuid[]) AS a (tenant, stream, sequence, attempt, token)
), gone AS MATERIALIZED (
    SELECT DISTINCT a.tenant, a.stream
    FROM shown a
    JOIN queue q ON (q.tenant, q.stream, q.sequence)
                    BETWEEN (a.tenant, a.stream, a.sequence) AND (a.tenant, a.stream, a.sequence)
                AND q.attempt = a.attempt AND q.token = a.token
    ORDER BY a.stream
)
SELECT FROM gone g
CROSS JOIN LATERAL (
    SELECT FROM destinations d
    WHERE d.tenant = g.tenant AND d.stream BETWEEN g.stream AND g.stream
    ORDER BY d.stream LIMIT 1 FOR NO KEY UPDATE
) AS locked
"""

_STATEMENTS = {text: Statement(text) for text in (SETTLE, SETTLE_ENDED, SETTLE_GONE, LOCK_GONE)}


async def settle(connection: Connection, tenant: str, settles: Sequence[Settle]) -> set[Identity]:
    """Write what became of leases, inside the caller's transaction; returns (stream, sequence) of the fenced ones.

    One that shows another attempt or token than the row has is fenced and changes nothing. One whose lease has ended
    counts as long as nobody claimed the delivery since. Of two for the same lease the first counts. A destination that
    is gone is disabled, with an audit event: the caller then holds its mail (`outbound.holding`).
    """
    steps = _settling(tenant, settles)
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursors = [await connection.execute(text, parameters, binary=True) for text, parameters in steps]
    return _fenced(await cursors[-1].fetchall(), settles)


async def settle_for_certain(connection: Connection, tenant: str, settles: Sequence[Settle]) -> set[Identity]:
    """`settle` as a transaction of its own, in one round trip; `connection` is in none (see `Database.exchange`).

    Raises Unavailable when the commit is not certain: it may be settled again, and is then fenced if it was.
    """
    calls = [_STATEMENTS[text](**parameters) for text, parameters in _settling(tenant, settles)]
    answers = await in_one_exchange(connection, calls)
    return _fenced(answers[-1].rows, settles)


def _settling(tenant: str, settles: Sequence[Settle]) -> list[tuple[LiteralString, dict[str, bytes]]]:
    """The statements that settle them, with their parameters; the last one answers with what was not fenced."""
    distinct = {(each.stream, each.sequence, each.attempt, each.token): each for each in reversed(settles)}
    settles = sorted(distinct.values(), key=attrgetter("stream", "sequence"))
    parameters = _shown(tenant, settles) | {
        "verdict": arrays.texts([each.verdict for each in settles]),
        "code": arrays.texts([each.code for each in settles]),
        "delay_ms": arrays.int8s([round(each.delay_s * 1000) for each in settles]),
        "gone": arrays.bools([each.gone for each in settles]),
    }
    if gone := [each for each in settles if each.gone]:
        parameters["correlation_id"] = arrays.uuid(new_correlation_id())
        return [(LOCK_GONE, _shown(tenant, gone)), (SETTLE_GONE, parameters)]
    return [(SETTLE_ENDED if ENDINGS.issuperset(each.verdict for each in settles) else SETTLE, parameters)]


def _shown(tenant: str, leases: Sequence[Lease] | Sequence[Settle]) -> dict[str, bytes]:
    return {
        "tenant": arrays.texts([tenant] * len(leases)),
        "stream": arrays.int8s([each.stream for each in leases]),
        "sequence": arrays.int8s([each.sequence for each in leases]),
        "attempt": arrays.int8s([each.attempt for each in leases]),
        "token": arrays.uuids([each.token.bytes for each in leases]),
    }


def _fenced(good: Iterable[tuple[Any, ...]], leases: Sequence[Lease] | Sequence[Settle]) -> set[Identity]:
    return {(each.stream, each.sequence) for each in leases}.difference(good)


RENEW: LiteralString = """
WITH shown AS MATERIALIZED (
    SELECT a.*
    FROM unnest(%(tenant)s::text[], %(stream)s::bigint[], %(sequence)s::bigint[], %(attempt)s::bigint[],
                %(token)s::uuid[]) AS a (tenant, stream, sequence, attempt, token)
), mine AS MATERIALIZED (
    SELECT q.tenant, q.stream, q.sequence
    FROM shown a
    JOIN queue q ON (q.tenant, q.stream, q.sequence)
                    BETWEEN (a.tenant, a.stream, a.sequence) AND (a.tenant, a.stream, a.sequence)
                AND q.attempt = a.attempt AND q.token = a.token
    ORDER BY q.stream, q.sequence
    FOR NO KEY UPDATE OF q
)
UPDATE queue q SET due_at = clock_timestamp() + %(lease)s::interval
FROM mine m WHERE (q.tenant, q.stream, q.sequence)
                  BETWEEN (m.tenant, m.stream, m.sequence) AND (m.tenant, m.stream, m.sequence)
RETURNING q.stream, q.sequence
"""


async def renew(connection: Connection, tenant: str, leases: Sequence[Lease], *, lease_s: float) -> set[Identity]:
    """Let leases end `lease_s` from now; returns (stream, sequence) of the fenced ones, which are lost."""
    parameters = _shown(tenant, leases) | {"lease": arrays.interval(timedelta(seconds=lease_s))}
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(RENEW, parameters, binary=True)
    return _fenced(await cursor.fetchall(), leases)


class Fence(Struct, frozen=True, gc=False):
    """What a settlement of a delivery that is out has to show, and how many attempts the delivery has."""

    attempt: int
    token: UUID
    attempt_limit: int

    def __repr__(self) -> str:
        return f"Fence({self.attempt} of {self.attempt_limit})"


READ_FENCES: LiteralString = """
SELECT a.stream, a.sequence, q.attempt, q.token, q.attempt_limit
FROM unnest(%(tenant)s::text[], %(stream)s::bigint[], %(sequence)s::bigint[]) AS a (tenant, stream, sequence)
JOIN queue q ON (q.tenant, q.stream, q.sequence)
                BETWEEN (a.tenant, a.stream, a.sequence) AND (a.tenant, a.stream, a.sequence)
            AND q.stage = 'leased'
"""


async def read_fences(connection: Connection, tenant: str, wanted: Collection[Identity]) -> dict[Identity, Fence]:
    """Who has which of the deliveries that are out, inside the caller's transaction; read without a lock.

    The limit stays as it is for as long as attempt and token do.
    """
    places = list(wanted)
    parameters = {
        "tenant": arrays.texts([tenant] * len(places)),
        "stream": arrays.int8s([stream for stream, _ in places]),
        "sequence": arrays.int8s([sequence for _, sequence in places]),
    }
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(READ_FENCES, parameters, binary=True)
    return {(stream, sequence): Fence(*row) for stream, sequence, *row in await cursor.fetchall()}

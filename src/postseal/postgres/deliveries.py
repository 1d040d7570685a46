"""Deliveries on their way: claimed under leases, settled behind fences (role delivery; protocol section 7).

The order of locks, here and in whatever else touches these rows, so that no two transactions wait in a circle:

1. destinations, in stream order: exclusively by whoever gives out sequences, disables or enables; shared by whoever
   puts rows into a lane or takes them out of one
2. queue and settlements rows, in (stream, sequence) order
3. destination_health, in stream order

A claim passes over queue rows that somebody has, so that it waits for health alone; it reads destinations unlocked. A
settle locks destinations only when a receiver said that it is gone for good, and then first. Sealing inserts queue
rows that nobody can know of yet and never touches health. So whoever waits at one step holds only earlier ones.

Claims and settles are one statement each, a few index probes a row, and one round trip with their commit. Generic plans
outlive the statistics for which they were made, and a queue is empty at times, so the statements leave no other plan (a
test holds them):

* a table is joined by a range of rows, `(q.a, q.b) BETWEEN (p.a, p.b) AND (p.a, p.b)`: on equalities the planner reads
  all of an index where the table had one row when it was planned. The tenant is a column of what is joined to, because
  as a constant it lets the planner read all that the tenant has
* of a table with several unique indexes the first row in the order of the last column is asked for, which one of them
  has: in small tables all of them cost the same
* a claim updates the rows that it locked by their places. One that changed in between is left to the next claim

Old snapshots keep dead entries in the index: a claim therefore starts at the `Mark` of the one before it, and leases
have a range of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, LiteralString
from uuid import UUID, uuid4

from msgspec import Struct
from psycopg.rows import TupleRow

from postseal.postgres import arrays
from postseal.postgres.exchange import Statement, in_one_exchange
from postseal.postgres.transaction import SET_PLANS, Connection

MAX_CLAIMED = 100
"""Of one tenant by one call (protocol section 7, "Claim")."""
MARK_SLACK = timedelta(milliseconds=100)
"""Behind what a claim got. A destination's deliveries are sealed one after another under its lock, and so they become
visible in the order of their `due_at`; the slack is for those that were given back."""
IDLE_SLACK = timedelta(seconds=10)
"""Behind the time of a claim that got nothing: longer than a transaction takes that was under way then."""

WorkLane = Literal["push", "pull"]


class Lease(Struct, frozen=True, gc=False):
    """A delivery that the caller has until `lease_ends`; (`attempt`, `token`) is what each change of it must show."""

    tenant: str
    stream: int
    sequence: int
    delivery: UUID
    attempt: int
    attempt_limit: int
    project: str
    destination: str
    keyid: str
    payload: bytes
    signature: bytes
    event_identity: bytes
    token: UUID
    lease_ends: datetime

    def __repr__(self) -> str:
        return f"Lease({self.event_identity.hex()})"  # neither payload, signature nor token may get into a log


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many of a stream at most: first attempts, and others (retries, and leases that expired).

    `since` and `retries_since` say from where on in time to look: those of the `Mark` of an earlier claim, or None for
    the beginning. Expired leases are looked for only from the beginning, that is where `retries_since` is None.
    """

    stream: int
    fresh: int
    retries: int
    since: datetime | None = None
    retries_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """From where on in time the next claim of a stream can look (see `Wanted`)."""

    since: datetime | None
    retries_since: datetime | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim brought: the leases, and how many it settled on the way (expired, or attempts used up)."""

    leases: list[Lease]
    ended: int
    marks: dict[int, Mark]
    """By stream, for each that was wanted."""


# An expiry goes before used up attempts: a redrive could not bring such a one to its receiver any more.
_CLAIM: LiteralString = """
WITH wanted AS MATERIALIZED (
    SELECT w.*
    FROM unnest(%(tenant)s::text[], %(stream)s::bigint[], %(stage)s::text[], %(most)s::bigint[],
                %(since)s::timestamptz[], %(leased)s::bool[]) AS w (tenant, stream, stage, most, since, leased)
), picked AS MATERIALIZED (
    SELECT w.tenant, w.stream, d.project, d.destination, q.*, q.expires_at <= statement_timestamp() IS TRUE AS expired,
           q.expires_at <= statement_timestamp() IS TRUE OR q.attempt >= q.attempt_limit AS ends
    FROM wanted w
    CROSS JOIN LATERAL (
        SELECT d.project, d.destination FROM destinations d
        WHERE d.tenant = w.tenant AND d.stream BETWEEN w.stream AND w.stream AND d.disabled_at IS NULL
        ORDER BY d.stream LIMIT 1
    ) AS d
    CROSS JOIN LATERAL (
        SELECT * FROM (
            SELECT q.ctid AS place, q.sequence, q.stage, q.due_at, q.attempt, q.attempt_limit, q.expires_at
            FROM queue q
            WHERE q.tenant = w.tenant AND q.stream = w.stream AND q.lane = '{lane}' AND q.stage = 'leased'
              AND q.due_at <= statement_timestamp() AND w.leased
            ORDER BY q.due_at LIMIT w.most FOR UPDATE SKIP LOCKED
        ) AS expired_leases
        UNION ALL
        SELECT * FROM (
            SELECT q.ctid AS place, q.sequence, q.stage, q.due_at, q.attempt, q.attempt_limit, q.expires_at
            FROM queue q
            WHERE q.tenant = w.tenant AND q.stream = w.stream AND q.lane = '{lane}' AND q.stage = w.stage
              AND q.due_at >= coalesce(w.since, '-infinity') AND q.due_at <= statement_timestamp()
            ORDER BY q.due_at LIMIT w.most FOR UPDATE SKIP LOCKED
        ) AS others
        LIMIT w.most
    ) AS q
    LIMIT %(most_in_all)s::bigint
), ended AS (
    DELETE FROM queue q USING picked p
    WHERE p.ends AND q.ctid = p.place
    RETURNING p.*
), settled AS (
    INSERT INTO settlements (tenant, stream, sequence, state, code, project, attempt, attempt_limit)
    SELECT e.tenant, e.stream, e.sequence,
           CASE WHEN e.expired THEN 'expired' ELSE 'dead' END,
           CASE WHEN NOT e.expired THEN 'attempts_exhausted' END,
           CASE WHEN NOT e.expired THEN e.project END, e.attempt, e.attempt_limit
    FROM ended e
), claimed AS (
    UPDATE queue q
    SET stage = 'leased', due_at = statement_timestamp() + %(lease)s::interval, attempt = q.attempt + 1,
        token = %(token)s::uuid,
        code = CASE WHEN p.stage = 'leased' THEN 'lease_expired' ELSE q.code END
    FROM picked p
    WHERE NOT p.ends AND q.ctid = p.place
    RETURNING p.*
), tried AS (
    INSERT INTO attempts (tenant, stream, sequence, attempt, code)
    SELECT tenant, stream, sequence, attempt, 'lease_expired'
    FROM (SELECT * FROM claimed UNION ALL SELECT * FROM ended) AS p
    WHERE p.stage = 'leased'
), fared AS MATERIALIZED (
    SELECT h.tenant, h.stream, e.number
    FROM (SELECT tenant, stream, count(*) AS number FROM ended GROUP BY tenant, stream) AS e
    JOIN destination_health h ON (h.tenant, h.stream) BETWEEN (e.tenant, e.stream) AND (e.tenant, e.stream)
    ORDER BY h.stream FOR NO KEY UPDATE OF h
), counted AS (
    UPDATE destination_health h SET settled = h.settled + f.number
    FROM fared f WHERE (h.tenant, h.stream) BETWEEN (f.tenant, f.stream) AND (f.tenant, f.stream)
)
SELECT c.stage, c.due_at, c.stream, c.sequence, v.delivery, c.attempt + 1, c.attempt_limit, c.project, c.destination,
       v.keyid, b.payload, b.signature, v.event_identity
FROM claimed c
CROSS JOIN LATERAL (
    SELECT * FROM deliveries v
    WHERE v.tenant = c.tenant AND v.stream = c.stream AND v.sequence BETWEEN c.sequence AND c.sequence
    ORDER BY v.sequence LIMIT 1
) AS v
JOIN payloads b ON (b.tenant, b.stream, b.sequence)
                   BETWEEN (c.tenant, c.stream, c.sequence) AND (c.tenant, c.stream, c.sequence)
UNION ALL
SELECT e.stage, e.due_at, e.stream, e.sequence, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM ended e
UNION ALL
SELECT 'now', statement_timestamp(), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""
CLAIM: dict[WorkLane, LiteralString] = {
    "push": _CLAIM.replace("{lane}", "push"),
    "pull": _CLAIM.replace("{lane}", "pull"),
}
_CLAIMS = {lane: Statement(text) for lane, text in CLAIM.items()}


async def claim(
    connection: Connection,
    tenant: str,
    wanted: Sequence[Wanted],
    *,
    lane: WorkLane,
    lease_s: float,
    most: int = MAX_CLAIMED,
) -> Claimed:
    """Lease at most `most` due deliveries (1 to 100) inside the caller's transaction, whose they are once it committed.

    Streams come in the order of `wanted`, the longest due of each first; what others are claiming or settling is
    passed over, and a disabled destination gives nothing. On the way the expired are settled `expired`, and those
    whose attempts are used up `dead` with `attempts_exhausted`.
    """
    lease, token = timedelta(seconds=lease_s), uuid4()
    parameters = _claiming(tenant, wanted, lease, token, most)
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(CLAIM[lane], parameters, binary=True)
    return _claimed(await cursor.fetchall(), tenant, wanted, lease, token, most)


async def claim_for_certain(
    connection: Connection, tenant: str, wanted: Sequence[Wanted], *, lane: WorkLane, lease_s: float
) -> Claimed:
    """`claim` as a transaction of its own, in one round trip; `connection` is in none (see `Database.exchange`).

    Raises Unavailable when the commit is not certain: then nothing may be sent.
    """
    lease, token = timedelta(seconds=lease_s), uuid4()
    call = _CLAIMS[lane](**_claiming(tenant, wanted, lease, token, MAX_CLAIMED))
    [answer] = await in_one_exchange(connection, [call])
    return _claimed(answer.rows, tenant, wanted, lease, token)


def _claiming(tenant: str, wanted: Sequence[Wanted], lease: timedelta, token: UUID, most: int) -> dict[str, bytes]:
    looks = [
        look
        for each in wanted
        for look in (
            (each.stream, "fresh", each.fresh, each.since, False),
            (each.stream, "retry", each.retries, each.retries_since, each.retries_since is None),
        )
        if look[2] > 0
    ]
    return {
        "tenant": arrays.texts([tenant] * len(looks)),
        "stream": arrays.int8s([look[0] for look in looks]),
        "stage": arrays.texts([look[1] for look in looks]),
        "most": arrays.int8s([look[2] for look in looks]),
        "since": arrays.timestamps([look[3] for look in looks]),
        "leased": arrays.bools([look[4] for look in looks]),
        "most_in_all": arrays.int8(most),
        "lease": arrays.interval(lease),
        "token": arrays.uuid(token.bytes),
    }


def _claimed(
    rows: Sequence[TupleRow],
    tenant: str,
    wanted: Sequence[Wanted],
    lease: timedelta,
    token: UUID,
    most: int = MAX_CLAIMED,
) -> Claimed:
    [now] = [due_at for stage, due_at, *_ in rows if stage == "now"]
    lease_ends = now + lease
    leases: list[Lease] = []
    last_due: dict[tuple[int, str], datetime] = {}
    for stage, due_at, *lease_row in rows:
        if stage == "now":
            continue
        stream, _, delivery, *_ = lease_row
        last_due[stream, stage] = max(last_due.get((stream, stage), due_at), due_at)
        if delivery is not None:
            leases.append(Lease(tenant, *lease_row, token=token, lease_ends=lease_ends))
    found = len(rows) - 1

    def mark(stream: int, stage: str, since: datetime | None) -> datetime | None:
        if (due_at := last_due.get((stream, stage))) is not None:
            candidate = due_at - MARK_SLACK
        elif found == most:
            return since  # perhaps it was not looked at
        else:
            candidate = now - IDLE_SLACK
        return candidate if since is None else max(since, candidate)

    marks = {
        each.stream: Mark(
            mark(each.stream, "fresh", each.since) if each.fresh else each.since,
            mark(each.stream, "retry", each.retries_since) if each.retries else each.retries_since,
        )
        for each in wanted
    }
    return Claimed(leases, found - len(leases), marks)

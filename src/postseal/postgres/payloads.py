"""Payloads on their way out: those of ended deliveries get their time, and what has expired is deleted.

`payloads.expires_at` alone says when a payload goes. What devices send has it from the start; what is sent has none
while it is undelivered, and gets it here once it has ended, counted from then (role admin). Deleting looks at nothing
else (role sweep).

**The sweep's lock** is an advisory one, taken first in a transaction. Whoever deletes holds it alone, so that one batch
runs at a time in a database. Whoever changes what may be deleted holds it together with others of its kind: a hold, and
a redrive, which makes a payload needed again. So neither meets a batch under way, and each batch sees all of them.

A settlement's row is locked before its payload's. Dating passes over settlements that somebody has.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.transaction import SET_PLANS, Connection

MAX_BATCH = 1_000
"""Payloads that one transaction dates or deletes (protocol section 9)."""
MAX_TENANTS = 100
"""Tenants that share one batch; each gets as much of it."""
MAX_WALKED = 500
"""Tenants that one batch looks at, whether anything of theirs has expired or not."""
MAX_COUNTED = 1_000_000
"""Of one tenant's payloads, which are counted up to here: half a second."""
SWEEP_LOCK = 0x73776570  # "swep"

LOCK_ALONE: LiteralString = "SELECT pg_try_advisory_xact_lock(%(lock)s::bigint)"
LOCK_SHARED: LiteralString = "SELECT pg_advisory_xact_lock_shared(%(lock)s::bigint)"


async def keep_sweep_away(connection: Connection) -> None:
    """Wait for the batch that is under way, and let none begin until this transaction ends.

    To be called before anything else is locked.
    """
    await connection.execute(LOCK_SHARED, {"lock": SWEEP_LOCK})


# Once the settlement's row is locked nobody redrives the delivery, so nobody needs the payload for longer.
DATE_ENDED: LiteralString = """
WITH ended AS MATERIALIZED (
    SELECT s.tenant, s.stream, s.sequence, s.settled_at
    FROM settlements s
    WHERE NOT s.dated
    ORDER BY s.settled_at LIMIT %(most)s
    FOR NO KEY UPDATE SKIP LOCKED
), kept AS MATERIALIZED (
    SELECT e.tenant, e.stream, e.sequence, e.settled_at
           + coalesce(p.payload_retention, t.payload_retention, make_interval(secs => %(default_s)s)) AS expires_at
    FROM ended e
    CROSS JOIN LATERAL (
        SELECT d.project FROM destinations d WHERE d.tenant = e.tenant AND d.stream BETWEEN e.stream AND e.stream
        ORDER BY d.stream LIMIT 1
    ) AS d
    JOIN projects p ON (p.tenant, p.project) BETWEEN (e.tenant, d.project) AND (e.tenant, d.project)
    JOIN tenants t ON t.tenant BETWEEN e.tenant AND e.tenant
), timed AS (
    UPDATE payloads p SET expires_at = k.expires_at
    FROM kept k
    WHERE (p.tenant, p.stream, p.sequence) BETWEEN (k.tenant, k.stream, k.sequence) AND (k.tenant, k.stream, k.sequence)
)
UPDATE settlements s SET dated = true
FROM ended e
WHERE (s.tenant, s.stream, s.sequence) BETWEEN (e.tenant, e.stream, e.sequence) AND (e.tenant, e.stream, e.sequence)
"""


async def date_ended(connection: Connection, *, default_retention_s: int, most: int = MAX_BATCH) -> int:
    """Give the payloads of at most `most` ended deliveries their time of expiry; returns how many (role admin).

    It is the time of the settlement and the retention that now holds for the project: its own, else the tenant's, else
    `default_retention_s`. Those that ended first come first.
    """
    await connection.execute(f"SELECT {SET_PLANS}")
    parameters = {"most": min(most, MAX_BATCH), "default_s": default_retention_s}
    return (await connection.execute(DATE_ENDED, parameters)).rowcount


@dataclass(frozen=True, slots=True)
class Swept:
    """One batch: how many payloads it deleted, and the tenant behind which the next one goes on.

    That is "" where the end of the tenants was reached.
    """

    payloads: int
    through: str


# Each of the tenants that have something gets the same share, whose rest is nobody's. What was given another time
# since the look is left: its row is read again once it is locked. That comparison no index may serve, or in a table
# that was never analysed the planner walks over all that has expired for each row.
DELETE_EXPIRED: LiteralString = """
WITH walked AS MATERIALIZED (
    SELECT t.tenant FROM tenants t WHERE t.tenant > %(after)s ORDER BY t.tenant LIMIT %(walked)s
), sharing AS MATERIALIZED (
    SELECT w.tenant
    FROM walked w
    CROSS JOIN LATERAL (
        SELECT FROM payloads p WHERE p.tenant = w.tenant AND p.expires_at <= statement_timestamp()
        ORDER BY p.expires_at LIMIT 1
    ) AS has_expired
    WHERE (SELECT true FROM holds h WHERE h.tenant = w.tenant ORDER BY h.hold LIMIT 1) IS NULL
    ORDER BY w.tenant LIMIT %(tenants)s
), expired AS MATERIALIZED (
    SELECT p.tenant, p.stream, p.sequence
    FROM sharing s
    CROSS JOIN LATERAL (
        SELECT p.tenant, p.stream, p.sequence FROM payloads p
        WHERE p.tenant = s.tenant AND p.expires_at <= statement_timestamp()
        ORDER BY p.expires_at LIMIT greatest(%(most)s / (SELECT greatest(count(*), 1) FROM sharing), 1)
    ) AS p
), deleted AS (
    DELETE FROM payloads p USING expired e
    WHERE (p.tenant, p.stream, p.sequence) BETWEEN (e.tenant, e.stream, e.sequence) AND (e.tenant, e.stream, e.sequence)
      AND coalesce(p.expires_at <= statement_timestamp(), false)
    RETURNING p.tenant
)
SELECT (SELECT count(*) FROM deleted),
       CASE WHEN (SELECT count(*) FROM sharing) = %(tenants)s THEN (SELECT max(tenant) FROM sharing)
            WHEN (SELECT count(*) FROM walked) = %(walked)s THEN (SELECT max(tenant) FROM walked)
            ELSE '' END
"""


async def delete_expired(connection: Connection, *, after: str, most: int = MAX_BATCH) -> Swept | None:
    """Delete at most `most` expired payloads of the tenants behind `after` (role sweep).

    Those of held tenants stay. None if another batch runs at this moment, or a hold or a redrive is being committed.
    """
    lock = await connection.execute(LOCK_ALONE, {"lock": SWEEP_LOCK})
    if await lock.fetchone() != (True,):
        return None
    most = min(most, MAX_BATCH)
    parameters = {"after": after, "most": most, "tenants": min(most, MAX_TENANTS), "walked": MAX_WALKED}
    await connection.execute(f"SELECT {SET_PLANS}")
    row = await (await connection.execute(DELETE_EXPIRED, parameters)).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM has one row
    return Swept(*row)


@dataclass(frozen=True, slots=True)
class Expired:
    """What of a tenant has expired and is still there, counted up to MAX_COUNTED."""

    tenant: str
    expired: int
    first_expired_at: datetime
    held: bool
    """Then none of it is deleted."""


COUNT_EXPIRED: LiteralString = """
SELECT n.tenant, c.expired, c.first_expired_at, EXISTS (SELECT FROM holds h WHERE h.tenant = n.tenant)
FROM (
    SELECT t.tenant
    FROM tenants t
    CROSS JOIN LATERAL (
        SELECT FROM payloads p WHERE p.tenant = t.tenant AND p.expires_at <= statement_timestamp()
        ORDER BY p.expires_at LIMIT 1
    ) AS has_expired
    WHERE t.tenant > %(after)s
    ORDER BY t.tenant LIMIT 1
) AS n
CROSS JOIN LATERAL (
    SELECT count(*) AS expired, min(expires_at) AS first_expired_at
    FROM (
        SELECT p.expires_at FROM payloads p
        WHERE p.tenant = n.tenant AND p.expires_at <= statement_timestamp()
        ORDER BY p.expires_at LIMIT %(most)s
    ) AS counted
) AS c
"""


async def next_expired(connection: Connection, *, after: str) -> Expired | None:
    """What has expired of the first tenant behind `after` that has any; None at the end (role sweep)."""
    await connection.execute(f"SELECT {SET_PLANS}")
    row = await (await connection.execute(COUNT_EXPIRED, {"after": after, "most": MAX_COUNTED})).fetchone()
    return Expired(*row) if row else None

"""One delivery or intent shown, with why it was not sent yet, and cancelled while it waits; intents listed."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, LiteralString
from uuid import UUID

from postseal.postgres.sealed import STATE
from postseal.postgres.transaction import SET_PLANS, Connection
from postseal.rules.delivery import State

MAX_ATTEMPTS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One attempt that failed."""

    attempt: int
    ended_at: datetime
    code: str


@dataclass(frozen=True, slots=True)
class ShownDelivery:
    """A delivery as it stands, with its destination."""

    delivery: UUID
    project: str
    destination: str
    stream: int
    sequence: int
    event_id: UUID
    idempotency_key: str
    event_identity: bytes
    sealed_at: datetime
    expires_at: datetime | None
    state: State
    code: str | None
    """Of a dead one why; of another that failed before, the last attempt's."""
    attempt: int
    attempt_limit: int
    due_at: datetime | None
    """When a pending one is due."""
    lease_ends: datetime | None
    """Of one that is out."""
    settled_at: datetime | None
    mode: str
    destination_disabled_at: datetime | None
    destination_disabled_reason: str | None
    destination_failing_since: datetime | None
    destination_last_code: str | None
    attempts: list[FailedAttempt]
    """The failed ones, oldest first; at most the last 100."""


@dataclass(frozen=True, slots=True)
class ShownIntent:
    """An intent that is not sealed. `code` (see SealCode) says why; None: it was not tried yet."""

    delivery: UUID
    project: str
    destination: str
    idempotency_key: str
    created_at: datetime
    expires_at: datetime | None
    due_at: datetime | None
    """When it is tried next; None: it is given up."""
    tries: int
    code: str | None


# The joins are as in `deliveries`, for its reasons.
NAMED: LiteralString = """(
    SELECT * FROM deliveries v WHERE v.tenant = %(tenant)s AND v.delivery BETWEEN %(delivery)s AND %(delivery)s
    ORDER BY v.delivery LIMIT 1
)"""

SHOW: LiteralString = """
SELECT v.delivery, d.project, d.destination, v.stream, v.sequence, v.event_id, v.idempotency_key, v.event_identity,
       v.sealed_at, v.expires_at, {state} AS state, coalesce(s.code, q.code),
       coalesce(s.attempt, q.attempt), coalesce(s.attempt_limit, q.attempt_limit),
       CASE WHEN {state} = 'pending' THEN q.due_at END, CASE WHEN {state} = 'delivering' THEN q.due_at END,
       s.settled_at, d.mode, d.disabled_at, d.disabled_reason, h.failing_since, h.last_code
FROM {named} AS v
CROSS JOIN LATERAL (
    SELECT * FROM destinations d WHERE d.tenant = v.tenant AND d.stream BETWEEN v.stream AND v.stream
    ORDER BY d.stream LIMIT 1
) AS d
JOIN destination_health h ON (h.tenant, h.stream) BETWEEN (v.tenant, v.stream) AND (v.tenant, v.stream)
LEFT JOIN queue q ON (q.tenant, q.stream, q.sequence)
                     BETWEEN (v.tenant, v.stream, v.sequence) AND (v.tenant, v.stream, v.sequence)
LEFT JOIN settlements s ON (s.tenant, s.stream, s.sequence)
                           BETWEEN (v.tenant, v.stream, v.sequence) AND (v.tenant, v.stream, v.sequence)
""".replace("{named}", NAMED).replace("{state}", STATE.replace("clock_timestamp()", "statement_timestamp()"))

STATE_COLUMN = 10

LAST_ATTEMPTS: LiteralString = """
SELECT attempt, ended_at, code FROM attempts
WHERE tenant = %(tenant)s AND stream = %(stream)s AND sequence = %(sequence)s
ORDER BY attempt DESC LIMIT %(limit)s
"""


async def show(connection: Connection, tenant: str, delivery: UUID) -> ShownDelivery | None:
    """One delivery by its id; None if none was sealed under it (there may be an intent)."""
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(SHOW, {"tenant": tenant, "delivery": delivery})
    row = await cursor.fetchone()
    if row is None:
        return None
    columns: list[Any] = list(row)
    columns[STATE_COLUMN] = State(columns[STATE_COLUMN])
    shown = ShownDelivery(*columns, attempts=[])
    parameters = {"tenant": tenant, "stream": shown.stream, "sequence": shown.sequence, "limit": MAX_ATTEMPTS_SHOWN}
    attempts = await (await connection.execute(LAST_ATTEMPTS, parameters)).fetchall()
    shown.attempts.extend(FailedAttempt(*attempt) for attempt in reversed(attempts))
    return shown


INTENT: LiteralString = """
SELECT delivery, project, destination, idempotency_key, created_at, expires_at, nullif(due_at, 'infinity'), tries, code
FROM intents WHERE tenant = %(tenant)s
"""
SHOW_INTENT: LiteralString = INTENT + "AND delivery = %(delivery)s"


async def show_intent(connection: Connection, tenant: str, delivery: UUID) -> ShownIntent | None:
    """The intent that is not sealed under that id."""
    row = await (await connection.execute(SHOW_INTENT, {"tenant": tenant, "delivery": delivery})).fetchone()
    return ShownIntent(*row) if row else None


LIST_INTENTS: LiteralString = (
    INTENT
    + """
AND project = %(project)s AND (%(code)s::text IS NULL OR code = %(code)s)
ORDER BY created_at, delivery LIMIT %(limit)s
"""
)


async def list_intents(
    connection: Connection, tenant: str, project: str, *, code: str | None, limit: int
) -> list[ShownIntent]:
    """The first `limit` intents of a project that are not sealed, oldest first; with that code alone if one is given.

    Reads all of the tenant's: for an operator.
    """
    parameters = {"tenant": tenant, "project": project, "code": code, "limit": limit}
    cursor = await connection.execute(LIST_INTENTS, parameters)
    return [ShownIntent(*row) for row in await cursor.fetchall()]


class Cancelled(StrEnum):
    """How an attempt to cancel went."""

    CANCELLED = "cancelled"
    INTENT_CANCELLED = "intent_cancelled"
    """It was not sealed yet, and never will be."""
    EXPIRED = "expired"
    """Its expiry had passed: it is settled so."""
    DELIVERING = "delivering"
    """It is out: nobody can take it back."""
    SETTLED = "settled"
    """It had ended before."""
    UNKNOWN = "unknown"


CANCEL_INTENT: LiteralString = """
DELETE FROM intents WHERE tenant = %(tenant)s AND project = %(project)s AND delivery = %(delivery)s
"""

# The locks in the order that deliveries.py tells.
CANCEL: LiteralString = """
WITH mine AS MATERIALIZED (
    SELECT q.*, q.stage = 'leased' AND q.due_at > clock_timestamp() AS out,
           q.expires_at <= clock_timestamp() IS TRUE AS expired
    FROM {named} AS v
    CROSS JOIN LATERAL (
        SELECT d.project FROM destinations d WHERE d.tenant = v.tenant AND d.stream BETWEEN v.stream AND v.stream
        ORDER BY d.stream LIMIT 1
    ) AS d
    JOIN queue q ON (q.tenant, q.stream, q.sequence)
                    BETWEEN (v.tenant, v.stream, v.sequence) AND (v.tenant, v.stream, v.sequence)
    WHERE d.project = %(project)s
    FOR NO KEY UPDATE OF q
), ended AS (
    DELETE FROM queue q USING mine m
    WHERE NOT m.out AND (q.tenant, q.stream, q.sequence)
                        BETWEEN (m.tenant, m.stream, m.sequence) AND (m.tenant, m.stream, m.sequence)
    RETURNING m.*
), settled AS (
    INSERT INTO settlements (tenant, stream, sequence, state, attempt, attempt_limit)
    SELECT tenant, stream, sequence, CASE WHEN expired THEN 'expired' ELSE 'cancelled' END, attempt, attempt_limit
    FROM ended
), counted AS (
    UPDATE destination_health h SET settled = h.settled + 1
    FROM ended e WHERE (h.tenant, h.stream) BETWEEN (e.tenant, e.stream) AND (e.tenant, e.stream)
)
SELECT CASE WHEN out THEN 'delivering' WHEN expired THEN 'expired' ELSE 'cancelled' END FROM mine
""".replace("{named}", NAMED)

FIND: LiteralString = """
SELECT FROM {named} AS v
JOIN destinations d ON d.tenant = v.tenant AND d.stream = v.stream
WHERE d.project = %(project)s
""".replace("{named}", NAMED)


async def cancel(connection: Connection, tenant: str, project: str, delivery: UUID) -> Cancelled:
    """End a delivery that is pending, or an intent, so that it is never sent (any more)."""
    parameters = {"tenant": tenant, "project": project, "delivery": delivery}
    await connection.execute(f"SELECT {SET_PLANS}")
    # The intent first: where it is being sealed, this waits until there is a delivery.
    if (await connection.execute(CANCEL_INTENT, parameters)).rowcount == 1:
        return Cancelled.INTENT_CANCELLED
    if row := await (await connection.execute(CANCEL, parameters)).fetchone():
        return Cancelled(row[0])
    found = await connection.execute(FIND, parameters)
    return Cancelled.SETTLED if found.rowcount else Cancelled.UNKNOWN

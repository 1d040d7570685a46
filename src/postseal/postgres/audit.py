"""The audit trails: administrators' acts written, a tenant's trail read (protocol section 6).

Each event is written by the transaction that does what it tells; those of envelopes are the group commit's.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg.types.json import Jsonb

from postseal.postgres.transaction import Connection

MAX_PAGE_ROWS = 1_000

ACT_DONE = "done"
"""The outcome of an act: one that is refused changes nothing and is told to whoever tried it."""

INSERT_ACT: LiteralString = """
INSERT INTO audit_events (tenant, project, account, device, action, outcome, detail, correlation_id)
VALUES (%(tenant)s, %(project)s, %(account)s, %(device)s, %(action)s, %(outcome)s, %(detail)s,
        %(correlation_id)s)
"""


async def insert_act(
    connection: Connection,
    *,
    tenant: str,
    project: str | None,
    account: str,
    device: str | None,
    action: str,
    detail: dict[str, Any],
    correlation_id: UUID,
) -> None:
    """Write an act on a tenant into its trail; `account` and `device` are who did it."""
    parameters = {
        "tenant": tenant,
        "project": project,
        "account": account,
        "device": device,
        "action": action,
        "outcome": ACT_DONE,
        "detail": Jsonb(detail),
        "correlation_id": correlation_id,
    }
    await connection.execute(INSERT_ACT, parameters)


INSERT_PLATFORM_ACT: LiteralString = """
INSERT INTO platform_audit_events (account, action, detail, correlation_id)
VALUES (%(account)s, %(action)s, %(detail)s, %(correlation_id)s)
"""


async def insert_platform_act(
    connection: Connection, *, account: str, action: str, detail: dict[str, Any], correlation_id: UUID
) -> None:
    """Write an act on the platform itself into its trail."""
    parameters = {
        "account": account,
        "action": action,
        "detail": Jsonb(detail),
        "correlation_id": correlation_id,
    }
    await connection.execute(INSERT_PLATFORM_ACT, parameters)


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One event of a tenant's trail. `event_identity` is in hexadecimal digits."""

    id: int
    at: datetime
    project: str | None
    account: str
    device: str | None
    action: str
    outcome: str
    reason: str | None
    event_identity: str | None
    undecodable: bool
    occurrences: int
    detail: dict[str, Any] | None
    correlation_id: UUID


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which events of a tenant's trail are wanted; None lets all pass."""

    project: str | None = None
    within: list[str] | None = None
    """Of these projects only; events without a project are of none."""
    reason: str | None = None
    outcome: str | None = None
    since: datetime | None = None


MATCHING: LiteralString = """
SELECT id, at, project, account, device, action, outcome, reason, encode(event_identity, 'hex'), undecodable,
       occurrences, detail, correlation_id
FROM audit_events
WHERE tenant = %(tenant)s
  AND (%(project)s::text IS NULL OR project = %(project)s)
  AND (%(within)s::text[] IS NULL OR project = ANY(%(within)s))
  AND (%(reason)s::text IS NULL OR reason = %(reason)s)
  AND (%(outcome)s::text IS NULL OR outcome = %(outcome)s)
  AND (%(since)s::timestamptz IS NULL OR at >= %(since)s)
"""
PAGE_AFTER: LiteralString = MATCHING + "AND id > %(bound)s ORDER BY id LIMIT %(rows)s"
PAGE_BEFORE: LiteralString = MATCHING + "AND id < %(bound)s ORDER BY id DESC LIMIT %(rows)s"

BEYOND_ALL_IDS = 2**63 - 1


async def page_after(
    connection: Connection, tenant: str, wanted: AuditFilter, *, after: int, rows: int
) -> list[AuditEvent]:
    """The first `rows` events behind the id `after`, by id.

    An event has its id when it is written and is seen when its transaction commits, so that one with a lower id
    can appear a moment later.
    """
    return await _page(connection, PAGE_AFTER, tenant, wanted, bound=after, rows=rows)


async def page_before(
    connection: Connection, tenant: str, wanted: AuditFilter, *, before: int = BEYOND_ALL_IDS, rows: int
) -> list[AuditEvent]:
    """The last `rows` events before the id `before`, by id."""
    events = await _page(connection, PAGE_BEFORE, tenant, wanted, bound=before, rows=rows)
    return events[::-1]


async def _page(
    connection: Connection, query: LiteralString, tenant: str, wanted: AuditFilter, *, bound: int, rows: int
) -> list[AuditEvent]:
    parameters = {
        "tenant": tenant,
        "project": wanted.project,
        "within": wanted.within,
        "reason": wanted.reason,
        "outcome": wanted.outcome,
        "since": wanted.since,
        "bound": bound,
        "rows": min(rows, MAX_PAGE_ROWS),
    }
    return [AuditEvent(*row) for row in await (await connection.execute(query, parameters)).fetchall()]

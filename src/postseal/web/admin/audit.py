"""`/v1/admin/audit`: the trail, a page at a time."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from postseal.admin import audit
from postseal.admin.operator import Operator
from postseal.envelope.canonical import MAX_INTEGER
from postseal.outcomes import Reason
from postseal.postgres.audit import AuditEvent, AuditFilter
from postseal.postgres.database import Connection
from postseal.web.admin.office import ADMIN, DEFAULT_PAGE_ITEMS, OPERATORS, Office
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, TimeMs, milliseconds, time_of
from postseal.web.query import IdOrEmpty, Limit, Word

AUDIT = f"{ADMIN}/audit"

EventId = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]


class Event(Struct, frozen=True, rename="camel"):
    """One event of the trail: of an envelope, or of an administrator's act, which `detail` tells about."""

    id: int
    at_ms: int
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
    correlation_id: str


class EventPage(Struct, frozen=True):
    """Events, the newest last."""

    items: list[Event]


class EventsQuery(Struct, frozen=True, rename="camel"):
    """Which events: the first ones behind `after`, or the last ones before `before`, or the last ones of all."""

    project: IdOrEmpty = ""
    outcome: Word = ""
    reason: Word = ""
    since_ms: TimeMs | UnsetType = UNSET
    before: EventId | UnsetType = UNSET
    after: EventId | UnsetType = UNSET
    limit: Limit = DEFAULT_PAGE_ITEMS


class AuditCalls:
    """The trail of an operator's projects."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def calls(self) -> list[Call]:
        """The one there is."""
        read = self._office.reception.read
        missing = (Reason.NOT_FOUND,)
        return [read(AUDIT, self.list_page, roles=OPERATORS, query=EventsQuery, answer=EventPage, reasons=missing)]

    async def list_page(self, asked: Asked[EventsQuery, Nothing]) -> EventPage:
        """Audit events of the operator's projects; those without a project are for who has all of the tenant's."""
        query = asked.query

        async def work(connection: Connection, operator: Operator) -> list[AuditEvent]:
            if query.project:
                operator.require_projects([query.project])
            wanted = AuditFilter(
                project=query.project or None,
                within=None if await operator.covers_tenant(connection) else sorted(operator.projects),
                reason=query.reason or None,
                outcome=query.outcome or None,
                since=time_of(query.since_ms),
            )
            return await audit.page(
                connection,
                operator.tenant,
                wanted,
                rows=query.limit,
                before=None if query.before is UNSET else query.before,
                after=None if query.after is UNSET else query.after,
            )

        return EventPage([_event(row) for row in await self._office.act(asked, work)])


def _event(row: AuditEvent) -> Event:
    return Event(
        row.id,
        milliseconds(row.at),
        row.project,
        row.account,
        row.device,
        row.action,
        row.outcome,
        row.reason,
        row.event_identity,
        row.undecodable,
        row.occurrences,
        row.detail,
        str(row.correlation_id),
    )

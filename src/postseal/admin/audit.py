"""A tenant's audit trail, read a page at a time. Nothing writes to it afterwards."""

from postseal.admin.names import require_tenant
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import audit
from postseal.postgres.audit import MAX_PAGE_ROWS, AuditEvent, AuditFilter
from postseal.postgres.transaction import Connection


async def page(
    connection: Connection,
    tenant: str,
    wanted: AuditFilter,
    *,
    rows: int,
    before: int | None = None,
    after: int | None = None,
) -> list[AuditEvent]:
    """Up to `rows` events of a tenant's trail, the newest last.

    The first ones behind the id `after`, or the last ones before the id `before`, or the last ones of all.
    AdminError: no such tenant, both bounds at once, or a page of more than 1,000.
    """
    if not 1 <= rows <= MAX_PAGE_ROWS:
        raise AdminError(Reason.REQUEST_INVALID, f"a page has 1 to {MAX_PAGE_ROWS} events")
    if before is not None and after is not None:
        raise AdminError(Reason.REQUEST_INVALID, "a page is before an event or after one, not both")
    await require_tenant(connection, tenant)
    if after is not None:
        return await audit.page_after(connection, tenant, wanted, after=after, rows=rows)
    if before is not None:
        return await audit.page_before(connection, tenant, wanted, before=before, rows=rows)
    return await audit.page_before(connection, tenant, wanted, rows=rows)

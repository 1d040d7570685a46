"""How long payloads are kept: set for a tenant or a project, and shown.

A project's own days come first, then its tenant's, then the deployment's. They count for what is accepted, and for
ended deliveries that a sweep dates, from then on. What has its time already keeps it: so a slip deletes none of it.
"""

from postseal.admin.actor import Actor
from postseal.admin.names import require_projects, require_tenant
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import retention
from postseal.postgres.retention import Retention
from postseal.postgres.transaction import Connection
from postseal.settings import MAX_RETENTION_DAYS


async def show(connection: Connection, tenant: str) -> list[Retention]:
    """What the tenant and each of its projects set, the tenant first. AdminError: no such tenant."""
    await require_tenant(connection, tenant)
    return await retention.list_retention(connection, tenant)


async def change(connection: Connection, actor: Actor, tenant: str, project: str | None, days: int | None) -> None:
    """Set the days of a tenant or of one of its projects; None takes them away.

    AdminError: no such tenant or project, or days that are not 1 to 36,500.
    """
    if days is not None and not 1 <= days <= MAX_RETENTION_DAYS:
        raise AdminError(Reason.REQUEST_INVALID, f"payloads are kept for 1 to {MAX_RETENTION_DAYS} days")
    if project is None:
        await require_tenant(connection, tenant)
    else:
        await require_projects(connection, tenant, [project])
    before = {row.project: row.days for row in await retention.list_retention(connection, tenant)}
    await retention.set_retention(connection, tenant, project, days)
    await actor.acted(
        connection, "retention.set", tenant=tenant, project=project, **{"from": before[project], "to": days}
    )

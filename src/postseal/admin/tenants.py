"""Tenants and their projects: made and listed. Neither is ever removed."""

from postseal.admin.actor import Actor
from postseal.admin.names import require_id, require_tenant
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import directory
from postseal.postgres.directory import Project, Tenant
from postseal.postgres.transaction import Connection


async def create(connection: Connection, actor: Actor, tenant: str) -> None:
    """Make a tenant. AdminError: not an id, or there already."""
    require_id("a tenant", tenant)
    if not await directory.insert_tenant_if_new(connection, tenant):
        raise AdminError(Reason.CONFLICT, f"tenant {tenant!r} exists already")
    await actor.acted_on_platform(connection, "tenant.create", tenant=tenant)
    await actor.acted(connection, "tenant.create", tenant=tenant)


async def list_all(connection: Connection) -> list[Tenant]:
    """All tenants by name."""
    return await directory.list_tenants(connection)


async def create_project(connection: Connection, actor: Actor, tenant: str, project: str) -> None:
    """Make a project of a tenant. AdminError: no such tenant, not an id, or there already."""
    require_id("a project", project)
    await require_tenant(connection, tenant)
    if not await directory.insert_project_if_new(connection, tenant, project):
        raise AdminError(Reason.CONFLICT, f"tenant {tenant!r} has a project {project!r} already")
    await actor.acted(connection, "project.create", tenant=tenant, project=project)


async def list_projects(connection: Connection, tenant: str) -> list[Project]:
    """All projects of a tenant by name. AdminError: no such tenant."""
    await require_tenant(connection, tenant)
    return await directory.list_projects(connection, tenant)

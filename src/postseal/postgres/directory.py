"""Tenants and their projects."""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant."""

    tenant: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Project:
    """A project of the tenant that was asked for."""

    project: str
    created_at: datetime


INSERT_TENANT: LiteralString = "INSERT INTO tenants (tenant) VALUES (%(tenant)s) ON CONFLICT DO NOTHING"


async def insert_tenant_if_new(connection: Connection, tenant: str) -> bool:
    """Make a tenant; False if it is there already."""
    return (await connection.execute(INSERT_TENANT, {"tenant": tenant})).rowcount == 1


TENANT_EXISTS: LiteralString = "SELECT 1 FROM tenants WHERE tenant = %(tenant)s"


async def tenant_exists(connection: Connection, tenant: str) -> bool:
    """Whether there is such a tenant."""
    return await (await connection.execute(TENANT_EXISTS, {"tenant": tenant})).fetchone() is not None


LIST_TENANTS: LiteralString = "SELECT tenant, created_at FROM tenants ORDER BY tenant"


async def list_tenants(connection: Connection) -> list[Tenant]:
    """All tenants by name."""
    return [Tenant(*row) for row in await (await connection.execute(LIST_TENANTS)).fetchall()]


INSERT_PROJECT: LiteralString = """
INSERT INTO projects (tenant, project) VALUES (%(tenant)s, %(project)s) ON CONFLICT DO NOTHING
"""


async def insert_project_if_new(connection: Connection, tenant: str, project: str) -> bool:
    """Make a project of an existing tenant; False if it is there already."""
    cursor = await connection.execute(INSERT_PROJECT, {"tenant": tenant, "project": project})
    return cursor.rowcount == 1


LIST_PROJECTS: LiteralString = """
SELECT project, created_at FROM projects WHERE tenant = %(tenant)s ORDER BY project
"""


async def list_projects(connection: Connection, tenant: str) -> list[Project]:
    """All projects of a tenant by name."""
    cursor = await connection.execute(LIST_PROJECTS, {"tenant": tenant})
    return [Project(*row) for row in await cursor.fetchall()]


EXISTING_PROJECTS: LiteralString = """
SELECT project FROM projects WHERE tenant = %(tenant)s AND project = ANY(%(projects)s)
"""


async def existing_projects(connection: Connection, tenant: str, projects: list[str]) -> set[str]:
    """Those of `projects` that the tenant has."""
    cursor = await connection.execute(EXISTING_PROJECTS, {"tenant": tenant, "projects": projects})
    return {project for (project,) in await cursor.fetchall()}

"""Which database logins of applications may leave intents, and for which projects of which tenant."""

from dataclasses import dataclass
from typing import LiteralString

from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class AllowedLogin:
    """A login of the tenant that was asked for."""

    login: str
    projects: list[str]


DELETE: LiteralString = "DELETE FROM enqueue_logins WHERE tenant = %(tenant)s AND login = %(login)s"


async def delete(connection: Connection, tenant: str, login: str) -> bool:
    """Let a login leave nothing more for a tenant; False if it was not allowed to."""
    return (await connection.execute(DELETE, {"tenant": tenant, "login": login})).rowcount == 1


INSERT: LiteralString = """
INSERT INTO enqueue_logins (login, tenant, projects) VALUES (%(login)s, %(tenant)s, %(projects)s)
ON CONFLICT DO NOTHING
"""


async def insert_if_new(connection: Connection, tenant: str, login: str, projects: list[str]) -> bool:
    """Let a login leave intents for these projects; False if it is allowed some already."""
    parameters = {"tenant": tenant, "login": login, "projects": projects}
    return (await connection.execute(INSERT, parameters)).rowcount == 1


LIST: LiteralString = "SELECT login, projects FROM enqueue_logins WHERE tenant = %(tenant)s ORDER BY login"


async def list_of_tenant(connection: Connection, tenant: str) -> list[AllowedLogin]:
    """All logins of a tenant by name."""
    return [AllowedLogin(*row) for row in await (await connection.execute(LIST, {"tenant": tenant})).fetchall()]

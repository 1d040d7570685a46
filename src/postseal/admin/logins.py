"""Database logins of applications: allowed to leave intents, listed, disallowed.

The login itself is the database administrator's: a role that is a member of `<role prefix>_enqueue`.
"""

from collections.abc import Sequence

from postseal.admin.actor import Actor
from postseal.admin.names import require_projects, require_tenant
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import logins
from postseal.postgres.logins import AllowedLogin
from postseal.postgres.transaction import Connection

MAX_LOGIN_BYTES = 63
"""PostgreSQL's own bound of a role's name."""


async def allow(connection: Connection, actor: Actor, tenant: str, login: str, projects: Sequence[str]) -> list[str]:
    """Let a login leave intents for these projects and for no others; returns them in order.

    What it was allowed before ends. AdminError: no such tenant or project, or no name of a login.
    """
    if not login.isprintable() or not 1 <= len(login.encode()) <= MAX_LOGIN_BYTES:
        raise AdminError(Reason.REQUEST_INVALID, f"a login's name has 1 to {MAX_LOGIN_BYTES} printable bytes")
    wanted = await require_projects(connection, tenant, projects)
    await logins.delete(connection, tenant, login)
    if not await logins.insert_if_new(connection, tenant, login, wanted):
        raise AdminError(Reason.CONFLICT, f"login {login!r} is being allowed by somebody else: look, and try again")
    await actor.acted(connection, "login.allow", tenant=tenant, login=login, projects=wanted)
    return wanted


async def list_of_tenant(connection: Connection, tenant: str) -> list[AllowedLogin]:
    """The logins that may leave intents for a tenant, by name. AdminError: no such tenant."""
    await require_tenant(connection, tenant)
    return await logins.list_of_tenant(connection, tenant)


async def disallow(connection: Connection, actor: Actor, tenant: str, login: str) -> None:
    """Let a login leave nothing more for a tenant; what it left is sealed all the same.

    AdminError: no such tenant, or the login was not allowed.
    """
    await require_tenant(connection, tenant)
    if not await logins.delete(connection, tenant, login):
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} allows no such login")
    await actor.acted(connection, "login.disallow", tenant=tenant, login=login)

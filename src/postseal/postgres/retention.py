"""How long payloads are kept, by tenant and project, and the holds that keep a tenant's from the sweep (role admin)."""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Retention:
    """What a tenant or a project sets for itself, in days (a begun one counts); None leaves it to what is above it."""

    project: str | None
    """None for the tenant."""
    days: int | None


LIST_RETENTION: LiteralString = """
SELECT NULL, ceil(extract(epoch FROM payload_retention) / 86400)::integer
FROM tenants WHERE tenant = %(tenant)s
UNION ALL
(
    SELECT project, ceil(extract(epoch FROM payload_retention) / 86400)::integer
    FROM projects WHERE tenant = %(tenant)s ORDER BY project
)
"""


async def list_retention(connection: Connection, tenant: str) -> list[Retention]:
    """The tenant's, then each project's by name; nothing if there is no such tenant."""
    cursor = await connection.execute(LIST_RETENTION, {"tenant": tenant})
    return [Retention(*row) for row in await cursor.fetchall()]


SET_OF_TENANT: LiteralString = """
UPDATE tenants SET payload_retention = make_interval(days => %(days)s) WHERE tenant = %(tenant)s
"""
SET_OF_PROJECT: LiteralString = """
UPDATE projects SET payload_retention = make_interval(days => %(days)s)
WHERE tenant = %(tenant)s AND project = %(project)s
"""


async def set_retention(connection: Connection, tenant: str, project: str | None, days: int | None) -> None:
    """Set it for a tenant, or for one of its projects; `days` None takes it away."""
    parameters = {"tenant": tenant, "project": project, "days": days}
    await connection.execute(SET_OF_TENANT if project is None else SET_OF_PROJECT, parameters)


@dataclass(frozen=True, slots=True)
class Hold:
    """What keeps a tenant's payloads from being deleted, and who placed it."""

    tenant: str
    hold: str
    reason: str
    account: str
    placed_at: datetime


INSERT_HOLD: LiteralString = """
INSERT INTO holds (tenant, hold, reason, account) VALUES (%(tenant)s, %(hold)s, %(reason)s, %(account)s)
ON CONFLICT DO NOTHING
"""


async def insert_hold_if_new(connection: Connection, tenant: str, hold: str, *, reason: str, account: str) -> bool:
    """Place a hold; False if the tenant has one of that name."""
    parameters = {"tenant": tenant, "hold": hold, "reason": reason, "account": account}
    return (await connection.execute(INSERT_HOLD, parameters)).rowcount == 1


DELETE_HOLD: LiteralString = "DELETE FROM holds WHERE tenant = %(tenant)s AND hold = %(hold)s"


async def delete_hold(connection: Connection, tenant: str, hold: str) -> bool:
    """Take a hold away; False if there is none of that name."""
    return (await connection.execute(DELETE_HOLD, {"tenant": tenant, "hold": hold})).rowcount == 1


LIST_HOLDS: LiteralString = """
SELECT tenant, hold, reason, account, placed_at FROM holds
WHERE %(tenant)s::text IS NULL OR tenant = %(tenant)s
ORDER BY tenant, hold
"""


async def list_holds(connection: Connection, tenant: str | None) -> list[Hold]:
    """All holds of a tenant, or of all, by name."""
    cursor = await connection.execute(LIST_HOLDS, {"tenant": tenant})
    return [Hold(*row) for row in await cursor.fetchall()]


IS_ON_HOLD: LiteralString = "SELECT EXISTS (SELECT FROM holds WHERE tenant = %(tenant)s)"


async def is_on_hold(connection: Connection, tenant: str) -> bool:
    """Whether a tenant has any hold."""
    row = await (await connection.execute(IS_ON_HOLD, {"tenant": tenant})).fetchone()
    return row == (True,)

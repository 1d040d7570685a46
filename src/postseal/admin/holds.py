"""Holds: while a tenant has one, none of its payloads is deleted, whatever their time, and all of them can be read.

A tenant can have several, by name. What expired meanwhile is deleted after the last one is released.
"""

from postseal.admin.actor import Actor
from postseal.admin.names import require_id, require_reason, require_tenant
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import retention
from postseal.postgres.payloads import keep_sweep_away
from postseal.postgres.retention import Hold
from postseal.postgres.transaction import Connection


async def place(connection: Connection, actor: Actor, tenant: str, hold: str, *, reason: str) -> None:
    """Place a hold; from its commit on nothing of the tenant's is deleted, by no sweep that is under way either.

    AdminError: no such tenant, a name that is no id, one that is there already, or a reason that is no line of text.
    """
    require_id("a hold", hold)
    require_reason(reason)
    await keep_sweep_away(connection)
    await require_tenant(connection, tenant)
    if not await retention.insert_hold_if_new(connection, tenant, hold, reason=reason, account=actor.account):
        raise AdminError(Reason.CONFLICT, f"tenant {tenant!r} has a hold {hold!r} already")
    await actor.acted(connection, "hold.place", tenant=tenant, hold=hold, reason=reason)


async def release(connection: Connection, actor: Actor, tenant: str, hold: str, *, reason: str) -> None:
    """Take a hold away. AdminError: no such tenant or hold, or a reason that is no line of text."""
    require_reason(reason)
    await require_tenant(connection, tenant)
    if not await retention.delete_hold(connection, tenant, hold):
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no hold {hold!r}")
    await actor.acted(connection, "hold.release", tenant=tenant, hold=hold, reason=reason)


async def list_of(connection: Connection, tenant: str | None) -> list[Hold]:
    """All holds of a tenant, or of all tenants. AdminError: no such tenant."""
    if tenant is not None:
        await require_tenant(connection, tenant)
    return await retention.list_holds(connection, tenant)

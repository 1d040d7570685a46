"""Devices' keys: listed, retired to verify-only, revoked (protocol section 8).

A change first waits until nothing signed by the device is being taken in, then changes the state: what was
acknowledged before it stays, and nothing that is judged after it gets in.
"""

from postseal.admin.actor import Actor
from postseal.admin.devices import lock_quiet
from postseal.admin.names import require_tenant
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import devices, keys
from postseal.postgres.keys import ListedKey
from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection

ACCEPTING = ("active", "retiring")
VERIFY_ONLY = "verify-only"
REVOKED = "revoked"


async def list_of_tenant(
    connection: Connection, tenant: str, device: str | None = None, part: ListPart = WHOLE
) -> list[ListedKey]:
    """A tenant's keys, or those of one of its devices, oldest first. AdminError: no such tenant or device."""
    await require_tenant(connection, tenant)
    if device is not None and await devices.find(connection, tenant, device) is None:
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no device {device!r}")
    return await keys.list_of_tenant(connection, tenant, device, part)


async def retire(connection: Connection, actor: Actor, tenant: str, keyid: str) -> None:
    """Let a key verify what it signed and bring nothing new.

    AdminError: no such key, or it brings nothing new as it is.
    """
    await _change(connection, actor, tenant, keyid, "key.retire", to=VERIFY_ONLY, from_states=ACCEPTING)


async def revoke(connection: Connection, actor: Actor, tenant: str, keyid: str) -> None:
    """Revoke a key, at once. AdminError: no such key, revoked already, or removed."""
    from_states = (*ACCEPTING, VERIFY_ONLY)
    await _change(connection, actor, tenant, keyid, "key.revoke", to=REVOKED, from_states=from_states)


async def _change(
    connection: Connection,
    actor: Actor,
    tenant: str,
    keyid: str,
    action: str,
    *,
    to: str,
    from_states: tuple[str, ...],
) -> None:
    device = (await _require_key(connection, tenant, keyid)).device
    await lock_quiet(connection, tenant, device)
    state = (await _require_key(connection, tenant, keyid)).state
    if state not in from_states:
        raise AdminError(Reason.CONFLICT, f"the key is {state} already")
    await keys.set_state(connection, tenant, keyid, to)
    await actor.acted(connection, action, tenant=tenant, device=device, keyid=keyid, **{"from": state, "to": to})


async def _require_key(connection: Connection, tenant: str, keyid: str) -> keys.RegisteredKey:
    await require_tenant(connection, tenant)
    key = await keys.find(connection, tenant, keyid)
    if key is None:
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no such key: see `postseal key list`")
    return key

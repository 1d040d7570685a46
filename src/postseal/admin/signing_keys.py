"""The key with which the control plane signs for a tenant: its public half is registered here.

Its private half is where the deployment's SigningKeys looks (`postseal.signing`), and is there before this is done:
what is registered can be signed with.
"""

from postseal.admin.actor import Actor
from postseal.admin.names import require_tenant
from postseal.envelope import ed25519
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import signing_keys
from postseal.postgres.transaction import Connection


async def require_none(connection: Connection, tenant: str) -> None:
    """AdminError unless there is such a tenant and it has no active signing key."""
    await require_tenant(connection, tenant)
    if await signing_keys.find_active(connection, tenant) is not None:
        raise _has_one(tenant)


async def create(connection: Connection, actor: Actor, tenant: str, public_key: bytes) -> str:
    """Register a tenant's active signing key, and return its id.

    AdminError: no such tenant, no good public key, or the tenant has an active one.
    """
    await require_tenant(connection, tenant)
    try:
        ed25519.check_public_key(public_key)
    except ValueError as error:
        raise AdminError(Reason.REQUEST_INVALID, str(error)) from None
    keyid = ed25519.thumbprint(public_key)
    if not await signing_keys.insert_if_none_active(connection, tenant=tenant, keyid=keyid, public_key=public_key):
        raise _has_one(tenant)
    await actor.acted(connection, "signing-key.create", tenant=tenant, keyid=keyid)
    return keyid


def _has_one(tenant: str) -> AdminError:
    return AdminError(Reason.CONFLICT, f"tenant {tenant!r} has an active signing key already")

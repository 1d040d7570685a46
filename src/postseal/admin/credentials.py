"""Credentials of consumers, senders and operators: made, listed, revoked. Devices get theirs by enrolment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from postseal.admin.actor import Actor
from postseal.admin.names import require_id, require_projects, require_tenant
from postseal.errors import AdminError
from postseal.identity.tokens import new_token
from postseal.identity.verified import Role
from postseal.outcomes import Reason
from postseal.postgres import credentials
from postseal.postgres.credentials import ListedCredential
from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class IssuedCredential:
    """A credential at the only moment at which it is known; `repr` does not show it."""

    credential_id: UUID
    tenant: str
    account: str
    role: Role
    projects: list[str]
    credential: str = field(repr=False)
    expires_at: datetime


async def create(
    connection: Connection,
    actor: Actor,
    tenant: str,
    *,
    role: Role,
    projects: Sequence[str],
    lifetime_s: int,
    account: str | None = None,
) -> IssuedCredential:
    """Make a credential for `projects`; its account is `account`, or named like the role.

    AdminError: no such tenant or project, not an id, or the role of devices.
    """
    if role is Role.DEVICE:
        raise AdminError(Reason.REQUEST_INVALID, "a device gets its credential by enrolment: invite it")
    owner = account or str(role)
    require_id("an account", owner)
    wanted = await require_projects(connection, tenant, projects)
    token = new_token()
    expires_at = await credentials.insert(
        connection,
        credential_id=token.credential_id,
        secret_hash=token.secret_hash,
        tenant=tenant,
        account=owner,
        device=None,
        role=role,
        projects=wanted,
        lifetime_s=lifetime_s,
    )
    await actor.acted(
        connection,
        "credential.create",
        tenant=tenant,
        credentialId=str(token.credential_id),
        account=owner,
        role=str(role),
        projects=wanted,
    )
    return IssuedCredential(token.credential_id, tenant, owner, role, wanted, token.reveal(), expires_at)


async def list_of_tenant(connection: Connection, tenant: str, part: ListPart = WHOLE) -> list[ListedCredential]:
    """A tenant's credentials, devices' included, oldest first. AdminError: no such tenant."""
    await require_tenant(connection, tenant)
    return await credentials.list_of_tenant(connection, tenant, part)


async def revoke(connection: Connection, actor: Actor, tenant: str, credential_id: str) -> None:
    """Revoke a credential by its id. AdminError: not an id, no such credential, or revoked already.

    What was given is never repeated: somebody may paste the credential itself.
    """
    await require_tenant(connection, tenant)
    try:
        wanted = UUID(credential_id)
    except ValueError:
        raise AdminError(
            Reason.REQUEST_INVALID, "a credential's id is a UUID: see `postseal credential list`"
        ) from None
    if not await credentials.revoke(connection, tenant, wanted):
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no such credential that is not revoked already")
    await actor.acted(connection, "credential.revoke", tenant=tenant, credentialId=str(wanted))

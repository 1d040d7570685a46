"""Enrolment: a one-time code and a key's own signature become a device and its credential (protocol section 8).

In one transaction, in this order:

1. lock the invitation of the code; two that come with one code are served one after the other
2. the public key is a good one, and its signature over code, device, key id and tenant holds
3. first use: make the device (or lock it, where the invitation adds a key), its key, and in each project its stream
   and the destination from which it pulls; use again: the same key and proof bring the answer that was lost, with a
   new credential in place of the earlier
4. the credential, for the projects of the invitation and no others: whoever made it answered for those alone
5. the audit event

Whatever is wrong is answered with the same words, so that nothing can be learnt by asking.
"""

import hashlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import NoReturn
from uuid import UUID

from postseal.correlation import new_correlation_id
from postseal.envelope import ed25519
from postseal.envelope.enrolment import proves
from postseal.errors import Refused
from postseal.identity.codes import code_hash
from postseal.identity.tokens import new_token
from postseal.identity.verified import Role
from postseal.outcomes import Reason
from postseal.postgres import audit, credentials, destinations, devices, invitations, keys, streams
from postseal.postgres.database import Connection, Database
from postseal.postgres.invitations import Invitation

ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Enrolled:
    """What a new device is told. `credential` is shown this once; `repr` does not show it."""

    tenant: str
    device: str
    projects: list[str]
    keyid: str
    credential: str = field(repr=False)
    expires_at: datetime
    again: bool
    """Whether the code was spent before."""


@dataclass(frozen=True, slots=True)
class _Request:
    hash_of_code: bytes
    public_key: bytes
    keyid: str
    proof_hash: bytes
    max_pending: int


async def enrol(
    database: Database, *, code: str, public_key: bytes, proof: bytes, credential_lifetime_s: int, max_pending: int
) -> Enrolled:
    """Enrol the device that `code` invites, with an Ed25519 key (32 bytes) and its proof (64 bytes).

    `database` is the administrators' part; as many as `max_pending` deliveries may wait for the device in each project.
    Raises Refused `enrolment_refused`, and Unavailable.
    """
    hash_of_code = code_hash(code)
    if hash_of_code is None:
        _refuse()
    proof_hash = hashlib.sha256(proof).digest()
    request = _Request(hash_of_code, public_key, _good_keyid(public_key), proof_hash, max_pending)

    async def work(connection: Connection) -> Enrolled:
        invitation = await invitations.lock_valid(connection, hash_of_code)
        if invitation is None:
            _refuse()
        if not proves(
            public_key,
            proof,
            code=code,
            device=invitation.device,
            keyid=request.keyid,
            tenant=invitation.tenant,
        ):
            _refuse()
        if invitation.keyid is None:
            await _first_use(connection, invitation, request)
        else:
            await _use_again(connection, invitation, request)
        return await _give_credential(connection, invitation, request, credential_lifetime_s)

    return await database.transact(work)


async def _first_use(connection: Connection, invitation: Invitation, request: _Request) -> None:
    """Step 3 of a code that is not spent."""
    tenant, device = invitation.tenant, invitation.device
    if invitation.adds_key:
        await _lock_open_device(connection, invitation)
        now = await streams.projects_of_device(connection, tenant, device)
        if not set(now) <= set(invitation.reach):
            _refuse()  # the device has come to write where nobody answered for this key
    elif not await devices.insert_if_new(connection, tenant=tenant, device=device, account=invitation.account):
        _refuse()
    is_new = await keys.insert_if_new(
        connection, tenant=tenant, keyid=request.keyid, device=device, public_key=request.public_key
    )
    if not is_new:
        # The device's own key may open further projects.
        await _require_active_key(connection, invitation, request.keyid)
    await streams.insert_missing(connection, tenant=tenant, device=device, projects=invitation.projects)
    for project in invitation.projects:
        # One that has its name already stays as it is.
        await destinations.create(
            connection, tenant, project, device, mode="pull", url=None, max_pending=request.max_pending
        )


async def _use_again(connection: Connection, invitation: Invitation, request: _Request) -> None:
    """Step 3 of a spent code: only what came the first time, and only while no operator has undone it."""
    if (invitation.keyid, invitation.proof_hash) != (request.keyid, request.proof_hash):
        _refuse()
    await _lock_open_device(connection, invitation)
    await _require_active_key(connection, invitation, request.keyid)
    earlier = invitation.credential_id
    if earlier is None or not await credentials.revoke(connection, invitation.tenant, earlier):
        _refuse()


async def _give_credential(
    connection: Connection, invitation: Invitation, request: _Request, lifetime_s: int
) -> Enrolled:
    """Steps 4 and 5."""
    tenant, device, token = invitation.tenant, invitation.device, new_token()
    again = invitation.keyid is not None
    projects = invitation.projects
    expires_at = await credentials.insert(
        connection,
        credential_id=token.credential_id,
        secret_hash=token.secret_hash,
        tenant=tenant,
        account=invitation.account,
        device=device,
        role=Role.DEVICE,
        projects=projects,
        lifetime_s=lifetime_s,
    )
    await invitations.spend(
        connection,
        request.hash_of_code,
        keyid=request.keyid,
        proof_hash=request.proof_hash,
        credential_id=token.credential_id,
    )
    await audit.insert_act(
        connection,
        tenant=tenant,
        project=None,
        account=invitation.account,
        device=device,
        action="device.enrol",
        detail={
            "keyid": request.keyid,
            "projects": projects,
            "credentialId": str(token.credential_id),
            "addsKey": invitation.adds_key,
            "again": again,
        },
        correlation_id=UUID(bytes=new_correlation_id()),
    )
    return Enrolled(tenant, device, projects, request.keyid, token.reveal(), expires_at, again)


async def _lock_open_device(connection: Connection, invitation: Invitation) -> None:
    device = await devices.lock(connection, invitation.tenant, invitation.device)
    if device is None or device.retired:
        _refuse()


async def _require_active_key(connection: Connection, invitation: Invitation, keyid: str) -> None:
    key = await keys.find(connection, invitation.tenant, keyid)
    if key is None or key.device != invitation.device or key.state != ACTIVE:
        _refuse()


def _good_keyid(public_key: bytes) -> str:
    try:
        ed25519.check_public_key(public_key)
    except ValueError:
        _refuse()
    return ed25519.thumbprint(public_key)


def _refuse() -> NoReturn:
    # From None: what stood behind it is nobody's business.
    raise Refused(
        Reason.ENROLMENT_REFUSED, "the code, the key or the proof is not accepted; ask for a new code"
    ) from None

"""What a device renews by itself: its key, spoken for by one that it has, and its credential (protocol section 8).

A credential alone adds no key. A further one comes in two calls: the device gets a challenge, and answers it with
signatures by the new key and by an active one over the payload that proves an enrolment, the challenge being its code.
In one transaction, in this order:

1. lock the device, which must not be retired, and find its challenge
2. the new key is a good one, and its proof holds; so does the signature of one of the device's active keys
3. first use: the new key is active, and the one that spoke for it retires; use again, because an answer was lost: it is
   given again
4. the audit event

Whatever is wrong is answered with the same words. The credential that is renewed goes on for a while beside its
successor; who renews it once more, because an answer was lost, gets another successor in place of that one.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn
from uuid import UUID

from postseal.correlation import new_correlation_id
from postseal.envelope import ed25519
from postseal.envelope.enrolment import proves
from postseal.errors import Refused
from postseal.identity.codes import code_hash, new_code
from postseal.identity.tokens import new_token
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.outcomes import Reason
from postseal.postgres import audit, credentials, devices, key_challenges, keys
from postseal.postgres.database import Connection, Database
from postseal.postgres.key_challenges import Challenge
from postseal.rules.keys import MAX_KEYS, KeyState

CHALLENGE_S = 600
"""How long a challenge lives."""


@dataclass(frozen=True, slots=True)
class NewChallenge:
    """What a device is to sign until `expires_at`; `repr` does not show it."""

    challenge: str = field(repr=False)
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """A challenge, a new Ed25519 key (32 bytes), its proof and a current key's signature (64 bytes each)."""

    challenge: str = field(repr=False)
    public_key: bytes
    proof: bytes = field(repr=False)
    signature: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AddedKey:
    """The key that is active now, and the one that it replaces, which is taken until `accept_until`.

    None once its time is over, be it by an operator.
    """

    keyid: str
    replaces: str
    accept_until: datetime | None


@dataclass(frozen=True, slots=True)
class Renewed:
    """A new credential, shown this once, and until when the one before it goes on; `repr` does not show it."""

    credential: str = field(repr=False)
    expires_at: datetime
    replaced_until: datetime


async def new_challenge(database: Database, caller: VerifiedIdentity) -> NewChallenge:
    """A challenge for the calling device, in place of an earlier one. `database` is the administrators' part.

    Raises Refused `enrolment_refused` for a retired device, and Unavailable; so do the functions below.
    """
    device, challenge = _device(caller), new_code()
    hash_of_challenge = _hash(challenge)

    async def work(connection: Connection) -> NewChallenge:
        await _lock_open_device(connection, caller.tenant, device)
        expires_at = await key_challenges.replace(
            connection,
            tenant=caller.tenant,
            device=device,
            challenge_hash=hash_of_challenge,
            lifetime_s=CHALLENGE_S,
        )
        return NewChallenge(challenge, expires_at)

    return await database.transact(work, tenant=caller.tenant)


async def add_key(database: Database, caller: VerifiedIdentity, request: KeyRequest, *, overlap_s: int) -> AddedKey:
    """Make a device's new key active; the one that spoke for it is taken for `overlap_s` seconds (at least 1) more.

    Raises Refused `conflict` too, where the device has too many keys.
    """
    tenant, device = caller.tenant, _device(caller)
    hash_of_challenge = _hash(request.challenge)
    keyid = _good_keyid(request.public_key)
    signed = {"code": request.challenge, "device": device, "keyid": keyid, "tenant": tenant}
    if not proves(request.public_key, request.proof, **signed):
        _refuse()

    async def work(connection: Connection) -> AddedKey:
        await _lock_open_device(connection, tenant, device)
        challenge = await key_challenges.find_valid(connection, tenant, device, hash_of_challenge)
        if challenge is None:
            _refuse()
        speaker = await _speaker(connection, tenant, device, challenge, request.signature, signed)
        if challenge.keyid is not None:
            return await _again(connection, tenant, challenge, keyid, speaker)
        return await _first_use(connection, caller, request.public_key, keyid, speaker, overlap_s)

    return await database.transact(work, tenant=tenant)


async def renew_credential(database: Database, caller: VerifiedIdentity, *, lifetime_s: int, overlap_s: int) -> Renewed:
    """Give a device a new credential like the one that it calls with, which goes on for `overlap_s` at most.

    Raises Refused `not_found` where the credential is none that is kept here.
    """
    device, token = _device(caller), new_token()
    credential_id = _credential_id(caller)

    async def work(connection: Connection) -> Renewed:
        await _lock_open_device(connection, caller.tenant, device)
        replaced_until = await credentials.replace_if_valid(
            connection, caller.tenant, credential_id, successor=token.credential_id, overlap_s=overlap_s
        )
        if replaced_until is None:
            raise Refused(Reason.NOT_FOUND, "this credential is not renewed here")
        expires_at = await credentials.insert(
            connection,
            credential_id=token.credential_id,
            secret_hash=token.secret_hash,
            tenant=caller.tenant,
            account=caller.account,
            device=device,
            role=Role.DEVICE,
            projects=sorted(caller.projects),
            lifetime_s=lifetime_s,
        )
        detail = {"credentialId": str(token.credential_id), "replaces": str(credential_id)}
        await _audit(connection, caller, "device.renew-credential", detail)
        return Renewed(token.reveal(), expires_at, replaced_until)

    return await database.transact(work, tenant=caller.tenant)


async def _speaker(
    connection: Connection, tenant: str, device: str, challenge: Challenge, signature: bytes, signed: dict[str, str]
) -> str:
    """Step 2: the id of the key that speaks for the new one; again, it may retire since."""
    for keyid, public_key, state in await keys.speaking_for(connection, tenant, device):
        may_speak = state is KeyState.ACTIVE or keyid == challenge.replaces
        if may_speak and proves(public_key, signature, **signed):
            return keyid
    return _refuse()


async def _first_use(
    connection: Connection, caller: VerifiedIdentity, public_key: bytes, keyid: str, speaker: str, overlap_s: int
) -> AddedKey:
    """Steps 3 and 4 of a challenge that is not spent."""
    tenant, device = caller.tenant, _device(caller)
    if await keys.count(connection, tenant, device) >= MAX_KEYS:
        raise Refused(Reason.CONFLICT, "the device has as many keys as it may: an operator has to remove some")
    retiring = await keys.let_retire(connection, tenant, device, overlap_s=overlap_s, keyid=speaker)
    if not await keys.insert_if_new(connection, tenant=tenant, keyid=keyid, device=device, public_key=public_key):
        _refuse()
    await key_challenges.spend(connection, tenant=tenant, device=device, keyid=keyid, replaces=speaker)
    await _audit(connection, caller, "device.rotate-key", {"keyid": keyid, "retiring": speaker, "overlapS": overlap_s})
    return AddedKey(keyid, speaker, retiring[speaker])


async def _again(connection: Connection, tenant: str, challenge: Challenge, keyid: str, speaker: str) -> AddedKey:
    """Step 3 of a spent challenge: only what came the first time, and only while no operator has undone it."""
    key = await keys.find(connection, tenant, keyid)
    before = await keys.find(connection, tenant, speaker)
    if (challenge.keyid, challenge.replaces) != (keyid, speaker) or key is None or key.state is not KeyState.ACTIVE:
        _refuse()
    return AddedKey(keyid, speaker, before.accept_until if before else None)


async def _lock_open_device(connection: Connection, tenant: str, device: str) -> None:
    found = await devices.lock(connection, tenant, device)
    if found is None or found.retired:
        _refuse()


async def _audit(connection: Connection, caller: VerifiedIdentity, action: str, detail: dict[str, Any]) -> None:
    await audit.insert_act(
        connection,
        tenant=caller.tenant,
        project=None,
        account=caller.account,
        device=caller.device,
        action=action,
        detail=detail,
        correlation_id=UUID(bytes=new_correlation_id()),
    )


def _device(caller: VerifiedIdentity) -> str:
    assert caller.device is not None  # noqa: S101 - the role was checked, and a device's credential has one
    return caller.device


def _credential_id(caller: VerifiedIdentity) -> UUID:
    try:
        return UUID(caller.credential_id)
    except ValueError:
        raise Refused(Reason.NOT_FOUND, "this credential is not renewed here") from None


def _hash(challenge: str) -> bytes:
    hashed = code_hash(challenge)
    if hashed is None:
        _refuse()
    return hashed


def _good_keyid(public_key: bytes) -> str:
    try:
        ed25519.check_public_key(public_key)
    except ValueError:
        _refuse()
    return ed25519.thumbprint(public_key)


def _refuse() -> NoReturn:
    # From None: what stood behind it is nobody's business.
    raise Refused(
        Reason.ENROLMENT_REFUSED, "the challenge, the key or a signature is not accepted; ask for a new challenge"
    ) from None

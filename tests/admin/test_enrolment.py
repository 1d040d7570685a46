"""Enrolment: protocol section 8."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from acts import counts, do, scalar, trail

from fleet import as_owner
from postseal.admin import credentials, devices, keys, tenants
from postseal.admin.actor import Actor
from postseal.enrolment import Enrolled, enrol
from postseal.envelope import ed25519
from postseal.envelope.enrolment import prove
from postseal.errors import Refused
from postseal.identity.tokens import TokenVerifier
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part

pytestmark = pytest.mark.anyio

MAX_PENDING = 1000
LIFETIME_S = 3600
SMALL_ORDER = bytes.fromhex("0100000000000000000000000000000000000000000000000000000000000000")


@dataclass
class Applicant:
    """A device that enrols: its key, and what it sends unless told otherwise."""

    database: Database
    seed: bytes
    tenant: str = "acme"
    device: str = "d1"

    @property
    def public_key(self) -> bytes:
        """What it shows."""
        return ed25519.public_key(self.seed)

    @property
    def keyid(self) -> str:
        """The key's id."""
        return ed25519.thumbprint(self.public_key)

    def proof(self, code: str) -> bytes:
        """Its signature over the code and its own names."""
        return prove(self.seed, code=code, device=self.device, keyid=self.keyid, tenant=self.tenant)

    async def send(self, code: str, **changes: Any) -> Enrolled:
        """Enrol; `changes` replaces what is sent."""
        request = {"public_key": self.public_key, **changes}
        if "proof" not in request:
            request["proof"] = self.proof(code)
        return await enrol(
            self.database, code=code, credential_lifetime_s=LIFETIME_S, max_pending=MAX_PENDING, **request
        )


@pytest.fixture
async def applicant(database: Database, actor: Actor) -> Applicant:
    """A device-to-be of a tenant with two projects."""
    await do(database, tenants.create, actor, "acme")
    await do(database, tenants.create_project, actor, "acme", "apollo")
    await do(database, tenants.create_project, actor, "acme", "gemini")
    return Applicant(database, ed25519.generate())


async def invited(applicant: Applicant, *projects: str, device: str = "d1", **options: Any) -> str:
    """A code for the applicant."""
    invitation = await do(
        applicant.database,
        devices.invite,
        Actor("os:ada"),
        "acme",
        device,
        projects=projects or ("apollo",),
        lifetime_s=LIFETIME_S,
        **options,
    )
    return invitation.code


async def identity_of(access: Access, credential: str) -> VerifiedIdentity | None:
    """Whom a credential stands for."""
    async with Database(access.of(Part.INGEST), prepare=True, size=1) as ingest:
        return await TokenVerifier(ingest).verify(credential)


async def test_a_code_and_a_proof_become_a_device(applicant: Applicant, access: Access) -> None:
    """Device, key, a stream a project and a working credential are made together, and audited without secrets."""
    code = await invited(applicant, "gemini", "apollo", account="ops")
    enrolled = await applicant.send(code)

    assert (enrolled.tenant, enrolled.device) == ("acme", "d1")
    assert enrolled.projects == ["apollo", "gemini"]
    assert enrolled.keyid == applicant.keyid
    identity = await identity_of(access, enrolled.credential)
    assert identity is not None
    assert (identity.account, identity.device, identity.role) == ("ops", "d1", Role.DEVICE)
    assert identity.projects == {"apollo", "gemini"}
    with as_owner(access) as owner:
        assert scalar(owner, "SELECT count(*) FROM streams WHERE producer = 'd1' AND NOT retired") == 2
        assert scalar(owner, "SELECT state FROM keys WHERE keyid = %s", [applicant.keyid]) == "active"
    account, action, detail = trail(access, "acme")[-1]
    assert (account, action) == ("ops", "device.enrol")
    assert detail["keyid"] == applicant.keyid
    with as_owner(access) as owner:
        everything = scalar(owner, "SELECT string_agg(audit_events::text, ' ') FROM audit_events")
    for secret in (code, enrolled.credential, enrolled.credential.rpartition("_")[2]):
        assert secret not in everything
        assert secret not in repr(enrolled)


async def test_a_lost_answer_can_be_had_again(applicant: Applicant, access: Access) -> None:
    """The same code, key and proof bring a new credential in place of the earlier one, and no second device."""
    code = await invited(applicant)
    first = await applicant.send(code)
    again = await applicant.send(code)

    assert (again.device, again.keyid, again.projects) == (first.device, first.keyid, first.projects)
    assert await identity_of(access, first.credential) is None
    assert await identity_of(access, again.credential) is not None
    assert (counts(access)["devices"], counts(access)["keys"], counts(access)["streams"]) == (1, 1, 1)
    assert [action for _, action, _ in trail(access, "acme")][-2:] == ["device.enrol", "device.enrol"]


@pytest.mark.parametrize("same_key", [True, False])
async def test_of_many_with_one_code_one_wins(applicant: Applicant, access: Access, same_key: bool) -> None:
    """However many come with one code at once: one device, one key, and one credential that is valid."""
    code = await invited(applicant)
    racers = [Applicant(applicant.database, applicant.seed if same_key else ed25519.generate()) for _ in range(8)]
    answers = await asyncio.gather(*(racer.send(code) for racer in racers), return_exceptions=True)

    won = [answer for answer in answers if isinstance(answer, Enrolled)]
    lost = [answer for answer in answers if isinstance(answer, Refused)]
    assert (len(won), len(lost)) == ((8, 0) if same_key else (1, 7))
    with as_owner(access) as owner:
        assert scalar(owner, "SELECT count(*) FROM credentials WHERE revoked_at IS NULL") == 1
        assert scalar(owner, "SELECT string_agg(keyid, ',') FROM keys") == won[0].keyid


async def test_a_key_and_projects_are_added(applicant: Applicant, access: Access) -> None:
    """A code with adds_key brings a further key; the new credential is for the projects of the code alone."""
    await applicant.send(await invited(applicant, account="ops"))
    code = await invited(applicant, "gemini", adds_key=True)
    further = Applicant(applicant.database, ed25519.generate())
    enrolled = await further.send(code)

    assert enrolled.projects == ["gemini"]
    identity = await identity_of(access, enrolled.credential)
    assert identity is not None
    assert identity.account == "ops"
    assert identity.projects == {"gemini"}
    assert (counts(access)["devices"], counts(access)["keys"], counts(access)["streams"]) == (1, 2, 2)


async def test_a_device_takes_its_own_key_to_a_further_project(applicant: Applicant, access: Access) -> None:
    """A code with adds_key and the device's present key only add the project."""
    await applicant.send(await invited(applicant))
    enrolled = await applicant.send(await invited(applicant, "gemini", adds_key=True))

    assert enrolled.projects == ["gemini"]
    assert counts(access)["keys"] == 1


Wrong = Callable[[Applicant, Access], Awaitable[object]]


async def unknown_code(applicant: Applicant, access: Access) -> object:
    """A code that nobody made."""
    return await applicant.send("pse_" + "A" * 43)


async def no_code(applicant: Applicant, access: Access) -> object:
    """A text that cannot be a code."""
    return await applicant.send("\ud800", proof=bytes(64))


async def expired_code(applicant: Applicant, access: Access) -> object:
    """A code whose hour is over."""
    code = await invited(applicant)
    with as_owner(access) as owner:
        owner.execute("UPDATE invitations SET expires_at = clock_timestamp()")
    return await applicant.send(code)


async def expired_code_that_was_used(applicant: Applicant, access: Access) -> object:
    """A spent code whose hour is over."""
    code = await invited(applicant)
    await applicant.send(code)
    with as_owner(access) as owner:
        owner.execute("UPDATE invitations SET expires_at = clock_timestamp()")
    return await applicant.send(code)


async def spent_code(applicant: Applicant, access: Access) -> object:
    """A code that another key has used."""
    code = await invited(applicant)
    await applicant.send(code)
    return await Applicant(applicant.database, ed25519.generate()).send(code)


async def spent_code_with_the_other_key(applicant: Applicant, access: Access) -> object:
    """A code that another key of the same device has used."""
    code = await invited(applicant)
    await applicant.send(code)
    further = Applicant(applicant.database, ed25519.generate())
    await further.send(await invited(applicant, adds_key=True))
    return await further.send(code)


async def proof_of_another_key(applicant: Applicant, access: Access) -> object:
    """A signature by a key that is not shown."""
    code = await invited(applicant)
    return await applicant.send(code, proof=Applicant(applicant.database, ed25519.generate()).proof(code))


async def proof_for_another_device(applicant: Applicant, access: Access) -> object:
    """A signature that names another device."""
    applicant.device = "d2"
    return await applicant.send(await invited(applicant, device="d1"))


async def short_proof(applicant: Applicant, access: Access) -> object:
    """No signature."""
    return await applicant.send(await invited(applicant), proof=b"")


async def key_of_small_order(applicant: Applicant, access: Access) -> object:
    """A key under which anything verifies."""
    return await applicant.send(await invited(applicant), public_key=SMALL_ORDER)


async def short_key(applicant: Applicant, access: Access) -> object:
    """No key."""
    return await applicant.send(await invited(applicant), public_key=b"")


async def key_of_another_device(applicant: Applicant, access: Access) -> object:
    """A key that the tenant knows as another device's."""
    await applicant.send(await invited(applicant))
    applicant.device = "d2"
    return await applicant.send(await invited(applicant, device="d2"))


async def device_that_exists(applicant: Applicant, access: Access) -> object:
    """A second invitation of a device that has enrolled."""
    first, second = await invited(applicant), await invited(applicant)
    await Applicant(applicant.database, ed25519.generate()).send(first)
    return await applicant.send(second)


async def retired_device(applicant: Applicant, access: Access) -> object:
    """A further key for a device that was retired meanwhile."""
    await applicant.send(await invited(applicant))
    code = await invited(applicant, adds_key=True)
    await do(applicant.database, devices.retire, Actor("os:ada"), "acme", "d1")
    return await Applicant(applicant.database, ed25519.generate()).send(code)


async def retired_device_again(applicant: Applicant, access: Access) -> object:
    """A lost answer of a device that was retired meanwhile."""
    code = await invited(applicant)
    await applicant.send(code)
    await do(applicant.database, devices.retire, Actor("os:ada"), "acme", "d1")
    return await applicant.send(code)


async def revoked_key_of_the_device(applicant: Applicant, access: Access) -> object:
    """A further project for a key that was revoked."""
    await applicant.send(await invited(applicant))
    await do(applicant.database, keys.revoke, Actor("os:ada"), "acme", applicant.keyid)
    return await applicant.send(await invited(applicant, "gemini", adds_key=True))


async def revoked_key_again(applicant: Applicant, access: Access) -> object:
    """A lost answer of a key that was revoked meanwhile."""
    code = await invited(applicant)
    await applicant.send(code)
    await do(applicant.database, keys.revoke, Actor("os:ada"), "acme", applicant.keyid)
    return await applicant.send(code)


async def revoked_credential_again(applicant: Applicant, access: Access) -> object:
    """A lost answer whose credential was revoked meanwhile."""
    code = await invited(applicant)
    enrolled = await applicant.send(code)
    credential_id = enrolled.credential.split("_")[1]
    await do(applicant.database, credentials.revoke, Actor("os:ada"), "acme", credential_id)
    return await applicant.send(code)


@pytest.mark.parametrize(
    "wrong",
    [
        unknown_code,
        no_code,
        expired_code,
        expired_code_that_was_used,
        spent_code,
        spent_code_with_the_other_key,
        proof_of_another_key,
        proof_for_another_device,
        short_proof,
        key_of_small_order,
        short_key,
        key_of_another_device,
        device_that_exists,
        retired_device,
        retired_device_again,
        revoked_key_of_the_device,
        revoked_key_again,
        revoked_credential_again,
    ],
    ids=lambda wrong: wrong.__name__,
)
async def test_whatever_is_wrong_is_refused_alike(
    applicant: Applicant, access: Access, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fault has the same words, tells nothing of its cause, and leaves no row behind."""
    before: list[dict[str, int]] = []
    send = Applicant.send

    async def counting(self: Applicant, code: str, **changes: Any) -> Enrolled:
        before.append(counts(access))
        return await send(self, code, **changes)

    monkeypatch.setattr(Applicant, "send", counting)
    with pytest.raises(Refused) as refused:
        await wrong(applicant, access)
    assert refused.value.reason is Reason.ENROLMENT_REFUSED
    assert refused.value.detail == "the code, the key or the proof is not accepted; ask for a new code"
    assert refused.value.__cause__ is None
    assert counts(access) == before[-1]


async def test_a_code_reaches_no_further_than_when_it_was_made(applicant: Applicant, access: Access) -> None:
    """Whoever made a code did not answer for a project that the device got since: no further key comes by it."""
    await applicant.send(await invited(applicant))
    kept = await invited(applicant, adds_key=True)
    await applicant.send(await invited(applicant, "gemini", adds_key=True))
    further = Applicant(applicant.database, ed25519.generate())
    with pytest.raises(Refused) as refused:
        await further.send(kept)
    assert refused.value.reason is Reason.ENROLMENT_REFUSED
    assert counts(access)["keys"] == 1
    assert (await further.send(await invited(applicant, adds_key=True))).projects == ["apollo"]

"""The door in front of all work: whom it charges, and whom not."""

import asyncio

import pytest

from postseal.door import REMEMBERED_FOR_S, Door
from postseal.errors import Refused, Unavailable
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.limits import Rate
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.readiness import Readiness
from postseal.service import running_service
from postseal.settings import Settings


class Outage:
    """A verifier whose database is away."""

    async def verify(self, credential: str) -> VerifiedIdentity | None:
        """Say that nothing can be said."""
        raise Unavailable(f"no answer for a credential of {len(credential)} characters")


class Strict:
    """A verifier that knows nobody."""

    async def verify(self, credential: str) -> VerifiedIdentity | None:
        """Know nobody."""
        _ = credential


def test_an_outage_costs_its_callers_nothing():
    """Whoever cannot be verified for want of a database keeps their permit: the outage does not end in 429."""
    door = Door(Outage(), Rate(per_s=0.001, burst=3), lambda: 0.0)

    async def ask() -> None:
        for _ in range(10):
            with pytest.raises(Unavailable):
                await door.identify("192.0.2.1", "some credential")

    asyncio.run(ask())


def test_wrong_credentials_use_up_the_peers_permits():
    """A peer that shows wrong credentials is limited, and only that peer."""
    door = Door(Strict(), Rate(per_s=0.001, burst=3), lambda: 0.0)

    async def ask(peer: str) -> Reason:
        with pytest.raises(Refused) as refused:
            await door.identify(peer, "wrong")
        return refused.value.reason

    async def story() -> list[Reason]:
        return [await ask("192.0.2.1") for _ in range(4)] + [await ask("192.0.2.2")]

    assert asyncio.run(story()) == [Reason.UNAUTHENTICATED] * 3 + [Reason.PEER_RATE_LIMITED, Reason.UNAUTHENTICATED]


def test_a_service_without_room_is_not_ready(access: Access):
    """While the disk is almost full nothing is taken in, and readiness says so."""

    async def ask(*, accepting: bool) -> None:
        async with running_service(Settings(), access) as service:
            await Readiness(service.ingest, service.committer, lambda: accepting, lambda: 0.0).require()

    asyncio.run(ask(accepting=True))
    with pytest.raises(Unavailable, match="almost full"):
        asyncio.run(ask(accepting=False))


class Once:
    """A verifier that knows one credential until it is revoked."""

    revoked = False

    async def verify(self, credential: str) -> VerifiedIdentity | None:
        """Know `good`."""
        if self.revoked or credential != "good":
            return None
        return VerifiedIdentity("acme", "ops", "d1", Role.DEVICE, "id", frozenset({"apollo"}))


def test_a_flood_behind_an_address_keeps_no_known_device_out():
    """A credential that was valid here is verified again without a permit; once revoked it is charged as any other."""
    now_s, verifier = [0.0], Once()
    door = Door(verifier, Rate(per_s=0.001, burst=3), lambda: now_s[0])

    async def story() -> None:
        await door.identify("192.0.2.1", "good")
        for _ in range(5):
            with pytest.raises(Refused):
                await door.identify("192.0.2.1", "guess")
        now_s[0] += REMEMBERED_FOR_S + 1
        assert (await door.identify("192.0.2.1", "good")).device == "d1"
        verifier.revoked = True
        now_s[0] += REMEMBERED_FOR_S + 1
        reasons = []
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                await door.identify("192.0.2.1", "good")
            reasons.append(refused.value.reason)
        assert reasons == [Reason.UNAUTHENTICATED, Reason.PEER_RATE_LIMITED]

    asyncio.run(story())

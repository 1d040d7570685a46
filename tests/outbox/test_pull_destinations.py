"""A device pulls from a destination of its own name in each of its projects, made when it enrols."""

from collections.abc import AsyncIterator

import pytest

from fleet import as_owner
from outgoing import new_destination, new_tenant
from postseal.admin import devices
from postseal.admin.actor import Actor
from postseal.enrolment import enrol
from postseal.envelope import ed25519
from postseal.envelope.enrolment import prove
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part

pytestmark = pytest.mark.anyio

ADA = Actor("os:ada")


@pytest.fixture
async def admin(access: Access) -> AsyncIterator[Database]:
    """The administrators' part; apollo and zeus are there."""
    new_tenant(access, "acme", "apollo", "zeus")
    async with Database(access.of(Part.ADMIN), prepare=True) as database:
        yield database


async def enrol_in(admin: Database, seed: bytes, *projects: str, adds_key: bool = False) -> None:
    """Invite the device, and let it enrol itself."""
    invitation = await admin.transact(
        lambda connection: devices.invite(
            connection, ADA, "acme", "device-01", projects=projects, lifetime_s=60, adds_key=adds_key
        )
    )
    public_key = ed25519.public_key(seed)
    keyid = ed25519.thumbprint(public_key)
    for _ in range(2):  # an answer was lost
        await enrol(
            admin,
            code=invitation.code,
            public_key=public_key,
            proof=prove(seed, code=invitation.code, device="device-01", keyid=keyid, tenant="acme"),
            credential_lifetime_s=60,
            max_pending=17,
        )


def pulled(access: Access) -> list[tuple[str, str, str, int, int]]:
    """Destinations, their room and how much of their mail has left."""
    with as_owner(access) as owner:
        return owner.execute(
            "SELECT project, destination, mode, max_pending, settled FROM destinations"
            " JOIN destination_health USING (tenant, stream) ORDER BY project"
        ).fetchall()


async def test_enrolment_makes_them(admin: Database, access: Access):
    """One for each project, once; a further project brings a further one."""
    seed = ed25519.generate()
    await enrol_in(admin, seed, "apollo")
    assert pulled(access) == [("apollo", "device-01", "pull", 17, 0)]
    await enrol_in(admin, seed, "zeus", "apollo", adds_key=True)
    assert pulled(access) == [("apollo", "device-01", "pull", 17, 0), ("zeus", "device-01", "pull", 17, 0)]


async def test_a_name_that_is_taken_stays_as_it_is(admin: Database, access: Access):
    """A destination that has the device's name already is not touched, and the device enrols all the same."""
    new_destination(access, "device-01")
    await enrol_in(admin, ed25519.generate(), "apollo")
    assert pulled(access) == [("apollo", "device-01", "push", 1000, 0)]

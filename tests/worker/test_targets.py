"""Where deliveries are pushed to and what signs them, as a worker remembers it."""

import pytest
from mailing import KEY, NOWHERE, SHARED, Box, delivering, make_box

from fleet import as_owner
from postseal.outbound.targets import REMEMBERED_FOR_S, Target, Targets
from postseal.postgres.access import Access
from postseal.rules.delivery import Code
from postseal.senders.secrets import DeploymentKey

pytestmark = pytest.mark.anyio

ELSEWHERE = "https://elsewhere.example/hook"


async def test_a_new_url_counts_within_seconds(access: Access):
    """A worker that pushed to the old one asks again once what it knows is too old to be believed."""
    box, now_s = make_box(access), 0.0
    async with delivering(access) as database:
        targets = Targets(database, KEY, lambda: now_s)

        async def url() -> str:
            return (await targets.of(box.tenant, [box.stream]))[box.stream].url

        assert await url() == NOWHERE
        with as_owner(access) as owner:
            owner.execute("UPDATE destinations SET url = %s", [ELSEWHERE])
        now_s = REMEMBERED_FOR_S - 0.1
        assert await url() == NOWHERE
        now_s = REMEMBERED_FOR_S + 0.1
        assert await url() == ELSEWHERE


async def test_a_secret_from_before_the_key_was_lost(access: Access):
    """It signs nothing; one that was made since goes on alone, though the old one was to sign beside it."""
    box, lost = make_box(access), DeploymentKey(bytes(32))

    async def target_of(box: Box) -> Target:
        async with delivering(access) as database:
            return (await Targets(database, KEY, lambda: 0.0).of(box.tenant, [box.stream]))[box.stream]

    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO destination_secrets (tenant, stream, scheme, encrypted, sign_until)"
            " VALUES (%s, %s, 'v1', %s, clock_timestamp() + interval '1 day')",
            [box.tenant, box.stream, lost.encrypt(box.tenant, box.stream, SHARED)],
        )
    assert (await target_of(box)).secrets == [SHARED]
    with as_owner(access) as owner:
        owner.execute("DELETE FROM destination_secrets WHERE sign_until IS NULL")
    assert (await target_of(box)).fault is Code.SECRET_UNUSABLE

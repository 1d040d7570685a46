"""A device pulls: it claims and settles its own mail, and nobody else's."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from mailing import Box, fill, make_all_due, make_box, stages

from fleet import as_owner
from postseal.door import RateLimited
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.limits import Rate
from postseal.outbound.pulling import Pulling, PullSettle, PullVerdict
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database
from postseal.postgres.deliveries import Claimed, Lease, Wanted, claim
from until import PATIENCE_S, until_async

pytestmark = pytest.mark.anyio


def pulling_on(database: Database, *, rate: Rate | None = None, most_waiting: int = 10, lease_s: float = 60) -> Pulling:
    """Claims and settlements of devices."""
    clock = asyncio.get_running_loop().time
    return Pulling(database, rate or Rate(1e6, 10**6), lease_s=lease_s, most_waiting=most_waiting, clock=clock)


def caller(box: Box, *projects: str) -> VerifiedIdentity:
    """The device that a box belongs to."""
    scope = frozenset(projects or (box.project,))
    return VerifiedIdentity(box.tenant, "owner-1", box.name, Role.DEVICE, "credential", scope)


def pull_box(access: Access, name: str = "device-01", *, tenant: str = "acme", project: str = "apollo") -> Box:
    """A device's destination."""
    return make_box(access, name, tenant=tenant, project=project, mode="pull")


def told(lease: Lease, verdict: PullVerdict = PullVerdict.DELIVERED, retry_after_s: float | None = None) -> PullSettle:
    """What a device says of a lease."""
    return PullSettle(lease.project, lease.sequence, lease.attempt, lease.token, verdict, retry_after_s)


async def test_a_device_claims_and_settles_its_own_mail(access: Access, database: Database):
    """From its destination in each project of its credential; not another device's, tenant's or project's."""
    mine = [pull_box(access, project=project) for project in ("apollo", "gemini")]
    foreign = [
        pull_box(access, "device-02"),
        pull_box(access, tenant="globex"),
        pull_box(access, project="mercury"),
        make_box(access, "pushed"),
    ]
    for box in [*mine, *foreign]:
        fill(access, box, 3)
    pulling = pulling_on(database)
    device = caller(mine[0], "apollo", "gemini")
    leases = await pulling.claim(device)
    assert {(lease.project, lease.destination) for lease in leases} == {
        ("apollo", "device-01"),
        ("gemini", "device-01"),
    }
    assert len(leases) == 6
    assert await pulling.claim(device) == []
    assert await pulling.settle(device, [told(lease) for lease in leases]) == [True] * 6
    assert stages(access, *mine) == {"delivered": 6}
    assert stages(access, *foreign) == {"fresh": 12}


async def test_what_a_device_says_counts(access: Access, database: Database):
    """Delivered, to be tried again, or rejected for good."""
    box = pull_box(access)
    fill(access, box, 3)
    pulling = pulling_on(database)
    device = caller(box)
    leases = await pulling.claim(device)
    verdicts = (PullVerdict.DELIVERED, PullVerdict.RETRY, PullVerdict.REJECT)
    settles = [told(lease, verdict) for lease, verdict in zip(leases, verdicts, strict=True)]
    assert await pulling.settle(device, settles) == [True] * 3
    assert stages(access, box) == {"delivered": 1, "retry": 1, "dead": 1}
    with as_owner(access) as owner:
        codes = owner.execute("SELECT code FROM settlements WHERE state = 'dead'").fetchall()
        waits = owner.execute(
            "SELECT due_at > clock_timestamp() + interval '3 s' FROM queue WHERE stage = 'retry'"
        ).fetchall()
        failed = owner.execute("SELECT code FROM attempts ORDER BY code").fetchall()
    assert codes == [("rejected",)]
    assert failed == [("deferred",), ("rejected",)]
    assert waits == [(True,)]


async def test_a_device_may_ask_for_a_longer_wait_and_for_no_shorter_one(access: Access, database: Database):
    """Within the cap of the backoff."""
    box = pull_box(access)
    fill(access, box, 3)
    pulling = pulling_on(database)
    leases = await pulling.claim(caller(box))
    asked = (0.0, 600.0, 1e9)
    settles = [told(lease, PullVerdict.RETRY, wait_s) for lease, wait_s in zip(leases, asked, strict=True)]
    assert await pulling.settle(caller(box), settles) == [True] * 3
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT extract(epoch FROM due_at - clock_timestamp())::float FROM queue ORDER BY due_at"
        ).fetchall()
    waits = [wait_s for (wait_s,) in rows]
    assert 3 < waits[0] <= 5
    assert 590 < waits[1] <= 600
    assert 3590 < waits[2] <= 3600


async def test_a_stale_settlement_of_a_device_changes_nothing(access: Access, database: Database):
    """Each is answered for itself: fenced, unknown, told twice, or settled; none stands in the way of another."""
    box = pull_box(access)
    fill(access, box, 3)
    pulling = pulling_on(database)
    device = caller(box)
    stale = await pulling.claim(device)
    make_all_due(access)
    fresh = await pulling_on(database).claim(device, most=1)
    assert [lease.attempt for lease in fresh] == [2]
    lost = next(lease for lease in stale if lease.sequence == fresh[0].sequence)
    kept = [lease for lease in stale if lease is not lost]
    unknown = PullSettle("mercury", 1, 1, uuid4(), PullVerdict.DELIVERED)
    forged = PullSettle(kept[1].project, kept[1].sequence, 1, uuid4(), PullVerdict.DELIVERED)
    answers = await pulling.settle(
        device, [told(lost), told(kept[0]), unknown, forged, told(kept[0], PullVerdict.REJECT)]
    )
    assert answers == [False, True, False, False, False]
    assert stages(access, box) == {"leased": 2, "delivered": 1}
    settles = [told(lost), told(fresh[0]), forged, told(kept[1])]
    assert await pulling.settle(device, settles) == [False, True, False, True]
    assert await pulling.settle(device, [told(fresh[0])]) == [False]
    assert stages(access, box) == {"delivered": 3}


async def test_a_device_settles_nobody_elses_lease(access: Access, database: Database):
    """Not even with the right pair: another device's, or another tenant's."""
    box, other, foreign = pull_box(access), pull_box(access, "device-02"), pull_box(access, tenant="globex")
    fill(access, box, 1)
    pulling = pulling_on(database)
    [lease] = await pulling.claim(caller(box))
    for thief in (other, foreign):
        assert await pulling.settle(caller(thief), [told(lease)]) == [False]
    assert stages(access, box) == {"leased": 1}


async def test_a_device_that_goes_away_gets_its_mail_again(access: Access, database: Database):
    """When the lease ends, until its attempts are used up: then it is a dead letter."""
    box = pull_box(access)
    fill(access, box, 1, limit=2)
    for attempt in (1, 2):
        [lease] = await pulling_on(database).claim(caller(box))
        assert lease.attempt == attempt
        make_all_due(access)
    assert await pulling_on(database).claim(caller(box)) == []
    with as_owner(access) as owner:
        assert owner.execute("SELECT state, code FROM settlements").fetchall() == [("dead", "attempts_exhausted")]


async def test_a_device_is_limited_by_its_claims(access: Access, database: Database):
    """One permit a claim, of whatever size; another device has its own. Nothing is leased without."""
    box, other = pull_box(access), pull_box(access, "device-02")
    fill(access, box, 150)
    fill(access, other, 1)
    pulling = pulling_on(database, rate=Rate(0.001, 1))
    assert len(await pulling.claim(caller(box))) == 100
    with pytest.raises(RateLimited) as limited:
        await pulling.claim(caller(box), wait_s=5)
    assert limited.value.reason is Reason.SYNC_RATE_LIMITED
    assert limited.value.quota.retry_after_s > 100
    assert len(await pulling.claim(caller(other))) == 1
    assert stages(access, box) == {"leased": 100, "fresh": 50}


@pytest.mark.parametrize("most", [1, 2, 7, 100])
async def test_a_device_gets_as_many_as_it_wants_of_either_kind(access: Access, database: Database, most: int):
    """At least half are first attempts while there are any, and either kind gets what the other leaves."""
    box = pull_box(access)
    fill(access, box, 30, stage="retry")
    fill(access, box, 20)
    pulling = pulling_on(database)
    leases: list[Lease] = []
    while len(leases) < 50:
        some = await pulling.claim(caller(box), most=most)
        assert len(some) == min(most, 50 - len(leases))
        first_left = 20 - sum(lease.attempt == 1 for lease in leases)
        if most > 1:
            assert sum(lease.attempt == 1 for lease in some) >= min(first_left, most // 2)
        leases += some
    assert stages(access, box) == {"leased": 50}


async def test_a_waiting_device_is_answered_when_mail_comes(
    access: Access, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """By itself a moment later, and at once when somebody wakes it."""
    box = pull_box(access)
    pulling = pulling_on(database)

    async def comes(*, woken: bool) -> None:
        waiting = asyncio.create_task(pulling.claim(caller(box), wait_s=PATIENCE_S))
        await until_async(lambda: pulling.waiting == 1)
        fill(access, box, 1)
        if woken:
            pulling.wake("acme", "device-01")
        assert len(await asyncio.wait_for(waiting, PATIENCE_S / 2)) == 1

    await comes(woken=False)
    monkeypatch.setattr("postseal.outbound.pulling.LOOK_EVERY_S", PATIENCE_S)
    await comes(woken=True)


async def test_a_wait_ends(access: Access, database: Database):
    """After its seconds, when waiting ends for all, and where too many of its tenant wait already: with nothing."""
    box = pull_box(access)
    pulling = pulling_on(database, most_waiting=4)
    assert await pulling.claim(caller(box), wait_s=0.2) == []
    waiting = [asyncio.create_task(pulling.claim(caller(box), wait_s=30)) for _ in range(2)]
    await until_async(lambda: pulling.waiting == 2)
    assert await asyncio.wait_for(pulling.claim(caller(box), wait_s=30), 3) == []
    pulling.end()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 3) == [[], []]
    assert await asyncio.wait_for(pulling.claim(caller(box), wait_s=30), 3) == []


async def test_the_end_of_a_lease_is_seen_though_claims_pass_over_what_is_old(access: Access, database: Database):
    """A claim that goes on from the last one may miss it; the next one does not."""
    box = pull_box(access)
    fill(access, box, 1)
    pulling = pulling_on(database)
    assert len(await pulling.claim(caller(box))) == 1
    make_all_due(access)
    assert await pulling.claim(caller(box)) == []
    assert len(await pulling.claim(caller(box))) == 1


async def test_a_waiting_device_that_goes_away_leaves_no_trace(access: Access, database: Database):
    """Its place is free again, whatever it was waiting for; also where the pool swallowed its cancellation."""
    device = caller(pull_box(access))
    pulling = pulling_on(database)
    for steps in range(60):
        waiting = asyncio.create_task(pulling.claim(device, wait_s=30))
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait({waiting})
        assert (pulling.waiting, pulling._waiting) == (0, {})


async def test_a_disabled_destination_holds_a_devices_mail(access: Access, database: Database):
    """It gets nothing until it is enabled again."""
    box = pull_box(access)
    fill(access, box, 2)
    pulling = pulling_on(database)
    with as_owner(access) as owner:
        owner.execute("UPDATE destinations SET disabled_at = clock_timestamp(), disabled_reason = 'operator'")
    assert await pulling.claim(caller(box)) == []
    with as_owner(access) as owner:
        owner.execute("UPDATE destinations SET disabled_at = NULL, disabled_reason = NULL")
    assert len(await pulling.claim(caller(box))) == 2


async def test_a_last_attempt_that_a_device_defers_is_dead_with_that_code(access: Access, database: Database):
    """At once: it does not wait to be due first."""
    box = pull_box(access)
    fill(access, box, 1, limit=2)
    pulling = pulling_on(database)
    for _ in range(2):
        [lease] = await pulling.claim(caller(box))
        assert await pulling.settle(caller(box), [told(lease, PullVerdict.RETRY)]) == [True]
        make_all_due(access)
        pulling = pulling_on(database)
    with as_owner(access) as owner:
        rows = owner.execute("SELECT state, code, attempt FROM settlements").fetchall()
    assert rows == [("dead", "deferred", 2)]


def expire(access: Access) -> None:
    """Let all that is queued have expired."""
    with as_owner(access) as owner:
        owner.execute(
            "UPDATE queue SET expires_at = clock_timestamp() - interval '1 s', "
            "due_at = least(due_at, clock_timestamp() - interval '1 s')"
        )


@pytest.mark.parametrize(("most", "expired"), [(1, 12), (100, 400)])
async def test_expired_mail_keeps_no_live_mail_waiting(access: Access, database: Database, most: int, expired: int):
    """A device that comes back after a long time gets what is live with its first claim."""
    box = pull_box(access)
    fill(access, box, expired)
    expire(access)
    fill(access, box, 1)
    assert len(await pulling_on(database).claim(caller(box), most=most)) == 1
    assert stages(access, box) == {"expired": expired, "leased": 1}


async def test_a_claim_does_not_end_mail_without_end(
    access: Access, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """It is bounded in time; the next one goes on where it was."""
    monkeypatch.setattr("postseal.outbound.pulling.ENDING_S", 0.0)
    box = pull_box(access)
    fill(access, box, 250)
    expire(access)
    pulling = pulling_on(database)
    for ended in (150, 250, 250):
        assert await pulling.claim(caller(box)) == []
        assert stages(access, box)["expired"] == ended


async def test_many_projects_are_one_question(access: Access, database: Database, monkeypatch: pytest.MonkeyPatch):
    """For one permit a device in very many projects costs one statement a look, and gets as many as it wants."""
    asked: list[int] = []

    async def count(connection: Connection, tenant: str, wanted: Sequence[Wanted], **options: Any) -> Claimed:
        asked.append(len(wanted))
        return await claim(connection, tenant, wanted, **options)

    monkeypatch.setattr("postseal.outbound.pulling.claim", count)
    boxes = [pull_box(access, project=f"project-{n:02}") for n in range(40)]
    device = caller(boxes[0], *(box.project for box in boxes))
    pulling = pulling_on(database)
    assert await pulling.claim(device) == []
    assert asked == [40]
    for box in boxes:
        fill(access, box, 2)
    leases = [await pulling.claim(device, most=most) for most in (1, 7, 30, 100)]
    assert [len(some) for some in leases] == [1, 7, 30, 42]
    assert len({(lease.project, lease.sequence) for some in leases for lease in some}) == 80
    assert len(asked) <= 1 + 2 * 4


async def test_one_tenants_devices_leave_room_for_anothers_to_wait(access: Access, database: Database):
    """Half of the places are the most that one tenant has."""
    ours, theirs = pull_box(access), pull_box(access, tenant="globex")
    pulling = pulling_on(database, most_waiting=4)
    waiting = [asyncio.create_task(pulling.claim(caller(ours), wait_s=30)) for _ in range(5)]
    try:
        await until_async(lambda: sum(task.done() for task in waiting) == 3 and pulling.waiting == 2)
        waiting.append(asyncio.create_task(pulling.claim(caller(theirs), wait_s=30)))
        await until_async(lambda: pulling.waiting == 3)
    finally:
        pulling.end()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)

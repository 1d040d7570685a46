"""`postseal worker` as a process: frozen past its lease, killed in each phase, stopped, and run once."""

import asyncio
import random
import resource
import signal
from asyncio.subprocess import Process
from collections import Counter
from pathlib import Path

import pytest
from mailing import Box, fill, make_all_due, make_box, stages
from worker_process import (
    DONE_WITHIN_S,
    READY_WITHIN_S,
    Receiver,
    Setting,
    ended_well,
    logged,
    make_key,
    receiving,
    stop,
)

from fleet import as_owner
from postseal.postgres.access import Access
from postseal.settings import Settings
from postseal.worker_service import worker_files
from until import until_async, waits_for_lock

pytestmark = pytest.mark.anyio


@pytest.fixture
def setting(access: Access, tmp_path: Path) -> Setting:
    """A deployment's folder and key."""
    make_key(tmp_path)
    return Setting(access, tmp_path)


def settlements(access: Access) -> list[tuple[str, int]]:
    """State and attempt of all that was settled."""
    with as_owner(access) as owner:
        return owner.execute("SELECT state, attempt FROM settlements ORDER BY sequence").fetchall()


async def freeze(worker: Process, receiver: Receiver) -> None:
    """Let a worker begin three requests, and let them be answered once it is frozen."""
    await until_async(lambda: len(receiver.asked) == 3)
    worker.send_signal(signal.SIGSTOP)
    receiver.gate.set()
    await until_async(lambda: len(receiver.answered) == 3)


async def test_a_worker_that_freezes_past_its_lease(setting: Setting):
    """Another one delivers meanwhile; when the frozen one wakes up, what it has to say changes nothing."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as frozen:
            await freeze(frozen, receiver)
            make_all_due(setting.access)
            async with setting.worker() as other:
                await until_async(lambda: stages(setting.access, box) == {"delivered": 3})
                before = settlements(setting.access)
                frozen.send_signal(signal.SIGCONT)
                await stop(other)
            await stop(frozen)
    assert settlements(setting.access) == before == [("delivered", 2)] * 3
    assert set(receiver.answered.values()) == {2}


async def test_a_worker_that_freezes_and_finds_its_leases_untouched(setting: Setting):
    """Its pairs still match: what was delivered is settled, though the leases were over."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as frozen:
            await freeze(frozen, receiver)
            with as_owner(setting.access) as owner:
                owner.execute("UPDATE queue SET due_at = clock_timestamp() + interval '2 s'")
            frozen.send_signal(signal.SIGCONT)
            await until_async(lambda: stages(setting.access, box) == {"delivered": 3})
            await stop(frozen)
    assert settlements(setting.access) == [("delivered", 1)] * 3


async def test_killed_while_it_sends(setting: Setting):
    """The receiver had it in hand: the lease brings it back, and it is delivered again under the same id."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as killed:
            await until_async(lambda: len(receiver.asked) == 3)
            killed.kill()
            await killed.wait()
        assert stages(setting.access, box) == {"leased": 3}
        receiver.gate.set()
        make_all_due(setting.access)
        report = await setting.once()
    assert (report["tenant"], report["delivered"]) == ("acme", 3)
    assert settlements(setting.access) == [("delivered", 2)] * 3
    assert len(receiver.asked) == 3


END_WAITING = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


async def test_killed_while_it_settles(setting: Setting):
    """Its session ends before the commit: the receiver gets all of it twice, and removes duplicates."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        with as_owner(setting.access) as owner, owner.transaction():
            owner.execute("SELECT FROM destination_health FOR UPDATE")
            async with setting.worker() as killed:
                await until_async(lambda: len(receiver.answered) == 3)
                await until_async(lambda: waits_for_lock(setting.access))
                killed.kill()
                await killed.wait()
            owner.execute(END_WAITING)
            await until_async(lambda: not waits_for_lock(setting.access))
        assert stages(setting.access, box) == {"leased": 3}
        make_all_due(setting.access)
        await setting.once()
    assert settlements(setting.access) == [("delivered", 2)] * 3
    assert set(receiver.answered.values()) == {2}


async def kill_round(setting: Setting, receiver: Receiver, boxes: list[Box], chance: random.Random) -> None:
    """Kill a worker at a random moment of its work."""
    for box in boxes:
        fill(setting.access, box, 60)
    async with setting.worker() as killed:
        await until_async(lambda: bool(receiver.asked))
        await asyncio.sleep(chance.uniform(0, 0.25))
        killed.kill()
        await killed.wait()


async def kill_rounds(setting: Setting, chance: random.Random, rounds: int) -> None:
    """Kill one worker after the other; then all is delivered, nothing is settled twice, nothing is lost."""
    async with receiving() as receiver:
        boxes = [make_box(setting.access, name, url=receiver.url) for name in ("erp", "crm", "hr")]
        for _ in range(rounds):
            receiver.asked.clear()
            await kill_round(setting, receiver, boxes, chance)
            make_all_due(setting.access)
        total = rounds * 60 * len(boxes)
        async with setting.worker() as last:
            await until_async(lambda: stages(setting.access, *boxes) == {"delivered": total}, within_s=DONE_WITHIN_S)
            await stop(last)
    with as_owner(setting.access) as owner:
        ids = owner.execute("SELECT delivery::text FROM deliveries").fetchall()
        pending = owner.execute(
            "SELECT sum(highest - settled) FROM destinations JOIN destination_health USING (tenant, stream)"
        ).fetchone()
    assert {delivery for (delivery,) in ids} == receiver.answered.keys()
    assert pending == (0,)
    attempts = Counter(attempt for _, attempt in settlements(setting.access))
    print(f"{total} delivered, by attempt: {dict(attempts)}; received again: {receiver.answered.total() - total}")


async def test_killed_at_random_moments(setting: Setting, seed: int):
    """Three times."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    await kill_rounds(setting, random.Random(seed), 3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_killed_at_random_moments_often(setting: Setting, seed: int):
    """A hundred times."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    await kill_rounds(setting, random.Random(seed), 100)


async def test_stopped_while_it_sends(setting: Setting):
    """SIGTERM: what is on its way comes to its end, nothing more is begun, nothing stays out."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 40)
        receiver.gate.clear()
        async with setting.worker() as process:
            await until_async(lambda: len(receiver.asked) == 16)
            process.terminate()
            assert (await logged(process, "worker_stops"))["out"] == 16
            receiver.gate.set()
            await ended_well(process)
    assert stages(setting.access, box) == {"delivered": 16, "fresh": 24}
    assert receiver.asked.total() == 16


async def test_a_second_signal_ends_it_at_once(setting: Setting):
    """Its leases bring back what it had."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as process:
            await until_async(lambda: len(receiver.asked) == 3)
            process.terminate()
            await logged(process, "worker_stops")
            process.terminate()
            async with asyncio.timeout(DONE_WITHIN_S):
                assert await process.wait() == 143
    assert stages(setting.access, box) == {"leased": 3}


async def test_it_may_open_as_many_files_as_it_needs(setting: Setting):
    """The soft limit under which it is started does not end pushes for want of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        async with setting.worker() as process:
            raised, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wanted = worker_files(Settings())
    assert raised == (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))


async def test_one_turn(setting: Setting):
    """`--once` uses one tenant's turn and reports it; with nothing due it says so."""
    async with receiving() as receiver:
        acme = make_box(setting.access, tenant="acme", url=receiver.url)
        globex = make_box(setting.access, tenant="globex", url=receiver.url)
        fill(setting.access, acme, 20)
        fill(setting.access, globex, 2)
        report = await setting.once()
        assert stages(setting.access, acme) == {"delivered": 16, "fresh": 4}
        assert stages(setting.access, globex) == {"fresh": 2}
        assert report.pop("seconds") > 0
        assert report == {
            "tenant": "acme",
            "claimed": 16,
            "ended": 0,
            "delivered": 16,
            "retried": 0,
            "dead": 0,
            "released": 0,
            "fenced": 0,
            "left": 0,
            "limited": 0,
            "renewed": 0,
        }
        for _ in range(2):
            await setting.once()
        assert stages(setting.access, acme, globex) == {"delivered": 22}
        assert (await setting.once())["tenant"] is None


async def test_one_turn_that_is_stopped(setting: Setting):
    """It hands back what it has."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker("--once") as process:
            await until_async(lambda: len(receiver.asked) == 3, within_s=READY_WITHIN_S)
            process.terminate()
            async with asyncio.timeout(DONE_WITHIN_S):
                assert await process.wait() == 143
    assert stages(setting.access, box) == {"retry": 3}

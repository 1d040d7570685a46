"""The worker: who is served when, what wakes it, and how it ends."""

import asyncio
import time
from collections.abc import Callable

import pytest
from mailing import (
    Clock,
    FakeSender,
    answering,
    at_once,
    delivering,
    fill,
    make_all_due,
    make_box,
    make_worker,
    stages,
    while_closed,
)
from structlog.testing import capture_logs

from fleet import as_owner
from own_server import own_server
from postseal.limits import Rate
from postseal.outbound import scheduler, worker
from postseal.outbound.scheduler import HasRoom, RoundRobin, Turn
from postseal.postgres import database as pools
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.rules.delivery import Attempted, Code
from postseal.senders import Mail
from until import until_async

pytestmark = pytest.mark.anyio


class Watched(RoundRobin):
    """Keeps count of its looks and turns, and tells when it had nothing to give."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        super().__init__(database, clock)
        self.looks = 0
        """How many were begun."""
        self.turns: list[tuple[str, int]] = []
        """Whose, and after how many looks."""
        self.idle = asyncio.Event()

    async def next_turn(self, has_room: HasRoom) -> Turn | None:
        """The next one."""
        turn = await super().next_turn(has_room)
        if turn is None:
            self.idle.set()
        else:
            self.turns.append((turn.tenant, self.looks))
        return turn

    async def _look(self) -> None:
        self.looks += 1
        await super()._look()


async def test_what_is_due_is_delivered_once(access: Access, database: Database):
    """Mail of several tenants and destinations, each delivery exactly once."""
    boxes = [make_box(access, name, tenant=tenant) for tenant in ("acme", "globex") for name in ("erp", "crm")]
    for box in boxes:
        fill(access, box, 150)
    sender = at_once()
    async with make_worker(database, sender) as one:
        await until_async(lambda: len(sender.ended) >= 600)
    assert stages(access, *boxes) == {"delivered": 600}
    assert len({mail.delivery for mail in sender.ended}) == 600
    assert one.totals.delivered == one.totals.claimed == 600
    assert one.out == 0


async def test_workers_beside_each_other_share_the_work(access: Access, database: Database):
    """Each delivery is one worker's; the other passes over it."""
    box = make_box(access)
    fill(access, box, 400)
    senders = [at_once(), at_once()]
    workers = [make_worker(database, sender, seed=n) for n, sender in enumerate(senders)]
    async with workers[0], workers[1]:
        await until_async(lambda: sum(len(sender.ended) for sender in senders) >= 400)
    assert stages(access, box) == {"delivered": 400}
    assert sum(len(sender.begun) for sender in senders) == 400


async def leaves_with_the_next_look(access: Access, rows: int) -> None:
    """One tenant has `rows` due for endpoints that hang, another one delivery, and three more one by one."""
    dead = [make_box(access, f"dead-{n}", tenant="acme") for n in range(10)]
    for box in dead:
        fill(access, box, rows // len(dead))
    alive = make_box(access, "alive", tenant="globex")
    fill(access, alive, 1)

    async def answer(mail: Mail) -> Attempted:
        if mail.tenant == "acme":
            await asyncio.Event().wait()
        return Attempted()

    sender = FakeSender(answer)
    async with delivering(access) as database:
        watched = Watched(database, asyncio.get_running_loop().time)
        async with make_worker(database, sender, scheduler=watched, stop_grace_s=0.0) as one:
            await until_async(lambda: len(sender.ended) == 1)
            assert "globex" in [tenant for tenant, _ in watched.turns[:2]]
            # Now everything that the first one may have out hangs; a newcomer is seen with the next look.
            await until_async(lambda: one.out >= 160)
            for count in range(2, 5):
                looks = watched.looks
                fill(access, alive, 1)
                await until_async(lambda count=count: len(sender.ended) == count)
                seen_after = max(after for tenant, after in watched.turns if tenant == "globex")
                assert seen_after <= looks + 1
            await until_async(lambda: one.out == 160)
    assert stages(access, alive) == {"delivered": 4}
    assert stages(access, *dead)["leased"] == 0


async def test_a_dead_endpoint_with_a_backlog_starves_nobody(access: Access):
    """10,000 due deliveries of one tenant to endpoints that hang: another tenant's mail leaves within two turns."""
    await leaves_with_the_next_look(access, 10_000)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", [100_000, 1_000_000])
async def test_a_dead_endpoint_with_a_mountain_starves_nobody(access: Access, rows: int):
    """The same with up to a million."""
    await leaves_with_the_next_look(access, rows)


async def test_endpoints_that_refuse_at_once_starve_nobody(access: Access, database: Database):
    """A tenant whose every attempt fails at once is always ready for its next turn; the other has every second one."""
    busy, other = make_box(access, tenant="acme"), make_box(access, tenant="globex")
    fill(access, busy, 2_000)
    fill(access, other, 160)

    async def answer(mail: Mail) -> Attempted:
        return Attempted(Code.STATUS_5XX if mail.tenant == "acme" else None)

    sender = FakeSender(answer)
    async with make_worker(database, sender, cycles=1) as one:
        await until_async(lambda: sum(mail.tenant == "globex" for mail in sender.ended) == 160)
        assert one.turns <= 2 * 160 / 16 + 2


async def test_many_dead_endpoints_of_many_tenants_leave_room_for_one_more(access: Access, database: Database):
    """However many tenants hang: one that has nothing out gets a place and a slot."""
    for n in range(40):
        fill(access, make_box(access, tenant=f"tenant-{n}"), 40)
    alive = make_box(access, tenant="zzz")

    async def answer(mail: Mail) -> Attempted:
        if mail.tenant != "zzz":
            await asyncio.Event().wait()
        return Attempted()

    sender = FakeSender(answer)
    async with make_worker(database, sender, cycles=2, stop_grace_s=0.0) as one:
        await until_async(lambda: one.out >= 2 * worker.SLOTS_A_CYCLE - 16, within_s=30)
        fill(access, alive, 3)
        await until_async(lambda: stages(access, alive) == {"delivered": 3})


async def test_an_idle_worker_is_woken(access: Access, database: Database):
    """A hint spares the wait for the next poll, however soon it comes after the last look."""
    box = make_box(access)
    sender, watched = at_once(), Watched(database, asyncio.get_running_loop().time)
    async with make_worker(database, sender, scheduler=watched, poll_s=60.0) as one:
        for count in range(1, 4):
            await watched.idle.wait()
            watched.idle.clear()
            fill(access, box, 1)
            one.wake()
            await until_async(lambda count=count: len(sender.ended) == count)


async def test_a_hint_right_after_a_look_is_not_lost(
    access: Access, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """The scheduler looks again as soon as it may."""
    monkeypatch.setattr(scheduler, "LOOK_GAP_S", 1.0)
    monkeypatch.setattr(worker, "LOOK_GAP_S", 1.0)
    box = make_box(access)
    sender, watched = at_once(), Watched(database, asyncio.get_running_loop().time)
    async with make_worker(database, sender, scheduler=watched, poll_s=60.0) as one:
        await watched.idle.wait()
        assert watched.looks == 1
        fill(access, box, 1)
        one.wake()
        await until_async(lambda: len(sender.ended) == 1)


async def test_an_idle_worker_polls(access: Access, database: Database):
    """Nobody has to wake it."""
    box = make_box(access)
    sender, watched = at_once(), Watched(database, asyncio.get_running_loop().time)
    async with make_worker(database, sender, scheduler=watched, poll_s=0.1):
        await watched.idle.wait()
        fill(access, box, 1)
        await until_async(lambda: len(sender.ended) == 1)


async def test_what_is_limited_comes_back_by_itself(access: Access, database: Database):
    """Five claims a second and no more; nothing is left in `delivering` meanwhile."""
    box = make_box(access)
    fill(access, box, 16 * 4)
    sender = at_once()
    async with make_worker(database, sender, rate=Rate(5.0, 1)) as one:
        began_s = time.monotonic()
        await until_async(lambda: len(sender.ended) == 64)
        assert time.monotonic() - began_s >= 0.55
        assert one._means.limiter.granted.permits >= 4
    assert stages(access, box) == {"delivered": 64}


async def test_stopping_lets_what_is_on_its_way_end(access: Access, database: Database):
    """Within the grace: nothing is cut, delivered is settled as delivered, and nothing more is begun."""
    box = make_box(access)
    fill(access, box, 100)
    gate, stop = asyncio.Event(), asyncio.Event()
    sender = while_closed(gate)
    one = make_worker(database, sender, stop_grace_s=20.0)
    running = asyncio.create_task(one.run(stop))
    await until_async(lambda: len(sender.begun) == 16)
    stop.set()
    await one._stopping.wait()
    gate.set()
    await running
    assert (len(sender.begun), sender.cut) == (16, [])
    assert stages(access, box) == {"delivered": 16, "fresh": 84}


async def test_stopping_cuts_off_what_does_not_end(access: Access, database: Database):
    """After the grace it is settled as a retry that counts, since it may have been received; nothing stays leased."""
    box = make_box(access)
    fill(access, box, 100)
    sender = while_closed(asyncio.Event())
    one = make_worker(database, sender, stop_grace_s=0.1)
    async with one:
        await until_async(lambda: len(sender.begun) == 16)
    assert (len(sender.cut), one.totals.retried, one.out) == (16, 16, 0)
    assert stages(access, box) == {"retry": 16, "fresh": 84}
    with as_owner(access) as owner:
        assert owner.execute("SELECT DISTINCT code, attempt FROM attempts").fetchall() == [("sender_failed", 1)]


async def test_who_cancels_the_worker_does_not_wait_for_receivers(access: Access, database: Database):
    """What it has is handed back all the same."""
    box = make_box(access)
    fill(access, box, 100)
    sender = while_closed(asyncio.Event())
    running = asyncio.create_task(make_worker(database, sender, stop_grace_s=60.0).run(asyncio.Event()))
    await until_async(lambda: len(sender.begun) == 16)
    running.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait({running})
    assert running.cancelled()
    assert stages(access, box) == {"retry": 16, "fresh": 84}


async def test_a_fault_in_one_turn_is_not_the_next_ones(access: Access, database: Database):
    """The worker goes on; the log names the place and quotes no row."""
    bad, good = make_box(access, tenant="acme"), make_box(access, tenant="globex")
    fill(access, bad, 3)
    fill(access, good, 3)
    with as_owner(access) as owner:
        owner.execute(
            "CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'canary-row' USING ERRCODE = '22000'; END $$"
        )
        owner.execute(
            "CREATE TRIGGER fault BEFORE INSERT ON settlements FOR EACH ROW WHEN (new.tenant = 'acme') "
            "EXECUTE FUNCTION fault()"
        )
    with capture_logs() as logs:
        sender = at_once()
        async with make_worker(database, sender) as one:
            await until_async(lambda: stages(access, good) == {"delivered": 3} and one.failed_turns == 1)
        assert "canary" not in str(logs)
        assert [(entry["event"], entry["sqlstate"]) for entry in logs if "sqlstate" in entry] == [
            ("turn_failed", "22000")
        ]
    assert stages(access, bad) == {"leased": 3}
    with as_owner(access) as owner:
        owner.execute("DROP TRIGGER fault ON settlements")
    make_all_due(access)
    async with make_worker(database, sender):
        await until_async(lambda: stages(access, bad) == {"delivered": 3})


async def test_a_database_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch):
    """The worker waits, and goes on by itself; what it had out is settled."""
    monkeypatch.setattr(pools, "POOL_WAIT_S", 0.5)
    monkeypatch.setattr(worker, "AGAIN_S", 0.2)
    with own_server() as server, capture_logs() as logs:
        box = make_box(server.access)
        fill(server.access, box, 40)
        gate = asyncio.Event()
        sender = while_closed(gate)
        async with delivering(server.access) as database, make_worker(database, sender):
            await until_async(lambda: len(sender.begun) == 16)
            await asyncio.to_thread(server.stop)
            gate.set()
            await until_async(lambda: len(sender.ended) == 16)
            failed = len(logs)
            await until_async(lambda: len(logs) >= failed + 4)
            await asyncio.to_thread(server.start)
            await until_async(lambda: len(sender.ended) >= 40)
            await until_async(lambda: stages(server.access, box) == {"delivered": 40})
        assert len(sender.begun) == 40


async def test_mail_that_stayed_held_is_let_go(access: Access, database: Database, monkeypatch: pytest.MonkeyPatch):
    """Whoever enabled its destination was cut off before the end: the worker mends that."""
    monkeypatch.setattr(worker, "MEND_EVERY_S", 0.1)
    box = make_box(access)
    fill(access, box, 30)
    with as_owner(access) as owner:
        owner.execute("UPDATE queue SET lane = 'held'")
    async with make_worker(database, at_once()):
        await until_async(lambda: stages(access, box) == {"delivered": 30})


async def test_an_hour_between_the_clocks_changes_nothing(access: Access, database: Database):
    """Neither the machine's time of day nor its monotonic clock decides what is due, leased or expired."""
    box = make_box(access)
    fill(access, box, 20)
    fill(access, box, 1, due_in_s=1800)
    for ahead_s in (-3600.0, 3600.0):
        sender = answering(Attempted(Code.STATUS_5XX))
        report = await make_worker(database, sender, clock=Clock(ahead_s)).run_once()
        assert report is not None
        assert report.counts.retried == (16 if ahead_s < 0 else 4)
        with as_owner(access) as owner:
            rows = owner.execute(
                "SELECT count(*) FROM queue WHERE stage = 'retry' "
                "AND due_at - clock_timestamp() BETWEEN interval '1 s' AND interval '5 s'"
            ).fetchone()
        assert rows == ((16,) if ahead_s < 0 else (20,))
    assert stages(access, box) == {"retry": 20, "fresh": 1}

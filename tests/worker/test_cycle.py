"""One turn: its checks in their order, its bounds, and what it leaves behind however it ends."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from typing import Any, TypeVar

import pytest
from mailing import (
    KEY,
    Clock,
    FakeSender,
    answering,
    at_once,
    cut_off,
    fill,
    make_all_due,
    make_box,
    make_worker,
    stages,
    while_closed,
)
from structlog.testing import capture_logs

from fleet import as_owner
from postseal.errors import Unavailable
from postseal.limits import Rate
from postseal.outbound import out, scheduler
from postseal.outbound.means import Counts
from postseal.outbound.targets import Target, Targets
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database, Part
from postseal.rules.delivery import Attempted, Code
from postseal.senders import Mail
from postseal.senders.secrets import DeploymentKey
from until import until_async

pytestmark = pytest.mark.anyio

T = TypeVar("T")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is settled soon."""
    monkeypatch.setattr(out, "SETTLE_EVERY_S", 0.02)


def row_of(access: Access, sequence: int) -> dict[str, Any]:
    """A queued delivery."""
    with as_owner(access) as owner:
        cursor = owner.execute(
            "SELECT stage, attempt, attempt_limit, code, due_at > clock_timestamp() AS waits FROM queue "
            "WHERE sequence = %s",
            [sequence],
        )
        row = cursor.fetchone()
        assert row is not None
        assert cursor.description is not None
        return {column.name: value for column, value in zip(cursor.description, row, strict=True)}


async def test_nothing_is_begun_once_the_worker_stops(access: Access, database: Database):
    """Cancellation comes first: no permit is taken, and nothing is claimed."""
    fill(access, make_box(access), 3)
    one = make_worker(database, at_once())
    one.stop()
    report = await one.run_once()
    assert report is not None
    assert report.counts == Counts()
    assert one._means.limiter.granted.requests == 0
    assert row_of(access, 1)["attempt"] == 0


async def test_a_limited_tenant_claims_nothing_and_the_next_has_its_turn(access: Access, database: Database):
    """The rate comes before the claim; the tenant comes back when the limiter lets it."""
    acme, globex = make_box(access, tenant="acme"), make_box(access, tenant="globex")
    fill(access, acme, 40)
    fill(access, globex, 5)
    sender = at_once()
    one = make_worker(database, sender, rate=Rate(0.001, 1))
    reports = [await one.run_once() for _ in range(3)]
    assert [(r.tenant, r.counts.claimed, r.counts.limited) for r in reports if r] == [
        ("acme", 16, 0),
        ("globex", 5, 0),
        ("acme", 0, 1),
    ]
    assert one._means.limiter.refused.requests == 1
    assert await one.run_once() is None
    assert one._means.limiter.refused.requests == 1
    assert stages(access, acme, globex) == {"delivered": 21, "fresh": 24}


async def test_a_permit_is_for_a_claim_of_whatever_size(access: Access, database: Database):
    """One permit a claim call, which never has more than 100 deliveries."""
    fill(access, make_box(access), 250)
    one = make_worker(database, at_once(), destination_concurrency=1000)
    reports = [await one.run_once() for _ in range(3)]
    assert [report.counts.claimed for report in reports if report] == [100, 100, 50]
    assert one._means.limiter.granted.permits == 3


async def test_a_destination_has_no_more_on_their_way_than_its_cap(access: Access, database: Database):
    """All cycles of a worker share it."""
    boxes = [make_box(access, name) for name in ("erp", "crm")]
    for box in boxes:
        fill(access, box, 120)

    async def after_a_moment(_mail: Mail) -> Attempted:
        await asyncio.sleep(0.002)
        return Attempted()

    sender = FakeSender(after_a_moment)
    async with make_worker(database, sender, destination_concurrency=8, cycles=6):
        await until_async(lambda: len(sender.ended) >= 240)
    assert sender.most == {"erp": 8, "crm": 8}
    assert stages(access, *boxes) == {"delivered": 240}


async def test_half_of_the_slots_are_for_first_attempts(access: Access, database: Database):
    """New mail under a mountain of retries leaves at once; what either kind leaves, the other may have."""
    box = make_box(access)
    fill(access, box, 3_000, stage="retry")
    fill(access, box, 130)
    sender = at_once()
    one = make_worker(database, sender, destination_concurrency=100)
    firsts = []
    for _ in range(4):
        sender.begun.clear()
        report = await one.run_once()
        assert report is not None
        firsts.append((report.counts.claimed, sum(mail.attempt == 1 for mail in sender.begun)))
    assert firsts == [(100, 50), (100, 50), (80, 30), (100, 0)]


async def test_retries_are_not_starved_by_first_attempts(access: Access, database: Database):
    """Where only one can be claimed at a time, it is now of one kind and now of the other."""
    box = make_box(access)
    fill(access, box, 40, stage="retry")
    fill(access, box, 40)
    sender = at_once()
    one = make_worker(database, sender, destination_concurrency=1)
    for _ in range(20):
        await one.run_once()
    kinds = Counter(mail.attempt for mail in sender.begun)
    assert kinds.total() == 20
    assert min(kinds[1], kinds[2]) >= 4


async def test_one_slow_receiver_does_not_hold_up_the_settlement_of_others(access: Access, database: Database):
    """What is known is settled within moments, while the slow one is still out."""
    slow, quick = make_box(access, "slow"), make_box(access, "quick")
    fill(access, slow, 1)
    fill(access, quick, 9)
    gate = asyncio.Event()

    async def answer(mail: Mail) -> Attempted:
        if mail.destination == "slow":
            await gate.wait()
        return Attempted()

    turn = asyncio.create_task(make_worker(database, FakeSender(answer)).run_once())
    await until_async(lambda: stages(access, quick) == {"delivered": 9}, within_s=5)
    assert stages(access, slow) == {"leased": 1}
    gate.set()
    report = await turn
    assert report is not None
    assert report.counts.delivered == 10


async def test_a_long_sending_keeps_its_lease(access: Access, database: Database):
    """At each third of its lease that is renewed in the database, so that nobody else has it meanwhile."""
    box = make_box(access)
    fill(access, box, 2)
    gate, clock = asyncio.Event(), Clock()
    sender = while_closed(gate)
    one = make_worker(database, sender, lease_s=30.0, clock=clock)
    turn = asyncio.create_task(one.run_once())
    await until_async(lambda: len(sender.begun) == 2)
    for thirds in range(1, 7):
        with as_owner(access) as owner:
            owner.execute("UPDATE queue SET due_at = clock_timestamp() + interval '1 s'")
        clock.ahead_s += 10
        await until_async(lambda thirds=thirds: one.totals.renewed == 2 * thirds)
        with as_owner(access) as owner:
            left = owner.execute("SELECT DISTINCT due_at > clock_timestamp() + interval '5 s' FROM queue").fetchall()
        assert left == [(True,)]
    gate.set()
    report = await turn
    assert report is not None
    assert report.counts.delivered == 2
    assert {mail.attempt for mail in sender.begun} == {1}


async def test_a_sending_that_lost_its_lease_is_cut_off(access: Access, database: Database):
    """A renewal tells that the delivery is another's: what is on its way is ended, and nothing is changed."""
    box = make_box(access)
    fill(access, box, 2)
    sender, clock = while_closed(asyncio.Event()), Clock()
    turn = asyncio.create_task(make_worker(database, sender, lease_s=30.0, clock=clock).run_once())
    await until_async(lambda: len(sender.begun) == 2)
    with as_owner(access) as owner:
        owner.execute("UPDATE queue SET token = gen_random_uuid(), attempt = attempt + 1")
    clock.ahead_s += 10
    report = await turn
    assert report is not None
    assert (report.counts.claimed, report.counts.fenced) == (2, 2)
    assert len(sender.cut) == 2
    assert [row_of(access, n)["attempt"] for n in (1, 2)] == [2, 2]
    assert stages(access, box) == {"leased": 2}


async def test_a_settle_after_the_lease_counts_while_nobody_else_has_the_delivery(access: Access, database: Database):
    """A pair that still matches is accepted; one that does not changes nothing."""
    box = make_box(access)
    fill(access, box, 2)
    gate = asyncio.Event()
    sender = while_closed(gate)
    turn = asyncio.create_task(make_worker(database, sender).run_once())
    await until_async(lambda: len(sender.begun) == 2)
    make_all_due(access)
    with as_owner(access) as owner:  # the lease of one is taken over
        owner.execute("UPDATE queue SET token = gen_random_uuid(), attempt = 2 WHERE sequence = 2")
    gate.set()
    report = await turn
    assert report is not None
    assert (report.counts.delivered, report.counts.fenced) == (1, 1)
    assert row_of(access, 2)["attempt"] == 2
    assert stages(access, box) == {"delivered": 1, "leased": 1}


async def test_the_token_fences_where_the_attempt_alone_would_not(access: Access, database: Database):
    """A failover lost the commit that counted the attempt up; the next claim counts it up again, to the same number."""
    box = make_box(access)
    fill(access, box, 1)
    gates = [asyncio.Event(), asyncio.Event()]
    senders = [while_closed(gate) for gate in gates]
    turns: list[asyncio.Task[Any]] = []
    for sender in senders:
        turns.append(asyncio.create_task(make_worker(database, sender).run_once()))
        await until_async(lambda sender=sender: len(sender.begun) == 1)
        if sender is senders[0]:
            with as_owner(access) as owner:
                owner.execute("UPDATE queue SET attempt = 0, stage = 'fresh', token = NULL, due_at = clock_timestamp()")
    gates[0].set()
    stale = await turns[0]
    assert (stale.counts.delivered, stale.counts.fenced) == (0, 1)
    assert stages(access, box) == {"leased": 1}
    gates[1].set()
    report = await turns[1]
    assert (report.counts.delivered, report.counts.fenced) == (1, 0)
    assert [mail.attempt for sender in senders for mail in sender.begun] == [1, 1]


class Faulty(Database):
    """A database that fails `before` or after exchanges, as often as it is told."""

    def __init__(self, access: Access) -> None:
        super().__init__(access.of(Part.DELIVERY), prepare=True, size=6)
        self.exchanges = 0
        self.fails: set[int] = set()
        self.forgets: set[int] = set()
        self.stuck: asyncio.Event | None = None

    async def exchange(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Do it, or fail before or after."""
        number = self.exchanges
        self.exchanges += 1
        if self.stuck is not None:
            await self.stuck.wait()
        if number in self.fails:
            raise Unavailable("a fault")
        result = await super().exchange(work)
        if number in self.forgets:
            raise Unavailable("a fault")
        return result


@pytest.fixture
async def faulty(access: Access) -> AsyncIterator[Faulty]:
    """Such a one, open."""
    async with Faulty(access) as database:
        yield database


LOOK, CLAIM, TARGETS, SETTLE = range(4)
"""The exchanges of one turn."""


async def test_a_settlement_is_tried_until_the_database_is_back(access: Access, faulty: Faulty):
    """Nothing is sent again because the database was away for a moment."""
    box = make_box(access)
    fill(access, box, 5)
    sender = at_once()
    faulty.fails = {SETTLE, SETTLE + 1, SETTLE + 2}
    report = await make_worker(faulty, sender).run_once()
    assert report is not None
    assert report.counts == Counts(claimed=5, delivered=5)
    assert faulty.exchanges == SETTLE + 4
    assert stages(access, box) == {"delivered": 5}
    assert len(sender.begun) == 5


async def test_a_settlement_whose_answer_was_lost_is_not_made_twice(access: Access, faulty: Faulty):
    """It was committed; tried again it is fenced, and changes nothing."""
    box = make_box(access)
    fill(access, box, 5)
    faulty.forgets = {SETTLE}
    report = await make_worker(faulty, at_once()).run_once()
    assert report is not None
    assert report.counts == Counts(claimed=5, fenced=5)
    assert stages(access, box) == {"delivered": 5}


async def test_a_settlement_is_given_up_when_the_lease_has_ended(access: Access, faulty: Faulty):
    """Then the lease brings the deliveries back."""
    box = make_box(access)
    fill(access, box, 5)
    faulty.fails = set(range(SETTLE, 1000))
    clock = Clock()
    turn = asyncio.create_task(make_worker(faulty, at_once(), lease_s=30.0, clock=clock).run_once())
    await until_async(lambda: faulty.exchanges > SETTLE + 1)
    assert not turn.done()
    clock.ahead_s += 30
    report = await turn
    assert report is not None
    assert report.counts == Counts(claimed=5, left=5)
    faulty.fails.clear()
    make_all_due(access)
    report = await make_worker(faulty, at_once()).run_once()
    assert report is not None
    assert report.counts.delivered == 5
    assert stages(access, box) == {"delivered": 5}


async def test_a_claim_whose_answer_was_lost_sends_nothing(access: Access, faulty: Faulty):
    """What it may have leased comes back when the lease ends, and all slots are free again."""
    box = make_box(access)
    fill(access, box, 5)
    faulty.forgets = {CLAIM}
    sender = at_once()
    one = make_worker(faulty, sender)
    with pytest.raises(Unavailable):
        await one.run_once()
    assert (sender.begun, one.out) == ([], 0)
    make_all_due(access)
    report = await make_worker(faulty, sender).run_once()
    assert report is not None
    assert report.counts.delivered == 5
    assert {mail.attempt for mail in sender.begun} == {2}


async def test_what_cannot_be_addressed_is_released(access: Access, faulty: Faulty):
    """The look-up fails after the claim: nothing was sent, so no attempt is lost."""
    box = make_box(access)
    fill(access, box, 3)
    faulty.fails = {TARGETS}
    sender = at_once()
    one = make_worker(faulty, sender)
    with pytest.raises(Unavailable):
        await one.run_once()
    assert one.totals == Counts(claimed=3, released=3)
    assert row_of(access, 1) == {"stage": "fresh", "attempt": 1, "attempt_limit": 9, "code": None, "waits": False}
    assert (sender.begun, one.out) == ([], 0)
    report = await make_worker(faulty, sender).run_once()
    assert report is not None
    assert report.counts.delivered == 3


async def test_what_was_claimed_when_the_worker_stops_is_released(access: Access, database: Database):
    """It was not begun: nothing is sent, and no attempt is lost."""
    box = make_box(access)
    fill(access, box, 3)

    class Stopping(Targets):
        async def of(self, tenant: str, streams: Collection[int]) -> dict[int, Target]:
            one.stop()
            return await super().of(tenant, streams)

    sender = at_once()
    one = make_worker(database, sender, targets=Stopping(database, KEY, asyncio.get_running_loop().time))
    report = await one.run_once()
    assert report is not None
    assert report.counts == Counts(claimed=3, released=3)
    assert (sender.begun, one.out) == ([], 0)
    assert stages(access, box) == {"fresh": 3}


async def test_nothing_is_begun_whose_lease_may_be_over(access: Access, database: Database):
    """The process froze between its claim and its sending: what it has may be another's by now."""
    box = make_box(access)
    fill(access, box, 3)
    clock = Clock()

    class Frozen(Targets):
        async def of(self, tenant: str, streams: Collection[int]) -> dict[int, Target]:
            clock.ahead_s += 30
            return await super().of(tenant, streams)

    sender = at_once()
    report = await make_worker(
        database, sender, targets=Frozen(database, KEY, clock), lease_s=30.0, clock=clock
    ).run_once()
    assert report is not None
    assert (report.counts, sender.begun) == (Counts(claimed=3, released=3), [])


async def test_what_only_expired_does_not_hide_what_is_due(
    access: Access, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """A claim that ended a hundred expired ones asks again, without another look."""
    monkeypatch.setattr(scheduler, "LOOK_GAP_S", 60.0)
    monkeypatch.setattr(scheduler, "LOOK_EVERY_S", 60.0)
    box = make_box(access)
    fill(access, box, 150)
    with as_owner(access) as owner:
        owner.execute("UPDATE queue SET expires_at = clock_timestamp() - interval '1 s' WHERE sequence <= 100")
    one = make_worker(database, at_once(), destination_concurrency=100)
    reports = [await one.run_once() for _ in range(2)]
    assert [(r.counts.ended, r.counts.delivered) for r in reports if r] == [(100, 0), (0, 50)]


async def test_mail_of_a_destination_that_was_just_disabled_is_released(access: Access, database: Database):
    """Disabled between the claim and the sending: nothing is sent, and no attempt is lost."""
    box = make_box(access)
    fill(access, box, 3)

    class Late(Targets):
        async def of(self, tenant: str, streams: Collection[int]) -> dict[int, Target]:
            with as_owner(access) as owner:
                owner.execute("UPDATE destinations SET disabled_at = clock_timestamp(), disabled_reason = 'operator'")
            return await super().of(tenant, streams)

    sender = at_once()
    one = make_worker(database, sender, targets=Late(database, KEY, asyncio.get_running_loop().time))
    report = await one.run_once()
    assert report is not None
    assert report.counts == Counts(claimed=3, released=3)
    assert sender.begun == []
    assert row_of(access, 1)["attempt_limit"] == 9


async def test_a_secret_that_does_not_open_costs_no_attempt(access: Access, database: Database):
    """One machine has another deployment key: its claims are given back with a code and a wait, however many it makes.

    The log says whose they were. A machine with the right key then delivers, as if nothing had been tried before.
    """
    box = make_box(access)
    fill(access, box, 2, limit=1)
    sender = at_once()
    other = Targets(database, DeploymentKey(bytes(32)), lambda: 0.0)
    with capture_logs() as logs:
        for attempt in (1, 2, 3):
            report = await make_worker(database, sender, targets=other).run_once()
            assert report is not None
            assert report.counts == Counts(claimed=2, released=2)
            row = row_of(access, 1)
            assert (row["attempt"], row["attempt_limit"]) == (attempt, attempt + 1)
            assert (row["code"], row["waits"]) == (Code.SECRET_UNUSABLE, True)
            make_all_due(access)
    assert sender.begun == []
    assert logs == [{"event": "secrets_not_opened", "tenant": "acme", "destinations": 1, "log_level": "error"}]
    with as_owner(access) as owner:
        assert owner.execute("SELECT FROM attempts").fetchall() == []
    report = await make_worker(database, answering(Attempted(Code.STATUS_5XX))).run_once()
    assert report is not None
    assert report.counts == Counts(claimed=2, dead=2)  # the one attempt that there was to be


async def test_what_a_sender_lacks_costs_no_attempt(access: Access, database: Database):
    """No descriptor, no thread: the delivery is given back with its code, and later than at once."""
    fill(access, make_box(access), 1, limit=1)
    short = answering(Attempted(Code.SENDER_FAILED, ours=True))
    report = await make_worker(database, short).run_once()
    assert report is not None
    assert report.counts == Counts(claimed=1, released=1)
    row = row_of(access, 1)
    assert (row["attempt_limit"], row["code"], row["waits"]) == (2, Code.SENDER_FAILED, True)


async def test_each_failure_waits_longer_until_the_delivery_is_dead(access: Access, database: Database):
    """Attempts are bounded; each leaves its code."""
    box = make_box(access)
    fill(access, box, 1, limit=3)
    sender = answering(Attempted(Code.STATUS_5XX))
    for attempt in (1, 2):
        report = await make_worker(database, sender).run_once()
        assert report is not None
        assert report.counts == Counts(claimed=1, retried=1)
        assert row_of(access, 1) == {
            "stage": "retry",
            "attempt": attempt,
            "attempt_limit": 3,
            "code": Code.STATUS_5XX,
            "waits": True,
        }
        make_all_due(access)
    report = await make_worker(database, sender).run_once()
    assert report is not None
    assert report.counts == Counts(claimed=1, dead=1)
    assert stages(access, box) == {"dead": 1}
    with as_owner(access) as owner:
        assert owner.execute("SELECT attempt, code FROM attempts ORDER BY attempt").fetchall() == [
            (n, Code.STATUS_5XX) for n in (1, 2, 3)
        ]


async def test_a_destination_that_is_gone_is_disabled_and_its_mail_held(access: Access, database: Database):
    """After a 410 nothing more is sent there, and nothing of it is in the workers' way."""
    box, other = make_box(access), make_box(access, "crm")
    fill(access, box, 50)
    fill(access, other, 4)
    sender = answering(Attempted(Code.GONE))
    one = make_worker(database, sender, destination_concurrency=10)
    report = await one.run_once()
    assert report is not None
    assert (report.counts.claimed, report.counts.retried) == (14, 14)
    report = await one.run_once()  # what was known to be due
    assert report is not None
    assert report.counts == Counts()
    assert await one.run_once() is None
    with as_owner(access) as owner:
        assert owner.execute("SELECT DISTINCT lane FROM queue").fetchall() == [("held",)]
        assert owner.execute("SELECT DISTINCT disabled_reason FROM destinations").fetchall() == [("gone",)]


async def test_a_sender_that_fails_is_our_fault(access: Access, database: Database):
    """It is logged without what it said, which may quote a URL or a secret; the delivery is tried again."""
    box = make_box(access)
    fill(access, box, 2)

    async def fail(_mail: Mail) -> Attempted:
        raise ValueError("canary-secret")

    with capture_logs() as logs:
        report = await make_worker(database, FakeSender(fail)).run_once()
    assert report is not None
    assert report.counts == Counts(claimed=2, retried=2)
    assert row_of(access, 1)["code"] == Code.SENDER_FAILED
    assert [entry["event"] for entry in logs] == ["sender_failed"] * 2
    assert "canary" not in str(logs)


async def test_a_turn_that_takes_too_long_is_cut_off_and_handed_back(access: Access, database: Database):
    """What was on its way counts as an attempt and is due again; what is known is settled; nothing stays leased."""
    slow, quick = make_box(access, "slow"), make_box(access, "quick")
    fill(access, slow, 3)
    fill(access, quick, 3)

    async def answer(mail: Mail) -> Attempted:
        if mail.destination == "slow":
            await asyncio.Event().wait()
        return Attempted()

    sender = FakeSender(answer)
    one = make_worker(database, sender)
    turn = asyncio.create_task(one.run_once())
    await until_async(lambda: (len(sender.begun), len(sender.ended)) == (6, 3))
    cut_off(one)
    with pytest.raises(TimeoutError):
        await turn
    assert one.totals == Counts(claimed=6, delivered=3, retried=3)
    assert len(sender.cut) == 3
    assert stages(access, slow, quick) == {"delivered": 3, "retry": 3}
    assert one.out == 0


async def test_a_turn_has_no_more_time_than_it_may_take(access: Access, database: Database):
    """Wherever it is by then: nothing is claimed in a moment that is too short for it."""
    fill(access, make_box(access), 3)
    one = make_worker(database, while_closed(asyncio.Event()), cycle_timeout_s=0.001)
    with pytest.raises(TimeoutError):
        await one.run_once()
    assert one.out == 0


async def test_a_sender_that_does_not_hear_is_left_behind(
    access: Access, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """A turn ends in bounded time whatever a sender does; its lease brings the delivery back."""
    monkeypatch.setattr(out, "CUT_S", 0.05)
    box = make_box(access)
    fill(access, box, 1)
    gate, begun = asyncio.Event(), asyncio.Event()

    async def deaf(_mail: Mail) -> Attempted:
        begun.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        return Attempted()

    one = make_worker(database, FakeSender(deaf))
    turn = asyncio.create_task(one.run_once())
    await begun.wait()
    cut_off(one)
    with pytest.raises(TimeoutError):
        await turn
    assert one.totals == Counts(claimed=1, left=1)
    assert stages(access, box) == {"leased": 1}
    assert one.out == 1
    gate.set()
    await until_async(lambda: one.out == 0)


async def test_what_is_cut_off_while_the_database_is_away_ends_in_bounded_time(
    access: Access, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
):
    """It is left to its leases."""
    monkeypatch.setattr(out, "HAND_BACK_S", 0.1)
    box = make_box(access)
    fill(access, box, 4)
    sender = while_closed(asyncio.Event())
    one = make_worker(faulty, sender)
    turn = asyncio.create_task(one.run_once())
    await until_async(lambda: len(sender.begun) == 4)
    faulty.stuck = asyncio.Event()
    cut_off(one)
    with pytest.raises(TimeoutError):
        await turn
    assert one.totals == Counts(claimed=4, left=4)
    assert stages(access, box) == {"leased": 4}
    assert one.out == 0

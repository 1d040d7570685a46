"""Whose turn it is: fair among tenants, and among the destinations of one."""

from typing import Any

import pytest
from mailing import Box, StillClock, fill, make_box

from fleet import as_owner
from postseal.outbound import scheduler
from postseal.outbound.scheduler import FixedTenants, RoundRobin, TenantScheduler, Turn
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database
from postseal.postgres.turns import Due, due_turns

pytestmark = pytest.mark.anyio


def always(_due: Due) -> bool:
    """There is room."""
    return True


def with_mail(access: Access, tenant: str, *names: str) -> list[Box]:
    """Destinations with one delivery each."""
    boxes = [make_box(access, name, tenant=tenant) for name in names]
    for box in boxes:
        fill(access, box, 1)
    return boxes


async def turns(of: TenantScheduler, count: int) -> list[Turn]:
    """So many turns, after each of which everything may have more."""
    taken: list[Turn] = []
    for _ in range(count):
        turn = await of.next_turn(always)
        assert turn is not None
        taken.append(turn)
        of.done(turn, turn.due)
    return taken


async def test_each_tenant_has_one_turn_then_the_next(access: Access, database: Database, clock: StillClock):
    """However many destinations one of them has."""
    with_mail(access, "acme", "a", "b", "c", "d")
    with_mail(access, "globex", "a")
    with_mail(access, "initech", "a", "b")
    make_box(access, "silent", tenant="umbrella")
    taken = await turns(RoundRobin(database, clock), 6)
    assert [turn.tenant for turn in taken] == ["acme", "globex", "initech"] * 2
    assert [len(turn.due) for turn in taken[:3]] == [4, 1, 2]
    assert taken[0].identity == "tenant-scheduler/acme"


async def test_destinations_of_a_tenant_take_turns(
    access: Access, database: Database, clock: StillClock, monkeypatch: pytest.MonkeyPatch
):
    """Where a turn is for fewer than are due, the others come first next time."""
    monkeypatch.setattr(scheduler, "STREAMS_A_TURN", 2)
    streams = [box.stream for box in with_mail(access, "acme", "a", "b", "c", "d", "e")]
    taken = await turns(RoundRobin(database, clock), 5)
    served = [due.stream for turn in taken for due in turn.due]
    assert served == streams * 2


async def test_who_has_no_room_is_passed_over(access: Access, database: Database, clock: StillClock):
    """A tenant without room does not keep the next one waiting, and keeps its place."""
    acme, globex = with_mail(access, "acme", "a", "b"), with_mail(access, "globex", "a")
    of = RoundRobin(database, clock)
    turn = await of.next_turn(lambda due: due.stream != acme[0].stream)
    assert turn is not None
    assert [due.stream for due in turn.due] == [acme[1].stream]
    turn = await of.next_turn(lambda due: due.tenant != "acme")
    assert turn is not None
    assert [due.stream for due in turn.due] == [globex[0].stream]
    assert await of.next_turn(lambda _due: False) is None
    turn = await of.next_turn(always)
    assert turn is not None
    assert [due.stream for due in turn.due] == [acme[0].stream]
    assert await of.next_turn(always) is None


async def test_new_mail_is_seen_when_nothing_else_is_due_and_within_a_second(
    access: Access, database: Database, clock: StillClock
):
    """Between two looks nobody asks the database: idle looks have a gap, and busy ones LOOK_EVERY_S."""
    of = RoundRobin(database, clock)
    assert await of.next_turn(always) is None
    with_mail(access, "globex", "a")
    assert await of.next_turn(always) is None
    clock.now_s += 2 * scheduler.LOOK_GAP_S
    [first] = await turns(of, 1)
    assert first.tenant == "globex"
    with_mail(access, "acme", "a")
    assert {turn.tenant for turn in await turns(of, 3)} == {"globex"}
    clock.now_s += scheduler.LOOK_EVERY_S
    assert {turn.tenant for turn in await turns(of, 2)} == {"globex", "acme"}


async def test_what_is_used_up_is_gone_until_it_is_seen_again(access: Access, database: Database, clock: StillClock):
    """A turn that found nothing does not come back by itself."""
    with_mail(access, "acme", "a")
    of = RoundRobin(database, clock)
    turn = await of.next_turn(always)
    assert turn is not None
    of.done(turn, ())
    assert await of.next_turn(always) is None
    clock.now_s += 2 * scheduler.LOOK_GAP_S
    assert await of.next_turn(always) is not None


async def test_a_tenant_with_very_many_destinations_hides_nobody(
    access: Access, database: Database, clock: StillClock, monkeypatch: pytest.MonkeyPatch
):
    """In one look all tenants are seen; in some more all of its destinations, though no look reads them all."""
    monkeypatch.setattr(scheduler, "PAGE_STREAMS", 3)
    monkeypatch.setattr(scheduler, "PAGES_A_LOOK", 4)
    many = with_mail(access, "acme", *(f"box-{n:02}" for n in range(17)))
    with_mail(access, "aaa", "a")
    with_mail(access, "zzz", "a")
    of = RoundRobin(database, clock)
    assert [turn.tenant for turn in await turns(of, 3)] == ["aaa", "acme", "zzz"]
    seen: set[int] = set()
    for _ in range(7):
        [turn] = [turn for turn in await turns(of, 3) if turn.tenant == "acme"]
        seen |= {due.stream for due in turn.due}
        clock.now_s += scheduler.LOOK_EVERY_S
    assert seen == {box.stream for box in many}


async def test_what_is_known_to_be_due_is_bounded(
    access: Access, database: Database, clock: StillClock, monkeypatch: pytest.MonkeyPatch
):
    """A worker that cannot keep up does not remember more and more."""
    monkeypatch.setattr(scheduler, "MAX_SEEN_STREAMS", 5)
    monkeypatch.setattr(scheduler, "PAGE_STREAMS", 5)
    monkeypatch.setattr(scheduler, "PAGES_A_LOOK", 1)
    for n in range(20):
        with_mail(access, f"tenant-{n:02}", "a")
    of = RoundRobin(database, clock)
    for _ in range(8):
        clock.now_s += scheduler.LOOK_EVERY_S
        assert await of.next_turn(lambda _due: False) is None
        assert of._turns._streams == 5
    served: set[str] = set()
    for _ in range(8):
        clock.now_s += scheduler.LOOK_EVERY_S
        while turn := await of.next_turn(always):
            served.add(turn.tenant)
            of.done(turn, ())
        assert of._turns._streams <= 5
    assert len(served) == 20


async def test_fixed_tenants_alone_have_turns(access: Access, database: Database, clock: StillClock):
    """A worker of some tenants serves them in turn, and nobody else."""
    for tenant in ("acme", "globex", "initech"):
        with_mail(access, tenant, "a", "b")
    taken = await turns(FixedTenants(database, ["initech", "acme", "nobody"], clock), 4)
    assert [turn.tenant for turn in taken] == ["initech", "acme"] * 2
    assert [len(turn.due) for turn in taken] == [2] * 4


async def test_a_fixed_tenant_with_very_many_destinations_shows_them_all(
    access: Access, database: Database, clock: StillClock, monkeypatch: pytest.MonkeyPatch
):
    """Page after page, look after look."""
    monkeypatch.setattr(scheduler, "PAGE_STREAMS", 3)
    many = with_mail(access, "acme", *(f"box-{n}" for n in range(8)))
    of = FixedTenants(database, ["acme"], clock)
    seen: list[int] = []
    for _ in range(3):
        while turn := await of.next_turn(always):
            seen += [due.stream for due in turn.due]
            of.done(turn, ())
        clock.now_s += scheduler.LOOK_EVERY_S
    assert sorted(seen) == [box.stream for box in many]


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[list[Due]]:
    """The streams of each page that is read from the queue."""
    pages: list[list[Due]] = []

    async def read(connection: Connection, **options: Any) -> list[Due]:
        pages.append(await due_turns(connection, **options))
        return pages[-1]

    monkeypatch.setattr(scheduler, "due_turns", read)
    return pages


async def test_streams_in_backoff_cost_no_look_more_than_its_pages(
    access: Access, database: Database, clock: StillClock, monkeypatch: pytest.MonkeyPatch, walked: list[list[Due]]
):
    """However many wait for a retry; who has something due behind them is served some looks later."""
    monkeypatch.setattr(scheduler, "PAGE_STREAMS", 3)
    monkeypatch.setattr(scheduler, "PAGES_A_LOOK", 2)
    for n in range(20):
        fill(access, make_box(access, f"box-{n:02}", tenant=f"tenant-{n % 5}"), 1, stage="retry", due_in_s=3600)
    with_mail(access, "zzz", "a")
    of = RoundRobin(database, clock)
    turn = None
    for looks in range(1, 6):
        turn = await of.next_turn(always)
        assert len(walked) == 2 * looks
        if turn is not None:
            break
        clock.now_s += 2 * scheduler.LOOK_GAP_S
    assert turn is not None
    assert turn.tenant == "zzz"
    assert max(len(page) for page in walked) == 3


async def test_fixed_tenants_walk_over_nobody_elses_streams(
    access: Access, database: Database, clock: StillClock, walked: list[list[Due]]
):
    """Also where their own have nothing."""
    for tenant in ("acme", "globex", "initech"):
        with_mail(access, tenant, "a", "b")
    of = FixedTenants(database, ["globex", "nobody"], clock)
    await turns(of, 1)
    assert {due.tenant for page in walked for due in page} == {"globex"}


async def test_a_snapshot_that_stays_open_keeps_nobody_from_turns(
    access: Access, database: Database, clock: StillClock, monkeypatch: pytest.MonkeyPatch, walked: list[list[Due]]
):
    """The queue then takes too long to read: for a while turns go to whoever has mail pending."""
    monkeypatch.setattr("postseal.postgres.turns.LOOK_TIMEOUT", "1ms")
    [gone] = with_mail(access, "acme", "a")
    fill(access, gone, 30_000)
    backing_off = make_box(access, "b", tenant="acme")
    fill(access, backing_off, 1, stage="retry", due_in_s=3600)
    make_box(access, "silent", tenant="acme")
    make_box(access, "device-01", tenant="acme", mode="pull")
    [due] = with_mail(access, "globex", "a")
    of = RoundRobin(database, clock)
    with as_owner(access) as snapshot, snapshot.transaction():
        snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT FROM queue LIMIT 1")
        with as_owner(access) as owner:
            owner.execute("DELETE FROM queue WHERE stream = %s", [gone.stream])
            owner.execute("UPDATE destination_health SET settled = 30001 WHERE stream = %s", [gone.stream])
        taken = await turns(of, 2)
        assert [[each.stream for each in turn.due] for turn in taken] == [[backing_off.stream], [due.stream]]
        assert walked == []
        monkeypatch.setattr("postseal.postgres.turns.LOOK_TIMEOUT", "1min")
        clock.now_s += scheduler.LOOK_EVERY_S
        await turns(of, 2)
        assert walked == []
    clock.now_s += scheduler.BY_PENDING_S
    await turns(of, 1)
    assert len(walked) == 1

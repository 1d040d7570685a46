"""Held mail, and which streams have something due."""

from collections.abc import Awaitable, Callable

import pytest
from orders import Place, empty, place, settled, transact, transact_in_loop

from postseal.postgres.access import Access
from postseal.postgres.backlog import read_outbound_backlog
from postseal.postgres.database import Part
from postseal.postgres.destinations import Mode
from postseal.postgres.lanes import hold, misplaced, unhold
from postseal.postgres.transaction import Connection
from postseal.postgres.turns import END, LAST_STREAM, START, Due, Position, due_turns, pending_turns
from postseal.rules.delivery import Code, Verdict


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


ROLES = [Part.DELIVERY, Part.ADMIN]


Step = Callable[[Connection, str, int, int], Awaitable[int]]


def moved(orders: Place, step: Step, part: Part = Part.DELIVERY, limit: int = 1000) -> int:
    """Hold or let go so many."""

    async def work(connection: Connection) -> int:
        return await step(connection, orders.tenant, orders.stream, limit)

    return transact(orders.access, work, part)


@pytest.mark.parametrize("part", ROLES)
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_held_mail_comes_back(access: Access, part: Part, mode: Mode):
    """In bounded steps, until nothing is left to move; then each can be claimed once more."""
    orders = place(access, mode=mode)
    orders.seal(5)
    assert moved(orders, hold, part) == 0  # it is enabled
    orders.disable()
    assert moved(orders, unhold, part) == 0
    assert [moved(orders, hold, part, limit=2) for _ in range(4)] == [2, 2, 1, 0]
    assert orders.rows("DISTINCT lane", "queue", "lane") == [("held",)]
    orders.enable()
    assert orders.claim(lane=mode).leases == []
    assert [moved(orders, unhold, part, limit=3) for _ in range(3)] == [3, 2, 0]
    assert len(orders.claim(lane=mode).leases) == 5


def test_held_mail_is_due_anew(access: Access):
    """A claim that goes on from a mark finds it; what waits for a retry goes on waiting, and expiries hold."""
    orders = place(access)
    orders.seal(3)
    later = orders.claim(fresh=1).leases[0]
    orders.settle(settled(later, Verdict.RETRY, Code.STATUS_5XX, delay_s=3600))
    mark = orders.claim(fresh=1).marks[orders.stream]
    orders.disable()
    moved(orders, hold)
    orders.make_due()
    orders.as_owner("UPDATE queue SET due_at = now() - interval '1 day' WHERE sequence = 3")
    orders.as_owner("UPDATE queue SET due_at = now() + interval '1 hour' WHERE sequence = 1")
    orders.enable()
    moved(orders, unhold)
    assert [lease.sequence for lease in orders.claim(since=mark.since).leases] == [3]


def test_a_lease_outlives_the_holding(access: Access):
    """Whoever has it settles it; a retry of it is then held."""
    orders = place(access)
    orders.seal(2)
    first, second = orders.claim().leases
    orders.disable()
    assert moved(orders, hold) == 2
    assert orders.settle(settled(first, Verdict.DELIVERED), settled(second, Verdict.RETRY, Code.GONE)) == set()
    assert orders.rows("lane, stage", "queue") == [("held", "retry")]


def test_what_was_left_held_is_found(access: Access):
    """Whoever enabled a destination and was cut off: another one lets its mail go."""
    places = [place(access, f"destination-{n}", tenant=f"tenant-{n}") for n in range(3)]
    for each in places:
        each.disable()
        each.seal(2)
    for each in places[1:]:
        each.enable()

    async def work(connection: Connection) -> None:
        left = [(each.tenant, each.stream) for each in places[1:]]
        assert await misplaced(connection, limit=5) == left
        assert await misplaced(connection, limit=1) == left[:1]
        assert await unhold(connection, *left[0]) == 2
        assert await misplaced(connection, limit=5) == left[1:]

    transact(access, work)


def test_nothing_is_enabled_or_disabled_while_it_is_moved(access: Access):
    """So that no mail stays in the wrong lane: the step sees the destination as it is until it commits."""
    orders = place(access)
    orders.seal()
    orders.disable()

    async def work(connection: Connection) -> bool:
        await hold(connection, "acme", orders.stream)

        async def locked(other: Connection) -> bool:
            cursor = await other.execute(
                "SELECT FROM destinations WHERE stream = %s FOR NO KEY UPDATE SKIP LOCKED", [orders.stream]
            )
            return cursor.rowcount == 0

        return await transact_in_loop(access, locked)

    assert transact(access, work)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_what_was_left_in_its_lane_is_found(access: Access, mode: Mode):
    """Whoever disabled a destination and was cut off: another one holds its mail. One without mail is left alone."""
    left, empty_one, enabled = (place(access, f"destination-{n}", mode=mode) for n in range(3))
    for each in (left, enabled):
        each.seal(2)
    for each in (left, empty_one):
        each.disable()

    async def work(connection: Connection) -> None:
        assert await misplaced(connection, limit=5) == [("acme", left.stream)]
        assert await hold(connection, "acme", left.stream) == 2
        assert await misplaced(connection, limit=5) == []

    transact(access, work)


def test_what_a_disabled_destination_keeps_back_is_not_overdue(access: Access):
    """Also where it was not moved out of the workers' index."""
    orders, others = place(access), place(access, "others")
    for each in (orders, others):
        each.seal()
        each.as_owner("UPDATE queue SET due_at = now() - interval '1 hour' WHERE stream = %(stream)s")
    orders.disable()
    others.as_owner("UPDATE queue SET due_at = now() - interval '1 minute' WHERE stream = %(stream)s")
    backlog = transact(access, read_outbound_backlog)
    assert 60 <= backlog.overdue_s < 3000


def walked(
    access: Access, after: Position = START, through: Position = END, limit: int = 100, *, lane: Mode = "push"
) -> list[Due]:
    """The streams that have mail in the lane, with what of it is due."""

    async def work(connection: Connection) -> list[Due]:
        return await due_turns(connection, lane=lane, after=after, through=through, limit=limit)

    return transact(access, work)


def due(access: Access, *, lane: Mode = "push") -> list[Due]:
    """What is due."""
    return [each for each in walked(access, lane=lane) if each.fresh_due or each.retries_due]


def pending(access: Access, after: Position = START, through: Position = END, *, lane: Mode = "push") -> list[int]:
    """The streams that have mail pending."""

    async def work(connection: Connection) -> list[Due]:
        return await pending_turns(connection, lane=lane, after=after, through=through, limit=100)

    return [each.stream for each in transact(access, work) if each.fresh_due or each.retries_due]


def test_streams_with_something_due_are_found(access: Access):
    """First attempts, retries and ended leases are told apart; what waits, is out, pulled or disabled is not due."""
    names = ["fresh", "retried", "ended", "both", "later", "out", "disabled", "empty"]
    places = {name: place(access, name) for name in names}
    device = place(access, "device-01", mode="pull")
    device.seal()
    for name in names[:-1]:
        places[name].seal()
    for name in ("retried", "both"):
        places[name].settle(settled(places[name].lease(), Verdict.RETRY, Code.STATUS_5XX))
    places["both"].seal()
    places["later"].settle(settled(places["later"].lease(), Verdict.RETRY, Code.STATUS_5XX, delay_s=60))
    for name in ("ended", "out"):
        places[name].lease()
    places["ended"].end_leases()
    places["disabled"].disable()
    assert due(access) == [
        Due("acme", places["fresh"].stream, fresh_due=True, retries_due=False),
        Due("acme", places["retried"].stream, fresh_due=False, retries_due=True),
        Due("acme", places["ended"].stream, fresh_due=False, retries_due=True),
        Due("acme", places["both"].stream, fresh_due=True, retries_due=True),
    ]
    assert due(access, lane="pull") == [Due("acme", device.stream, fresh_due=True, retries_due=False)]


def test_streams_are_found_in_pages(access: Access):
    """By tenant and stream, each once."""
    places = [place(access, f"destination-{n}", tenant=f"tenant-{n % 2}") for n in range(5)]
    for each in places:
        each.seal(2)
    expected = sorted((each.tenant, each.stream) for each in places)
    pages: list[tuple[str, int]] = []
    after = START
    while page := walked(access, after, limit=2):
        pages += [(each.tenant, each.stream) for each in page]
        after = pages[-1]
    assert pages == expected


def test_streams_are_found_within_bounds(access: Access):
    """Of one tenant alone, behind where the last page ended; and as many as are asked for, due or not."""
    places = [place(access, f"destination-{n}", tenant=f"tenant-{n % 2}") for n in range(6)]
    for each in places:
        each.seal()
    mine = sorted(each.stream for each in places if each.tenant == "tenant-0")
    bounds = ("tenant-0", mine[0]), ("tenant-0", LAST_STREAM)
    assert [each.stream for each in walked(access, *bounds)] == mine[1:]
    assert pending(access, *bounds) == mine[1:]
    for each in places[:4]:
        each.disable()
    assert [(each.fresh_due, each.retries_due) for each in walked(access, limit=1)] == [(False, False)]


def test_what_is_pending_is_told_without_the_queue(access: Access):
    """Waiting for a retry or out, until it is settled; not of a disabled destination, and not of another lane."""
    names = ["fresh", "later", "out", "delivered", "disabled", "empty"]
    places = {name: place(access, name) for name in names}
    device = place(access, "device-01", mode="pull")
    for each in [*(places[name] for name in names[:-1]), device]:
        each.seal()
    places["later"].settle(settled(places["later"].lease(), Verdict.RETRY, Code.STATUS_5XX, delay_s=60))
    places["out"].lease()
    places["delivered"].settle(settled(places["delivered"].lease(), Verdict.DELIVERED))
    places["disabled"].disable()
    assert pending(access) == [places[name].stream for name in ("fresh", "later", "out")]
    assert pending(access, lane="pull") == [device.stream]

"""Dead letters: pages of a project, and how they go out again."""

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from orders import Place, delivered, empty, moment, place, require_whole, settled, transact

from postseal.postgres.access import Access
from postseal.postgres.database import Part
from postseal.postgres.dead_letters import DeadFilter, DeadLetter, Position, count, page, redrive_one, redrive_some
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code, Verdict


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


ALL = DeadFilter()


def listed(
    access: Access,
    wanted: DeadFilter = ALL,
    *,
    tenant: str = "acme",
    project: str = "apollo",
    after: Position | None = None,
    rows: int = 100,
) -> list[DeadLetter]:
    """One page, as an administrator sees it."""

    async def work(connection: Connection) -> list[DeadLetter]:
        letters = await page(connection, tenant, project, wanted, after=after, rows=rows)
        assert await count(connection, tenant, project, wanted, at_most=1000) >= len(letters)
        return letters

    return transact(access, work, Part.ADMIN)


def redriven(access: Access, wanted: DeadFilter = ALL, *, project: str = "apollo", **bounds: int) -> int:
    """Redrive some, as an administrator."""

    async def work(connection: Connection) -> int:
        return await redrive_some(connection, "acme", project, wanted, **{"budget": 2} | bounds)

    return transact(access, work, Part.ADMIN)


def redrive(orders: Place, delivery: UUID, *, project: str = "apollo", budget: int = 2) -> bool:
    """Redrive one, as an administrator."""

    async def work(connection: Connection) -> bool:
        return await redrive_one(connection, orders.tenant, project, delivery, budget=budget)

    return transact(orders.access, work, Part.ADMIN)


def age(orders: Place, **minutes_by_sequence: int) -> None:
    """Let dead letters be so many minutes old."""
    for sequence, minutes in minutes_by_sequence.items():
        orders.as_owner(
            f"UPDATE settlements SET settled_at = clock_timestamp() - interval '{minutes} minutes' "  # noqa: S608
            f"WHERE stream = %(stream)s AND sequence = {sequence.removeprefix('s')}"
        )


def test_a_dead_letter_tells_why_and_no_more(access: Access):
    """Its destination, code and attempts; never a payload."""
    orders = place(access)
    expires_at_ms = int(moment(access, 3600).timestamp() * 1000)
    [delivery] = orders.kill(code=Code.STATUS_4XX, expires_at_ms=expires_at_ms)
    [letter] = listed(access)
    assert letter == DeadLetter(
        delivery,
        "orders",
        1,
        letter.event_identity,
        "status_4xx",
        1,
        3,
        letter.sealed_at,
        letter.expires_at,
        letter.settled_at,
        Position(letter.settled_at, orders.stream, 1),
    )
    assert orders.rows("event_identity, sealed_at, expires_at", "deliveries") == [
        (letter.event_identity, letter.sealed_at, letter.expires_at)
    ]
    assert letter.expires_at is not None


def test_only_dead_letters_of_the_project_are_listed(access: Access):
    """No other tenant's, no other project's, nothing that is alive or ended otherwise."""
    orders = place(access)
    orders.kill()
    orders.seal(2)
    orders.settle(*delivered(orders.claim(fresh=1).leases))
    place(access, tenant="other").kill()
    place(access, project="gemini").kill(2)
    assert [letter.sequence for letter in listed(access)] == [1]
    assert len(listed(access, project="gemini")) == 2
    assert listed(access, project="mercury") == listed(access, tenant="nobody") == []


def test_pages_go_on_where_the_last_ended(access: Access):
    """The earliest given up first, of all destinations together or of one; each letter once."""
    orders, others = place(access), place(access, "others")
    orders.kill(3)
    others.kill(3)
    age(orders, s1=30, s2=10, s3=10)
    age(others, s1=20, s2=10, s3=5)
    orders.as_owner("UPDATE settlements SET settled_at = date_trunc('minute', settled_at)")
    expected = [("orders", 1), ("others", 1), ("orders", 2), ("orders", 3), ("others", 2), ("others", 3)]
    for wanted, names in ((ALL, {"orders", "others"}), (DeadFilter(destination="others"), {"others"})):
        letters: list[DeadLetter] = []
        while part := listed(access, wanted, after=letters[-1].position if letters else None, rows=2):
            assert len(part) <= 2
            letters += part
        assert [(letter.destination, letter.sequence) for letter in letters] == [
            each for each in expected if each[0] in names
        ]


def test_a_page_has_at_most_a_hundred(access: Access):
    """Whatever is asked for."""
    orders = place(access)
    orders.kill(100)
    orders.kill(1)
    assert len(listed(access, rows=1000)) == 100

    async def work(connection: Connection) -> list[int]:
        return [await count(connection, "acme", "apollo", ALL, at_most=most) for most in (10, 1000)]

    assert transact(access, work, Part.ADMIN) == [10, 101]


def test_filters(access: Access):
    """Destination, code and time, in any combination; counting agrees with the pages."""
    orders, others = place(access), place(access, "others")
    for each, codes in ((orders, (Code.STATUS_5XX, Code.STATUS_4XX)), (others, (Code.STATUS_4XX, Code.STATUS_5XX))):
        for code in codes:
            each.kill(code=code)
        age(each, s1=10, s2=0)
    middle = moment(access, -300)
    expected: list[tuple[dict[str, Any], list[tuple[str, int]]]] = [
        ({"destination": "orders"}, [("orders", 1), ("orders", 2)]),
        ({"destination": "nothing"}, []),
        ({"code": "status_4xx"}, [("orders", 2), ("others", 1)]),
        ({"code": "status_4xx", "destination": "others"}, [("others", 1)]),
        ({"since": middle}, [("orders", 2), ("others", 2)]),
        ({"until": middle}, [("orders", 1), ("others", 1)]),
        ({"until": middle, "destination": "others"}, [("others", 1)]),
        ({"since": middle, "until": middle}, []),
        ({"until": middle, "destination": "others", "code": "status_5xx"}, []),
    ]
    for members, names in expected:
        wanted = DeadFilter(**members)
        assert sorted((letter.destination, letter.sequence) for letter in listed(access, wanted)) == names

        async def work(connection: Connection, wanted: DeadFilter = wanted) -> int:
            return await count(connection, "acme", "apollo", wanted, at_most=10)

        assert transact(access, work, Part.ADMIN) == len(names)


def test_since_is_in_and_until_is_out(access: Access):
    """So that two periods that touch share no letter."""
    place(access).kill()
    [letter] = listed(access)
    assert listed(access, DeadFilter(since=letter.settled_at)) == [letter]
    assert listed(access, DeadFilter(until=letter.settled_at)) == []


def test_a_redriven_letter_is_tried_again(access: Access):
    """At once, up to a new budget; its attempts go on counting and its history stays."""
    orders = place(access)
    [delivery] = orders.kill(attempt_limit=1)
    assert redrive(orders, delivery)
    assert listed(access) == []
    require_whole(access)
    lease = orders.lease(fresh=0)
    assert (lease.delivery, lease.attempt, lease.attempt_limit) == (delivery, 2, 3)
    orders.settle(settled(lease, Verdict.DEAD, Code.STATUS_4XX))
    assert orders.rows("attempt, code", "attempts") == [(1, "status_5xx"), (2, "status_4xx")]
    assert redrive(orders, delivery, budget=5)
    assert (orders.lease().attempt_limit) == 7
    require_whole(access)


def test_a_worker_from_before_the_redrive_is_fenced(access: Access):
    """Neither its attempt nor its token is the delivery's any more."""
    orders = place(access)
    [delivery] = orders.seal(1)
    old = orders.lease()
    orders.settle(settled(old, Verdict.DEAD, Code.STATUS_5XX))
    redrive(orders, delivery)
    assert orders.settle(settled(old, Verdict.DELIVERED)) == {(orders.stream, 1)}
    new = orders.lease()
    assert orders.settle(settled(old, Verdict.DELIVERED)) == {(orders.stream, 1)}
    assert orders.settle(settled(new, Verdict.DELIVERED)) == set()


def test_only_what_is_dead_is_redriven(access: Access):
    """Of this tenant and project, and once."""
    orders = place(access)
    other = place(access, tenant="other")
    [dead] = orders.kill()
    [ended, alive] = orders.seal(2)
    orders.settle(*delivered(orders.claim(fresh=1).leases))
    for delivery in (ended, alive, uuid4()):
        assert not redrive(orders, delivery)
    assert not redrive(orders, dead, project="gemini")
    assert not redrive(other, dead)
    assert redrive(orders, dead)
    assert not redrive(orders, dead)
    require_whole(access)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_lane_is_the_destinations_at_that_time(access: Access, mode: Any):
    """Held if it is disabled."""
    enabled, disabled = place(access, "enabled", mode=mode), place(access, "disabled", mode=mode)
    for each in (enabled, disabled):
        each.seal()
        each.settle(settled(each.lease(lane=mode), Verdict.DEAD, Code.REJECTED))
    disabled.disable()
    assert redriven(access) == 2
    assert (enabled.rows("lane", "queue"), disabled.rows("lane", "queue")) == ([(mode,)], [("held",)])


def test_an_expiry_outlives_the_redrive(access: Access):
    """Nothing is sent after the time that its sender set."""
    orders = place(access)
    [delivery] = orders.kill(expires_at_ms=int(moment(access, 3600).timestamp() * 1000))
    orders.as_owner("UPDATE deliveries SET expires_at = clock_timestamp() - interval '1 second'")
    assert redrive(orders, delivery)
    assert orders.rows("due_at = expires_at", "queue") == [(True,)]
    claimed = orders.claim()
    assert (claimed.leases, claimed.ended) == ([], 1)
    assert orders.rows("state", "settlements") == [("expired",)]


def test_a_filter_is_redriven_in_bounded_steps(access: Access):
    """The earliest first, until there is nothing left."""
    orders, others = place(access), place(access, "others")
    orders.kill(5)
    others.kill(3)
    age(orders, s1=1, s2=5, s3=4, s4=3, s5=2)
    wanted = DeadFilter(destination="orders")
    assert redriven(access, wanted, limit=2) == 2
    assert orders.rows("sequence", "queue") == [(2,), (3,)]
    assert [redriven(access, wanted, limit=2) for _ in range(3)] == [2, 1, 0]
    assert len(listed(access)) == 3
    assert redriven(access, replace(ALL, code="dns_failed")) == 0
    assert redriven(access, project="gemini") == 0
    assert redriven(access) == 3
    require_whole(access)

"""One delivery: why it was not sent yet, and how it is taken back."""

import asyncio
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from orders import Place, empty, moment, place, require_whole, seal, settled, transact, transact_in_loop

from fleet import as_owner
from postseal.postgres.access import Access
from postseal.postgres.database import Part
from postseal.postgres.dead_letters import redrive_one
from postseal.postgres.intents import drop_intents, take_intents
from postseal.postgres.mail import (
    Cancelled,
    FailedAttempt,
    ShownDelivery,
    ShownIntent,
    cancel,
    list_intents,
    show,
    show_intent,
)
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code, State, Verdict


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


ROLES = [Part.DELIVERY, Part.ADMIN]


def shown(orders: Place, delivery: UUID) -> ShownDelivery:
    """One delivery, the same for each role that may see it."""

    async def work(connection: Connection) -> ShownDelivery | None:
        return await show(connection, orders.tenant, delivery)

    found = [transact(orders.access, work, part) for part in ROLES]
    assert found[0] is not None
    assert found[0] == found[1]
    return found[0]


def cancelled(orders: Place, delivery: UUID, *, project: str = "apollo", part: Part = Part.ADMIN) -> Cancelled:
    """Try to cancel one."""

    async def work(connection: Connection) -> Cancelled:
        return await cancel(connection, orders.tenant, project, delivery)

    return transact(orders.access, work, part)


def test_a_pending_delivery_tells_when_it_is_due(access: Access):
    """And all its names."""
    orders = place(access)
    [delivery] = orders.seal(1, expires_at_ms=int(moment(access, 3600).timestamp() * 1000))
    one = shown(orders, delivery)
    assert (one.delivery, one.project, one.destination, one.stream, one.sequence) == (
        delivery,
        "apollo",
        "orders",
        orders.stream,
        1,
    )
    assert [(one.event_id, one.idempotency_key, one.event_identity, one.sealed_at, one.expires_at)] == orders.rows(
        "event_id, idempotency_key, event_identity, sealed_at, expires_at", "deliveries"
    )
    assert (one.state, one.code, one.attempt, one.attempt_limit) == (State.PENDING, None, 0, 3)
    assert [(one.due_at,)] == orders.rows("due_at", "queue")
    assert (one.lease_ends, one.settled_at, one.attempts) == (None, None, [])
    assert (one.mode, one.destination_disabled_at, one.destination_failing_since) == ("push", None, None)


def test_a_delivery_that_is_out_tells_until_when(access: Access):
    """After that it is pending again, before anybody has claimed it."""
    orders = place(access)
    [delivery] = orders.seal()
    lease = orders.lease()
    one = shown(orders, delivery)
    assert (one.state, one.lease_ends, one.due_at, one.attempt) == (State.DELIVERING, lease.lease_ends, None, 1)
    orders.end_leases()
    assert shown(orders, delivery).state is State.PENDING


def test_failed_attempts_are_told_with_their_codes(access: Access):
    """Oldest first; and how the destination fares."""
    orders = place(access)
    [delivery] = orders.seal()
    for code in (Code.DNS_FAILED, Code.TLS_FAILED):
        orders.settle(settled(orders.lease(), Verdict.RETRY, code))
    one = shown(orders, delivery)
    assert [(failed.attempt, failed.code) for failed in one.attempts] == [(1, "dns_failed"), (2, "tls_failed")]
    assert isinstance(one.attempts[0], FailedAttempt)
    assert moment(access) - one.attempts[0].ended_at < timedelta(minutes=1)
    assert (one.code, one.destination_last_code) == ("tls_failed", "tls_failed")
    assert one.destination_failing_since is not None
    orders.disable()
    one = shown(orders, delivery)
    assert one.destination_disabled_at is not None
    assert one.destination_disabled_reason == "operator"


def test_the_last_hundred_attempts_are_told(access: Access):
    """Redrives can make more of them."""
    orders = place(access)
    [delivery] = orders.seal()
    orders.as_owner(
        "INSERT INTO attempts SELECT 'acme', %(stream)s, 1, n, now(), 'x' FROM generate_series(1, 120) AS n"
    )
    assert [failed.attempt for failed in shown(orders, delivery).attempts] == list(range(21, 121))


def test_an_ended_delivery_tells_how_and_when(access: Access):
    """Delivered, dead, expired by its time alone, cancelled."""
    orders = place(access)
    deliveries = [orders.seal()[0]]
    orders.settle(settled(orders.lease(), Verdict.DELIVERED))
    deliveries += orders.kill(code=Code.REJECTED)
    deliveries += orders.seal()
    cancelled(orders, deliveries[-1])
    deliveries += orders.seal(1, expires_at_ms=int(moment(access, -1).timestamp() * 1000))
    ends = [shown(orders, delivery) for delivery in deliveries]
    assert [(one.state, one.code, one.attempt) for one in ends] == [
        (State.DELIVERED, None, 1),
        (State.DEAD, "rejected", 1),
        (State.CANCELLED, None, 0),
        (State.EXPIRED, None, 0),
    ]
    assert [one.settled_at is not None for one in ends] == [True, True, True, False]
    assert [one.due_at for one in ends] == [None] * 4


def test_nothing_is_shown_to_another_tenant(access: Access):
    """Nor what was never sealed."""
    orders, other = place(access), place(access, tenant="other")
    [delivery] = orders.seal()

    async def work(connection: Connection) -> None:
        assert await show(connection, other.tenant, delivery) is None
        assert await show(connection, orders.tenant, uuid4()) is None
        assert await show_intent(connection, orders.tenant, delivery) is None

    transact(access, work)


def leave(access: Access, **columns: str) -> UUID:
    """An intent of acme for the orders of apollo, as if an application had left it."""
    delivery = uuid4()
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO intents (tenant, delivery, project, destination, idempotency_key, data, code, due_at) "
            "VALUES ('acme', %s, %s, 'orders', 'key:0001', '{}', %s, %s)",
            [delivery, columns.get("project", "apollo"), columns.get("code"), columns.get("due_at", "now")],
        )
    return delivery


@pytest.mark.parametrize("part", ROLES)
def test_an_intent_tells_why_it_waits(access: Access, part: Part):
    """To each role that may see it, of this tenant."""
    place(access)
    delivery = leave(access, code="destination_full")

    async def work(connection: Connection) -> ShownIntent | None:
        assert await show_intent(connection, "other", delivery) is None
        return await show_intent(connection, "acme", delivery)

    intent = transact(access, work, part)
    assert intent is not None
    assert (intent.delivery, intent.project, intent.destination, intent.idempotency_key, intent.tries, intent.code) == (
        delivery,
        "apollo",
        "orders",
        "key:0001",
        0,
        "destination_full",
    )


def test_intents_are_listed(access: Access):
    """Of one project, oldest first, all or those of a code; one that is given up has no time at which it is due."""
    place(access)
    first, second = leave(access), leave(access, code="expired", due_at="infinity")
    leave(access, project="gemini", code="expired")

    async def work(connection: Connection) -> None:
        found = await list_intents(connection, "acme", "apollo", code=None, limit=2)
        assert [(each.delivery, each.code, each.due_at is None) for each in found] == [
            (first, None, False),
            (second, "expired", True),
        ]
        assert await list_intents(connection, "acme", "apollo", code="expired", limit=2) == found[1:]
        assert await list_intents(connection, "acme", "apollo", code=None, limit=1) == found[:1]
        assert await list_intents(connection, "other", "apollo", code=None, limit=2) == []
        assert await show_intent(connection, "acme", second) == found[1]

    transact(access, work, Part.ADMIN)


@pytest.mark.parametrize("part", ROLES)
def test_a_pending_delivery_is_cancelled(access: Access, part: Part):
    """Fresh, waiting for a retry, held, or out under a lease that ended: it is never sent any more."""
    orders = place(access)
    deliveries = orders.seal(3)
    ended = orders.claim(fresh=1).leases[0]
    orders.settle(settled(orders.claim(fresh=1).leases[0], Verdict.RETRY, Code.STATUS_5XX))
    orders.end_leases()
    assert [cancelled(orders, delivery, part=part) for delivery in deliveries] == [Cancelled.CANCELLED] * 3
    assert orders.claim().leases == []
    assert orders.settle(settled(ended, Verdict.DELIVERED)) == {(orders.stream, 1)}
    assert [state for (state,) in orders.rows("state", "settlements")] == ["cancelled"] * 3
    require_whole(access)


def test_what_is_out_cannot_be_cancelled(access: Access):
    """It may have been received already; its worker is not disturbed."""
    orders = place(access)
    [delivery] = orders.seal()
    lease = orders.lease()
    assert cancelled(orders, delivery) is Cancelled.DELIVERING
    assert orders.settle(settled(lease, Verdict.DELIVERED)) == set()
    assert cancelled(orders, delivery) is Cancelled.SETTLED


def test_what_has_expired_is_settled_so(access: Access):
    """A cancellation that came too late does not hide it."""
    orders = place(access)
    [delivery] = orders.seal(1, expires_at_ms=int(moment(access, -1).timestamp() * 1000))
    assert cancelled(orders, delivery) is Cancelled.EXPIRED
    assert orders.rows("state", "settlements") == [("expired",)]
    require_whole(access)


def test_nothing_else_is_cancelled(access: Access):
    """No other project's or tenant's, and nothing that is unknown."""
    orders, other = place(access), place(access, tenant="other")
    [delivery] = orders.seal()
    intent = leave(access)
    assert cancelled(orders, uuid4()) is Cancelled.UNKNOWN
    for each in (delivery, intent):
        assert cancelled(orders, each, project="gemini") is Cancelled.UNKNOWN
        assert cancelled(other, each) is Cancelled.UNKNOWN
    assert orders.lease().delivery == delivery


@pytest.mark.parametrize("part", ROLES)
@pytest.mark.parametrize("due_at", ["now", "infinity"], ids=["due", "given up"])
def test_an_intent_is_cancelled(access: Access, part: Part, due_at: str):
    """It is never sealed; a second time there is nothing."""
    orders = place(access)
    intent = leave(access, due_at=due_at)
    assert cancelled(orders, intent, part=part) is Cancelled.INTENT_CANCELLED
    assert cancelled(orders, intent, part=part) is Cancelled.UNKNOWN


def test_an_intent_that_is_being_sealed_is_cancelled_as_a_delivery(access: Access):
    """The cancellation waits for the sealer, and finds what it made."""
    orders = place(access)
    intent = leave(access)

    async def work(connection: Connection) -> Cancelled:
        async def sealer(other: Connection) -> None:
            [taken] = await take_intents(other, "acme", limit=1)
            waiting.set()
            await waits_behind(other)
            await seal(other, orders, 1, delivery=taken.delivery)
            await drop_intents(other, "acme", [taken.delivery])

        waiting = asyncio.Event()
        sealing = asyncio.create_task(transact_in_loop(access, sealer))
        await waiting.wait()
        outcome = await cancel(connection, "acme", "apollo", intent)
        await sealing
        return outcome

    assert transact(access, work) is Cancelled.CANCELLED
    require_whole(access)


async def waits_behind(connection: Connection) -> None:
    """Return as soon as somebody waits for a lock of this connection's."""
    waiting = "SELECT FROM pg_locks l WHERE NOT l.granted AND %s = ANY (pg_blocking_pids(l.pid))"
    while (await connection.execute(waiting, [connection.info.backend_pid])).rowcount == 0:
        pass


def test_a_cancelled_letter_is_not_redriven(access: Access):
    """Only what is dead is."""
    orders = place(access)
    [delivery] = orders.seal()
    cancelled(orders, delivery)

    async def work(connection: Connection) -> bool:
        return await redrive_one(connection, "acme", "apollo", delivery, budget=1)

    assert not transact(access, work, Part.ADMIN)

"""Sequences are given out without holes, a key brings one delivery, intents wait for their sealer."""

import asyncio
import random
from uuid import UUID, uuid4

import pytest
from orders import (
    Place,
    empty,
    moment,
    place,
    require_whole,
    seal,
    sealed_row,
    settled,
    transact,
    transact_in_loop,
)
from psycopg import errors

from fleet import as_owner
from postseal.errors import Unavailable
from postseal.postgres.access import Access
from postseal.postgres.mail import cancel
from postseal.postgres.sealed import Found, SealedNames, find_sealed
from postseal.postgres.sealing import (
    Locked,
    LockedDestination,
    SealedRow,
    insert_sealed,
    lock_destinations,
)
from postseal.postgres.signing_keys import SigningKey, find_active, list_signing
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code, State, Verdict


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


def lock(access: Access, tenant: str, *names: tuple[str, str]) -> Locked:
    """Lock destinations for a moment."""

    async def work(connection: Connection) -> Locked:
        return await lock_destinations(connection, tenant, names)

    return transact(access, work)


def test_a_lock_tells_where_each_destination_stands(access: Access):
    """By project and name, in one look; what does not exist is not there."""
    orders, device = place(access), place(access, "device-01", project="gemini", mode="pull", max_pending=7)
    orders.seal(3)
    orders.settle(settled(orders.lease(fresh=1), Verdict.DELIVERED))
    device.disable()
    names = [("apollo", "orders"), ("gemini", "device-01"), ("gemini", "orders"), ("apollo", "orders")]
    locked = lock(access, "acme", *names)
    assert locked.destinations == {
        ("apollo", "orders"): LockedDestination(orders.stream, "push", False, 3, 2, 1000),  # noqa: FBT003
        ("gemini", "device-01"): LockedDestination(device.stream, "pull", True, 0, 0, 7),  # noqa: FBT003
    }
    assert [each.lane for each in locked.destinations.values()] == ["push", "held"]
    assert lock(access, "other", *names).destinations == {}


def test_a_lock_tells_the_databases_time(access: Access):
    """In whole milliseconds, also where there is no destination."""
    before = moment(access).timestamp() * 1000
    assert before - 1 < lock(access, "acme").now_ms <= moment(access).timestamp() * 1000


def test_sequences_have_no_holes_whoever_seals(access: Access, seed: int):
    """Many at once, each in several destinations and in its own order of names: none waits in a circle."""
    chance = random.Random(seed)
    places = [place(access, f"destination-{n}") for n in range(4)]

    async def enqueue() -> None:
        async def work(connection: Connection) -> None:
            mine = chance.sample(places, 3)
            locked = await lock_destinations(connection, "acme", [(each.project, each.name) for each in mine])
            rows = [
                sealed_row(each, locked.destinations[each.project, each.name].highest + number)
                for each in mine
                for number in range(1, chance.randint(1, 4))
            ]
            if rows:
                await insert_sealed(connection, "acme", rows)

        for _ in range(10):
            await transact_in_loop(access, work)

    async def together() -> None:
        await asyncio.gather(*(enqueue() for _ in range(6)))

    asyncio.run(together())
    require_whole(access)
    for each in places:
        sequences = [sequence for (sequence,) in each.rows("sequence", "deliveries")]
        assert sequences == list(range(1, len(sequences) + 1))


@pytest.mark.parametrize("sequences", [(2,), (1, 3), (0,), (1, 1)])
def test_a_hole_is_never_written(access: Access, sequences: tuple[int, ...]):
    """Whatever the caller believes: the transaction fails and leaves nothing."""
    orders = place(access)

    async def work(connection: Connection) -> None:
        await lock_destinations(connection, "acme", [("apollo", "orders")])
        await insert_sealed(connection, "acme", [sealed_row(orders, sequence) for sequence in sequences])

    with pytest.raises((Unavailable, errors.UniqueViolation)):
        transact(access, work)
    assert orders.rows("*", "deliveries") + orders.rows("*", "queue") + orders.rows("*", "payloads") == []
    assert orders.rows("highest", "destinations", "stream") == [(0,)]


def test_what_is_sealed_is_written_with_all_that_belongs_to_it(access: Access):
    """The envelope, which does not expire while it is undelivered; its place in the queue; its audit event."""
    orders = place(access)
    expires_at = moment(access, 3600)
    expires_at_ms = int(expires_at.timestamp() * 1000)
    row = sealed_row(orders, 1, attempt_limit=5, expires_at_ms=expires_at_ms)

    async def work(connection: Connection) -> None:
        await lock_destinations(connection, "acme", [("apollo", "orders")])
        await insert_sealed(connection, "acme", [row])

    transact(access, work)
    assert orders.rows(
        "sequence, delivery, event_id, idempotency_key, content_hash, event_identity, keyid, "
        "floor(extract(epoch FROM expires_at) * 1000)::bigint",
        "deliveries",
    ) == [
        (
            1,
            row.delivery,
            row.event_id,
            row.idempotency_key,
            row.content_hash,
            row.event_identity,
            row.keyid,
            expires_at_ms,
        )
    ]
    assert orders.rows("sequence, expires_at, payload, signature", "payloads") == [
        (1, None, row.payload, row.signature)
    ]
    assert orders.rows("lane, stage, attempt, attempt_limit, token, due_at <= clock_timestamp()", "queue") == [
        ("push", "fresh", 0, 5, None, True)
    ]
    with as_owner(access) as owner:
        audit = owner.execute(
            "SELECT tenant, project, account, device, action, outcome, reason, event_identity, correlation_id "
            "FROM audit_events"
        ).fetchall()
    assert audit == [
        ("acme", "apollo", "billing", None, "enqueue", "accepted", None, row.event_identity, row.correlation_id)
    ]


def test_the_lane_is_the_destinations(access: Access):
    """Pulled, pushed, or held while it is disabled."""
    orders, device, disabled = place(access), place(access, "device-01", mode="pull"), place(access, "disabled")
    disabled.disable()
    for each in (orders, device, disabled):
        each.seal()
    lanes = [each.rows("lane", "queue") for each in (orders, device, disabled)]
    assert lanes == [[("push",)], [("pull",)], [("held",)]]


def test_a_sealed_row_shows_no_content(access: Access):
    """It may get into a log."""
    orders = Place(access, "acme", "apollo", "orders", 1)
    assert repr(sealed_row(orders, 1, event_identity=b"\1" * 32)) == f"SealedRow({'01' * 32})"


def look_up(orders: Place, *names: SealedNames) -> Found:
    """Find what was sealed under these names."""

    async def work(connection: Connection) -> Found:
        return await find_sealed(connection, orders.tenant, names)

    return transact(orders.access, work)


def names_of(row: SealedRow, **changes: object) -> SealedNames:
    """The names of a delivery, or some of them among fresh ones."""
    fresh = {"idempotency_key": f"key:{uuid4()}", "event_id": uuid4(), "delivery": uuid4()}
    return SealedNames(**{"stream": row.stream, **fresh, **changes})  # pyright: ignore[reportArgumentType]


def test_what_was_sealed_is_found_by_each_of_its_names(access: Access):
    """And by nothing else: keys and event ids belong to their stream, ids of deliveries to their tenant."""
    orders, others = place(access), place(access, "others")
    rows = [sealed_row(orders, number) for number in (1, 2, 3)]

    async def work(connection: Connection) -> None:
        await lock_destinations(connection, "acme", [("apollo", "orders")])
        await insert_sealed(connection, "acme", rows)

    transact(access, work)
    first, second, third = rows
    found = look_up(
        orders,
        names_of(first, idempotency_key=first.idempotency_key),
        names_of(second, event_id=second.event_id),
        names_of(third, delivery=third.delivery),
        names_of(first, stream=others.stream, idempotency_key=second.idempotency_key, event_id=first.event_id),
        names_of(first),
    )
    assert {name: before.sequence for name, before in found.by_key.items()} == {
        (orders.stream, first.idempotency_key): 1
    }
    assert {name: before.sequence for name, before in found.by_event.items()} == {(orders.stream, second.event_id): 2}
    assert {name: before.sequence for name, before in found.by_delivery.items()} == {third.delivery: 3}
    nameless = names_of(second, event_id=None, delivery=third.delivery)
    assert look_up(orders, nameless, names_of(second, event_id=second.event_id)).by_event == found.by_event
    assert look_up(orders, nameless).by_event == {}
    before = found.by_delivery[third.delivery]
    assert (before.content_hash, before.event_identity) == (third.content_hash, third.event_identity)
    assert look_up(
        Place(access, "other", "apollo", "orders", orders.stream), names_of(first, delivery=third.delivery)
    ) == Found({}, {}, {})


def test_what_was_sealed_is_told_in_the_state_in_which_it_is(access: Access):
    """Whoever brings a key again learns what became of the first."""
    orders = place(access)
    states: dict[UUID, State] = {}

    def one(state: State, **changes: object) -> UUID:
        [delivery] = orders.seal(1, **changes)
        states[delivery] = state
        return delivery

    one(State.DELIVERED)
    orders.settle(settled(orders.lease(), Verdict.DELIVERED))
    one(State.DEAD)
    orders.settle(settled(orders.lease(), Verdict.DEAD, Code.STATUS_4XX))
    cancelled = one(State.CANCELLED)
    transact(access, lambda connection: cancel(connection, "acme", "apollo", cancelled))
    one(State.DELIVERING)
    orders.lease()
    one(State.EXPIRED, expires_at_ms=int(moment(access, -1).timestamp() * 1000))
    one(State.PENDING)
    found = look_up(orders, *(SealedNames(orders.stream, "key:nothing", delivery) for delivery in states))
    assert {delivery: before.state for delivery, before in found.by_delivery.items()} == states


def test_one_key_signs_and_retiring_ones_are_still_taken(access: Access):
    """A tenant without a key has none of either; who locks destinations is told which signs now."""
    place(access)
    with as_owner(access) as owner:
        for number, state in enumerate(["active", "retiring", "verify-only", "revoked", "removed"]):
            owner.execute(
                "INSERT INTO signing_keys (tenant, keyid, public_key, state, accept_until) VALUES ('acme', %s, %s, %s,"
                " CASE WHEN %s = 'retiring' THEN clock_timestamp() + interval '1 hour' END)",
                [str(number) * 43, bytes([number]) * 32, state, state],
            )
        with pytest.raises(errors.UniqueViolation):
            owner.execute(
                "INSERT INTO signing_keys (tenant, keyid, public_key) VALUES ('acme', %s, %s)", ["9" * 43, b"9" * 32]
            )

    async def work(connection: Connection) -> None:
        active = await find_active(connection, "acme")
        assert isinstance(active, SigningKey)
        assert (active.keyid, active.public_key, active.state) == ("0" * 43, b"\0" * 32, "active")
        assert (await lock_destinations(connection, "acme", [("apollo", "orders")])).signing_key == active
        assert await find_active(connection, "other") is None
        assert (await lock_destinations(connection, "other", [])).signing_key is None
        assert [key.keyid for key in await list_signing(connection, "acme")] == ["0" * 43, "1" * 43]
        assert await list_signing(connection, "other") == []

    transact(access, work)


def test_sealing_waits_for_no_settlement(access: Access):
    """Whoever settles holds rows of the queue and of health: neither is locked to seal."""
    orders = place(access)
    orders.seal(2)
    [lease, _] = orders.claim().leases

    async def work(connection: Connection) -> None:
        await connection.execute(
            "SELECT FROM queue q, destination_health h WHERE q.stream = %s AND h.stream = q.stream FOR UPDATE",
            [lease.stream],
        )
        await transact_in_loop(access, lambda other: seal(other, orders, 2))

    transact(access, work)
    require_whole(access)

"""Claims: who gets what, for how long, and what is settled on the way."""

import asyncio
from datetime import timedelta

import pytest
from orders import (
    Place,
    delivered,
    empty,
    moment,
    place,
    require_whole,
    sealed_row,
    settled,
    transact,
    transact_in_loop,
)

from fleet import as_owner
from postseal.errors import Unavailable
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.deliveries import Claimed, Lease, Wanted, claim, claim_for_certain
from postseal.postgres.sealing import insert_sealed, lock_destinations
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code, Verdict


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


LATE = timedelta(seconds=2)


def claim_from(access: Access, *wanted: Wanted, tenant: str = "acme") -> Claimed:
    """Claim from several streams at once."""

    async def work(connection: Connection) -> Claimed:
        return await claim(connection, tenant, wanted, lane="push", lease_s=60)

    return transact(access, work)


def sequences(claimed: Claimed) -> list[int]:
    """Of the leases, in order."""
    return sorted(lease.sequence for lease in claimed.leases)


def test_a_lease_carries_the_envelope(access: Access):
    """All that a sender needs, and how long it may take, by the database's clock."""
    orders = place(access)
    row = sealed_row(orders, 1)

    async def work(connection: Connection) -> None:
        await lock_destinations(connection, "acme", [("apollo", "orders")])
        await insert_sealed(connection, "acme", [row])

    transact(access, work)
    now = moment(access)
    lease = orders.lease(lease_s=60)
    assert lease == Lease(
        "acme",
        orders.stream,
        1,
        row.delivery,
        1,
        row.attempt_limit,
        "apollo",
        "orders",
        row.keyid,
        row.payload,
        row.signature,
        row.event_identity,
        lease.token,
        lease.lease_ends,
    )
    assert timedelta(seconds=60) <= lease.lease_ends - now < timedelta(seconds=60) + LATE
    assert orders.rows("stage, due_at, attempt, token", "queue") == [("leased", lease.lease_ends, 1, lease.token)]
    assert repr(lease) == f"Lease({row.event_identity.hex()})"


def test_what_is_out_is_not_claimed_again(access: Access):
    """Nor is what is not due yet."""
    orders = place(access)
    orders.seal(3)
    assert sequences(orders.claim(fresh=2)) == [1, 2]
    orders.as_owner("UPDATE queue SET due_at = clock_timestamp() + interval '1 minute' WHERE stage = 'fresh'")
    claimed = orders.claim()
    assert (claimed.leases, claimed.ended) == ([], 0)


def test_at_most_a_hundred_are_claimed_in_all(access: Access):
    """Of a tenant by one call, however many streams are wanted; the longest due of each first."""
    first, second = place(access, "first"), place(access, "second")
    first.seal(70)
    second.seal(70)
    claimed = claim_from(access, Wanted(first.stream, 100, 100), Wanted(second.stream, 100, 100))
    assert len(claimed.leases) == 100
    assert sorted(lease.sequence for lease in claimed.leases if lease.stream == first.stream) == list(range(1, 71))
    assert sorted(lease.sequence for lease in claimed.leases if lease.stream == second.stream) == list(range(1, 31))


def test_first_attempts_and_retries_have_slots_of_their_own(access: Access):
    """A mountain of retries does not keep new mail waiting, nor the other way round."""
    orders = place(access)
    orders.seal(5)
    leases = orders.claim().leases
    orders.settle(*(settled(lease, Verdict.RETRY, Code.STATUS_5XX) for lease in leases))
    orders.seal(5)
    assert sequences(orders.claim(fresh=2, retries=0)) == [6, 7]
    assert sequences(orders.claim(fresh=0, retries=2)) == [1, 2]
    assert sequences(orders.claim(fresh=1, retries=1)) == [3, 8]


def test_expired_leases_and_retries_share_their_slots(access: Access):
    """An expired lease goes first: it is a delivery whose worker is gone."""
    orders = place(access)
    orders.seal(6)
    leases = orders.claim(fresh=3).leases
    orders.settle(*(settled(lease, Verdict.RETRY, Code.STATUS_5XX) for lease in leases))
    orders.claim(fresh=2, retries=0)
    orders.end_leases()
    assert sequences(orders.claim(fresh=0, retries=4)) == [1, 2, 4, 5]


def test_a_tenant_gets_nothing_of_another(access: Access):
    """Whatever stream it names."""
    orders = place(access)
    orders.seal()
    assert claim_from(access, Wanted(orders.stream, 10, 10), tenant="other").leases == []


def test_lanes_are_apart(access: Access):
    """Workers never get what a device pulls, nor the other way round."""
    orders, device = place(access), place(access, "device-01", mode="pull")
    orders.seal()
    device.seal()
    assert orders.claim(lane="pull").leases == device.claim(lane="push").leases == []
    assert len(orders.claim(lane="push").leases) == len(device.claim(lane="pull").leases) == 1


def test_a_disabled_destination_gives_nothing(access: Access):
    """From the commit on that disables it, while its mail still stands in the lane."""
    orders = place(access)
    orders.seal()
    orders.disable()
    assert orders.rows("lane", "queue") == [("push",)]
    assert orders.claim().leases == []
    orders.enable()
    assert len(orders.claim().leases) == 1


def test_an_ended_lease_is_claimed_by_another(access: Access):
    """The attempt counts, and history says why it ended."""
    orders = place(access)
    orders.seal()
    first = orders.lease()
    orders.end_leases()
    second = orders.lease()
    assert (second.attempt, second.delivery) == (2, first.delivery)
    assert second.token != first.token
    assert orders.rows("sequence, attempt, code", "attempts") == [(1, 1, "lease_expired")]
    assert orders.rows("code", "queue") == [("lease_expired",)]


def test_used_up_attempts_go_to_the_dead_letters(access: Access):
    """Where the last lease ended without a word; the claim says how many it settled so."""
    orders = place(access)
    orders.seal(2, attempt_limit=1)
    orders.claim()
    orders.end_leases()
    claimed = orders.claim()
    assert (claimed.leases, claimed.ended) == ([], 2)
    assert orders.rows("sequence, state, code, project, attempt, attempt_limit", "settlements") == [
        (1, "dead", "attempts_exhausted", "apollo", 1, 1),
        (2, "dead", "attempts_exhausted", "apollo", 1, 1),
    ]
    assert orders.rows("sequence, attempt, code", "attempts") == [(1, 1, "lease_expired"), (2, 1, "lease_expired")]
    require_whole(access)


def test_what_has_expired_is_never_sent(access: Access):
    """Whether it is fresh, waits for a retry or is out: it is settled by whoever would have claimed it."""
    orders = place(access)
    orders.seal(3, attempt_limit=2)
    [_, retried, _] = orders.claim(fresh=3).leases
    orders.settle(settled(retried, Verdict.RETRY, Code.STATUS_5XX))
    orders.end_leases()
    orders.seal(1)
    orders.expire()
    claimed = orders.claim()
    assert (claimed.leases, claimed.ended) == ([], 4)
    assert orders.rows("sequence, state, code, attempt", "settlements") == [
        (1, "expired", None, 1),
        (2, "expired", None, 1),
        (3, "expired", None, 1),
        (4, "expired", None, 0),
    ]
    require_whole(access)


def test_what_expires_is_not_a_dead_letter_though_its_attempts_are_used_up(access: Access):
    """A redrive could not bring it to its receiver any more."""
    orders = place(access)
    orders.seal(1, attempt_limit=1)
    orders.claim()
    orders.end_leases()
    orders.expire()
    assert orders.claim().ended == 1
    assert orders.rows("state", "settlements") == [("expired",)]


def test_an_expiry_makes_due(access: Access):
    """However far ahead a retry was put: whoever claims at that time finds it."""
    orders = place(access)
    expires_at = moment(access, 100)
    orders.seal(1, expires_at_ms=int(expires_at.timestamp() * 1000))
    orders.settle(settled(orders.lease(), Verdict.RETRY, Code.STATUS_5XX, delay_s=3600))
    assert orders.rows("due_at = expires_at", "queue") == [(True,)]


def test_two_at_once_get_different_deliveries(access: Access):
    """Neither waits for the other."""
    orders = place(access)
    orders.seal(4)

    async def outer(connection: Connection) -> list[Lease]:
        async def inner(connection: Connection) -> Claimed:
            return await claim(connection, "acme", [Wanted(orders.stream, 10, 10)], lane="push", lease_s=60)

        first = await claim(connection, "acme", [Wanted(orders.stream, 2, 2)], lane="push", lease_s=60)
        second = await transact_in_loop(access, inner)
        return first.leases + second.leases

    assert sorted(lease.sequence for lease in transact(access, outer)) == [1, 2, 3, 4]


def test_what_is_being_settled_is_passed_over(access: Access):
    """A claim waits for no row of the queue."""
    orders = place(access)
    orders.seal(2)

    async def outer(connection: Connection) -> Claimed:
        await connection.execute("SELECT FROM queue WHERE sequence = 1 FOR UPDATE")

        async def inner(connection: Connection) -> Claimed:
            return await claim(connection, "acme", [Wanted(orders.stream, 10, 10)], lane="push", lease_s=60)

        return await transact_in_loop(access, inner)

    assert sequences(transact(access, outer)) == [2]


def test_a_claim_that_rolls_back_leaves_everything(access: Access):
    """Nothing is out, no attempt counts."""
    orders = place(access)
    orders.seal()

    class Gone(Exception):
        pass

    async def work(connection: Connection) -> None:
        await claim(connection, "acme", [Wanted(orders.stream, 10, 10)], lane="push", lease_s=60)
        raise Gone

    with pytest.raises(Gone):
        transact(access, work)
    assert orders.lease().attempt == 1


def test_claims_go_on_from_a_mark(access: Access):
    """It never lies behind what may still come, and never before what was claimed already."""
    orders = place(access)
    orders.seal(2)
    orders.as_owner("UPDATE queue SET due_at = clock_timestamp() - make_interval(mins => 10 - sequence::integer)")
    begin = moment(access)
    mark = orders.claim(fresh=1).marks[orders.stream]
    assert mark.since is not None
    assert mark.retries_since is not None
    assert timedelta(minutes=9) <= begin - mark.since < timedelta(minutes=9) + LATE
    assert begin - timedelta(seconds=10) - LATE < mark.retries_since < moment(access) - timedelta(seconds=9)
    claimed = orders.claim(since=mark.since, retries_since=mark.retries_since)
    assert sequences(claimed) == [2]
    further = claimed.marks[orders.stream]
    assert further.since is not None
    assert further.since > mark.since
    assert orders.claim(since=further.since, retries_since=further.retries_since).leases == []
    orders.seal()
    assert sequences(orders.claim(since=further.since, retries_since=further.retries_since)) == [3]


def test_a_mark_stands_where_the_claim_was_full(access: Access):
    """What it did not come to is still looked for."""
    first, second = place(access, "first"), place(access, "second")
    first.seal(100)
    second.seal(1)
    claimed = claim_from(access, Wanted(first.stream, 100, 1), Wanted(second.stream, 1, 1))
    assert claimed.marks[second.stream].since is None
    assert claimed.marks[second.stream].retries_since is None
    assert claimed.marks[first.stream].retries_since is None


def test_ended_leases_are_found_from_the_beginning(access: Access):
    """With a mark they are not looked for, so that their dead entries cost nothing."""
    orders = place(access)
    orders.seal()
    mark = orders.claim().marks[orders.stream]
    orders.end_leases()
    assert orders.claim(retries_since=mark.retries_since).leases == []
    assert sequences(orders.claim()) == [1]


def exchange(access: Access, orders: Place) -> Claimed:
    """Claim by one exchange through a pool."""

    async def main() -> Claimed:
        async def work(connection: Connection) -> Claimed:
            wanted = [Wanted(orders.stream, 10, 10)]
            return await claim_for_certain(connection, "acme", wanted, lane="push", lease_s=60)

        async with Database(access.of(Part.DELIVERY), prepare=True, size=1) as database:
            return await database.exchange(work)

    return asyncio.run(main())


def test_one_exchange_claims_and_commits(access: Access):
    """What it returns is leased for everyone else."""
    orders = place(access)
    orders.seal(2)
    claimed = exchange(access, orders)
    assert sequences(claimed) == [1, 2]
    assert orders.claim().leases == []
    assert orders.settle(*delivered(claimed.leases)) == set()


def test_a_claim_whose_commit_is_uncertain_gives_nothing(access: Access):
    """A COMMIT that came back with a warning may hold on one machine alone: nothing may be sent."""
    orders = place(access)
    orders.seal()
    with as_owner(access) as owner:
        owner.execute(
            "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'x'; RETURN NULL; END$$"
        )
        owner.execute(
            "CREATE CONSTRAINT TRIGGER warn AFTER UPDATE ON queue DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION warn()"
        )
        try:
            with pytest.raises(Unavailable):
                exchange(access, orders)
        finally:
            owner.execute("DROP FUNCTION warn CASCADE")

"""Settlements: what each verdict does, and what a stale worker cannot do."""

import asyncio
from datetime import timedelta
from uuid import uuid4

import msgspec
import pytest
from orders import Place, delivered, empty, moment, place, require_whole, settled, transact, transact_in_loop
from psycopg import errors

from fleet import as_owner
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.deliveries import Lease, Wanted, claim
from postseal.postgres.settles import Fence, Settle, read_fences, renew, settle, settle_for_certain
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code, Verdict
from until import until_async, waits_for_lock


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


LATE = timedelta(seconds=2)
NOTHING: set[tuple[int, int]] = set()


def test_delivered_mail_leaves_the_queue(access: Access):
    """With how many attempts it took; its envelope stays."""
    orders = place(access)
    orders.seal()
    assert orders.settle(*delivered([orders.lease()])) == NOTHING
    assert orders.rows("sequence, state, code, project, attempt, attempt_limit", "settlements") == [
        (1, "delivered", None, None, 1, 3)
    ]
    assert orders.rows("*", "queue") == orders.rows("*", "attempts") == []
    assert len(orders.rows("*", "payloads")) == 1
    require_whole(access)


def test_a_dead_letter_keeps_its_code_and_history(access: Access):
    """It is listed by its project."""
    orders = place(access)
    orders.seal()
    assert orders.settle(settled(orders.lease(), Verdict.DEAD, Code.REJECTED)) == NOTHING
    assert orders.rows("sequence, state, code, project, attempt, attempt_limit", "settlements") == [
        (1, "dead", "rejected", "apollo", 1, 3)
    ]
    assert orders.rows("sequence, attempt, code", "attempts") == [(1, 1, "rejected")]
    require_whole(access)


def test_a_retry_waits_as_long_as_it_is_told(access: Access):
    """By the database's clock, with its code and its history, and for a claim of retries."""
    orders = place(access)
    orders.seal()
    orders.settle(settled(orders.lease(), Verdict.RETRY, Code.SEND_TIMEOUT, delay_s=7.25))
    [(stage, token, code, due_at)] = orders.rows("stage, token, code, due_at", "queue")
    assert (stage, token, code) == ("retry", None, "send_timeout")
    assert timedelta(seconds=7.25) - LATE < due_at - moment(access) <= timedelta(seconds=7.25)
    assert orders.rows("sequence, attempt, code", "attempts") == [(1, 1, "send_timeout")]
    orders.make_due()
    assert orders.lease().attempt == 2
    require_whole(access)


def test_a_release_gives_the_attempt_back(access: Access):
    """By raising the limit: the counter never goes down. What never failed is fresh again, and due now."""
    orders = place(access)
    orders.seal()
    for attempt in (1, 2, 3, 4):
        lease = orders.lease(retries=0)
        assert (lease.attempt, lease.attempt_limit) == (attempt, 2 + attempt)
        orders.settle(settled(lease, Verdict.RELEASE))
    assert orders.rows("stage, code", "queue") == [("fresh", None)]
    assert orders.rows("*", "attempts") == []


def test_what_failed_before_is_a_retry_after_its_release(access: Access):
    """It keeps to the slots of what was tried."""
    orders = place(access)
    orders.seal()
    orders.settle(settled(orders.lease(), Verdict.RETRY, Code.STATUS_5XX))
    orders.settle(settled(orders.lease(), Verdict.RELEASE))
    assert orders.rows("stage, code, attempt, attempt_limit", "queue") == [("retry", "status_5xx", 2, 4)]


VERDICTS = [
    (Verdict.DELIVERED, None),
    (Verdict.DEAD, Code.STATUS_4XX),
    (Verdict.RETRY, Code.STATUS_4XX),
    (Verdict.RELEASE, None),
]


def everything(orders: Place) -> list[object]:
    """All that a settlement could change."""
    tables = ["queue", "settlements", "attempts", "destination_health", "destinations"]
    return [orders.rows("*", table, "stream") for table in tables]


@pytest.mark.parametrize(("verdict", "code"), VERDICTS)
def test_a_stale_worker_is_fenced(access: Access, verdict: Verdict, code: Code | None):
    """Another attempt, another token, another delivery or tenant: it changes nothing, whatever it says."""
    orders = place(access)
    orders.seal()
    old = orders.lease()
    orders.end_leases()
    new = orders.lease()
    stale = [
        settled(old, verdict, code),
        msgspec.structs.replace(settled(new, verdict, code), token=uuid4()),
        msgspec.structs.replace(settled(new, verdict, code), token=old.token),
        msgspec.structs.replace(settled(new, verdict, code), attempt=old.attempt),
        msgspec.structs.replace(settled(new, verdict, code), attempt=3),
        msgspec.structs.replace(settled(new, verdict, code, gone=True), sequence=2),
        msgspec.structs.replace(settled(new, verdict, code, gone=True), token=old.token),
    ]
    before = everything(orders)
    for each in stale:
        assert orders.settle(each) == {(each.stream, each.sequence)}
    other = Place(access, "other", "apollo", "orders", orders.stream)
    assert other.settle(settled(new, verdict, code, gone=True)) == {(new.stream, new.sequence)}
    assert everything(orders) == before
    assert orders.settle(settled(new, verdict, code)) == NOTHING


@pytest.mark.parametrize(("verdict", "code"), VERDICTS)
def test_nothing_is_settled_twice(access: Access, verdict: Verdict, code: Code | None):
    """An answer that was lost may be asked for again: the second time it is fenced."""
    orders = place(access)
    orders.seal()
    settle = settled(orders.lease(), verdict, code)
    assert orders.settle(settle) == NOTHING
    after = everything(orders)
    assert orders.settle(settle) == {(orders.stream, 1)}
    assert everything(orders) == after


def test_of_two_for_the_same_lease_the_first_counts(access: Access):
    """A device may well send its verdict twice."""
    orders = place(access)
    orders.seal(2)
    first, second = orders.claim().leases
    assert (
        orders.settle(
            settled(first, Verdict.RETRY, Code.STATUS_5XX),
            settled(first, Verdict.DELIVERED),
            *delivered([second, second]),
        )
        == set()
    )
    assert orders.rows("stage", "queue") == [("retry",)]
    require_whole(access)


def test_only_the_fenced_ones_are_named(access: Access):
    """The others of the same call count, all kinds beside each other."""
    orders, others = place(access), place(access, "others")
    orders.seal(5)
    others.seal(1)
    leases = sorted(orders.claim().leases, key=lambda lease: lease.sequence)
    assert orders.settle(
        settled(leases[3], Verdict.RELEASE),
        settled(leases[0], Verdict.DELIVERED),
        msgspec.structs.replace(settled(leases[4], Verdict.DELIVERED), attempt=7),
        settled(leases[2], Verdict.RETRY, Code.TLS_FAILED),
        settled(leases[1], Verdict.DEAD, Code.STATUS_4XX),
        settled(others.lease(), Verdict.DELIVERED),
    ) == {(orders.stream, 5)}
    assert orders.rows("sequence, stage, code", "queue") == [
        (3, "retry", "tls_failed"),
        (4, "fresh", None),
        (5, "leased", None),
    ]
    assert orders.rows("sequence, state", "settlements") == [(1, "delivered"), (2, "dead")]
    assert orders.rows("sequence, code", "attempts") == [(2, "status_4xx"), (3, "tls_failed")]
    require_whole(access)


@pytest.mark.parametrize(("verdict", "code"), VERDICTS)
def test_a_settlement_counts_after_the_leases_end(access: Access, verdict: Verdict, code: Code | None):
    """As long as nobody claimed it since."""
    orders = place(access)
    orders.seal()
    lease = orders.lease()
    orders.end_leases()
    assert orders.settle(settled(lease, verdict, code)) == NOTHING
    require_whole(access)


def renewed(orders: Place, *leases: Lease, lease_s: float = 600) -> set[tuple[int, int]]:
    """Renew leases; returns the lost ones."""

    async def work(connection: Connection) -> set[tuple[int, int]]:
        return await renew(connection, orders.tenant, leases, lease_s=lease_s)

    return transact(orders.access, work)


def test_a_renewed_lease_ends_later(access: Access):
    """The one who has it goes on under the same attempt and token; a stale one is told that it lost."""
    orders = place(access)
    orders.seal(2)
    old, lost = sorted(orders.claim().leases, key=lambda lease: lease.sequence)
    orders.settle(settled(lost, Verdict.DELIVERED))
    assert renewed(orders, lost, old) == {(orders.stream, 2)}
    [(due_at,)] = orders.rows("due_at", "queue")
    assert timedelta(seconds=600) - LATE < due_at - moment(access) <= timedelta(seconds=600)
    assert orders.settle(settled(old, Verdict.DELIVERED)) == NOTHING


HEALTH = "settled, failing_since IS NOT NULL, last_failure_at IS NOT NULL, last_code, last_success_at IS NOT NULL"


def test_health_tells_how_a_destination_fares(access: Access):
    """Since when it fails, with what, and when it last took something; a success ends the failing."""
    orders = place(access)
    orders.seal(5)
    leases = orders.claim().leases
    seen = [orders.rows(HEALTH, "destination_health", "stream")]
    for each in (
        settled(leases[0], Verdict.RELEASE),
        settled(leases[1], Verdict.RETRY, Code.CONNECT_FAILED),
        settled(leases[2], Verdict.DEAD, Code.STATUS_4XX),
        settled(leases[3], Verdict.DELIVERED),
        settled(leases[4], Verdict.RETRY, Code.DNS_FAILED),
    ):
        orders.settle(each)
        seen.append(orders.rows(HEALTH, "destination_health", "stream"))
    assert [row for [row] in seen] == [
        (0, False, False, None, False),
        (0, False, False, None, False),
        (0, True, True, "connect_failed", False),
        (1, True, True, "status_4xx", False),
        (2, False, True, "status_4xx", True),
        (2, True, True, "dns_failed", True),
    ]


def test_failing_lasts_from_the_first_failure(access: Access):
    """Further ones do not move it."""
    orders = place(access)
    orders.seal(2)
    times: list[object] = []
    for lease in orders.claim().leases:
        orders.settle(settled(lease, Verdict.RETRY, Code.STATUS_5XX))
        times += orders.rows("failing_since", "destination_health", "stream")
    assert times[0] == times[1]


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.RETRY, Code.GONE), (Verdict.DEAD, Code.GONE)])
def test_a_destination_that_is_gone_is_disabled(access: Access, verdict: Verdict, code: Code):
    """With the settlement that says so; one that an operator disabled keeps its reason."""
    orders, others = place(access), place(access, "others")
    for each in (orders, others):
        each.seal()
    leases = [orders.lease(), others.lease()]
    others.disable()
    orders.settle(*(settled(lease, verdict, code, gone=True) for lease in leases))
    for each, reason in ((orders, "gone"), (others, "operator")):
        columns = "disabled_at IS NOT NULL, disabled_reason"
        assert each.rows(columns, "destinations", "stream") == [(True, reason)]
    assert orders.claim().leases == []


def disabled_acts(access: Access) -> list[tuple[object, ...]]:
    """What the trail tells of destinations that were disabled."""
    with as_owner(access) as owner:
        return owner.execute(
            "SELECT tenant, project, account, outcome, detail FROM audit_events WHERE action = 'destination.disable'"
        ).fetchall()


def test_a_destination_that_is_gone_is_in_the_trail(access: Access):
    """Once, with the settlement that says so; not where it was disabled before, and not where that is fenced."""
    orders, others = place(access), place(access, "others")
    for each in (orders, others):
        each.seal(2)
    said = [settled(lease, Verdict.RETRY, Code.GONE, gone=True) for lease in orders.claim().leases]
    stale = settled(others.lease(fresh=1), Verdict.RETRY, Code.GONE, gone=True)
    orders.settle(msgspec.structs.replace(stale, token=uuid4()), *said)
    orders.settle(*said)
    detail = {"destination": "orders", "reason": "gone"}
    assert disabled_acts(access) == [("acme", "apollo", "controlplane", "done", detail)]
    others.disable()
    others.settle(stale)
    assert len(disabled_acts(access)) == 1


def test_a_lease_that_is_lost_in_the_same_moment_disables_nothing(access: Access):
    """Its settlement waits for whoever claims the delivery just then, and is fenced."""
    orders = place(access)
    orders.seal()
    said = settled(orders.lease(), Verdict.RETRY, Code.GONE, gone=True)
    orders.end_leases()

    async def settle_gone() -> set[tuple[int, int]]:
        return await transact_in_loop(access, lambda connection: settle(connection, "acme", [said]))

    async def claim_meanwhile(connection: Connection) -> asyncio.Task[set[tuple[int, int]]]:
        claimed = await claim(connection, "acme", [Wanted(orders.stream, 0, 1)], lane="push", lease_s=60)
        assert [lease.attempt for lease in claimed.leases] == [2]
        settling = asyncio.create_task(settle_gone())
        await until_async(lambda: waits_for_lock(access))
        return settling

    async def main() -> set[tuple[int, int]]:
        return await (await transact_in_loop(access, claim_meanwhile))

    assert asyncio.run(main()) == {(orders.stream, 1)}
    assert orders.rows("disabled_at", "destinations", "stream") == [(None,)]
    assert disabled_acts(access) == []


def test_fences_are_those_of_what_is_out(access: Access):
    """With the limit that a release has raised; what waits or has ended has none."""
    orders = place(access)
    orders.seal(3)
    orders.settle(settled(orders.lease(fresh=1), Verdict.RELEASE))
    lease = orders.lease(fresh=1)

    async def work(connection: Connection) -> dict[tuple[int, int], Fence]:
        return await read_fences(connection, "acme", [(orders.stream, sequence) for sequence in range(5)])

    fences = transact(access, work)
    assert fences == {(orders.stream, lease.sequence): Fence(lease.attempt, lease.token, lease.attempt_limit)}
    assert lease.token.hex not in repr(fences)


def test_one_exchange_settles_and_commits(access: Access):
    """With the same fences."""
    orders = place(access)
    orders.seal(2)
    settles = delivered(orders.claim().leases)
    settles[1] = msgspec.structs.replace(settles[1], token=uuid4())

    async def main() -> set[tuple[int, int]]:
        async def work(connection: Connection) -> set[tuple[int, int]]:
            return await settle_for_certain(connection, "acme", settles)

        async with Database(access.of(Part.DELIVERY), prepare=True, size=1) as database:
            return await database.exchange(work)

    assert asyncio.run(main()) == {(settles[1].stream, settles[1].sequence)}
    require_whole(access)


def test_the_schema_refuses_half_a_lease(access: Access):
    """A row is leased exactly when it has a token, and only a dead letter has a code."""
    orders = place(access)
    orders.seal()
    with as_owner(access) as owner:
        for statement in (
            "UPDATE queue SET token = gen_random_uuid()",
            "UPDATE queue SET stage = 'leased'",
            "INSERT INTO settlements VALUES ('acme', 1, 1, 'dead', NULL, 'apollo', 1, 1)",
            "INSERT INTO settlements VALUES ('acme', 1, 1, 'dead', 'x', NULL, 1, 1)",
            "INSERT INTO settlements VALUES ('acme', 1, 1, 'delivered', 'x', NULL, 1, 1)",
        ):
            with pytest.raises(errors.CheckViolation):
                owner.execute(statement)


def test_a_settle_shows_no_token(access: Access):
    """It may get into a log."""
    assert "token" not in repr(Settle(1, 2, 3, uuid4(), Verdict.DELIVERED))

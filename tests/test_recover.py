"""`recover`: ended leases are taken back, and what is missing is told; nothing that was promised is touched."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from fleet import as_owner
from healthy import Healthy, copied, dump, populate
from postseal.admin.actor import Actor
from postseal.inbound.inbox import Inbound
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.deliveries import Wanted, claim
from postseal.postgres.settles import Settle, settle
from postseal.recover import Recovery, recover
from postseal.rules.delivery import Verdict
from postseal.service import running_service
from postseal.settings import Settings
from postseal.verify import verify

ACTOR = Actor("os:operator")
UNTOUCHED = (
    "identities",
    "payloads",
    "streams",
    "destinations",
    "deliveries",
    "settlements",
    "destination_health",
    "keys",
    "signing_keys",
    "intents",
)


@pytest.fixture(scope="module")
def healthy(shared_access: Access, tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """One database in which something of everything is, to be copied."""
    return asyncio.run(populate(shared_access, tmp_path_factory.mktemp("signing")))


@pytest.fixture
def copy(healthy: Healthy) -> Iterator[Access]:
    """A copy of it."""
    with copied(healthy.access) as access:
        yield access


def recovered(access: Access, *, since: datetime | None = None, releases: bool = True) -> Recovery:
    """What a recovery finds and does."""

    async def flow() -> Recovery:
        async with Database(access.of(Part.DELIVERY), prepare=True, size=1) as delivery:
            return await recover(access.of(Part.ADMIN), delivery, ACTOR, since=since, releases=releases)

    return asyncio.run(flow())


def queue_of(access: Access) -> dict[tuple[str, int, int], tuple[object, ...]]:
    """Stage, attempt, limit, whether there is a token, and code, by place."""
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT tenant, stream, sequence, stage, attempt, attempt_limit, token IS NOT NULL, code, lane FROM queue"
        ).fetchall()
    return {(tenant, stream, sequence): tuple(row) for tenant, stream, sequence, *row in rows}


def test_what_a_dead_worker_holds_is_released_and_nothing_else_is_touched(healthy: Healthy, copy: Access):
    """Its lease has ended and it has an attempt left: it waits again, its attempt counts, and its loss is on record.

    A lease that has not ended stays; so does one without an attempt left, which the next claim gives up.
    """
    before, orders = dump(copy), healthy.orders.stream
    queue = queue_of(copy)
    assert recovered(copy).released == 1
    place = ("acme", orders, 5)
    assert queue[place] == ("leased", 1, 8, True, None, "push")
    assert queue_of(copy) == queue | {place: ("retry", 1, 8, False, "lease_expired", "push")}
    after = dump(copy)
    assert {table: after[table] for table in UNTOUCHED} == {table: before[table] for table in UNTOUCHED}
    [tried] = [row for row in after["attempts"] if row not in before["attempts"]]
    assert (tried[:4], tried[-1]) == (("acme", orders, 5, 1), "lease_expired")
    assert len(after["attempts"]) == len(before["attempts"]) + 1
    assert len(after["audit_events"]) == len(before["audit_events"]) + 1
    with as_owner(copy) as owner:
        act = owner.execute("SELECT tenant, account, action, detail FROM audit_events ORDER BY id DESC").fetchone()
    assert act == ("acme", "os:operator", "lease.release", {"released": 1})
    assert asyncio.run(verify(copy.owner)).breaches == []


def test_a_second_recovery_has_nothing_to_do(copy: Access):
    """It writes nothing, not even to the audit."""
    recovered(copy)
    before = dump(copy)
    assert recovered(copy).released == 0
    assert dump(copy) == before


def test_looking_alone_changes_nothing(copy: Access):
    """All is told as it would be, and no row is another one after."""
    before = dump(copy)
    looked = recovered(copy, releases=False)
    assert dump(copy) == before
    [leases] = looked.leases.rows
    assert (leases.out, leases.ended, leases.exhausted) == (1, 2, 1)
    assert looked.released == 0


def test_what_was_released_is_sent_again_and_its_last_holder_is_fenced(healthy: Healthy, copy: Access):
    """The next claim has it at once, by its next attempt; whoever had it can settle it no more."""
    orders = healthy.orders.stream
    with as_owner(copy) as owner:
        [(attempt, token)] = owner.execute(
            "SELECT attempt, token FROM queue WHERE stream = %s AND sequence = 5", [orders]
        ).fetchall()
    recovered(copy)

    async def flow() -> tuple[set[tuple[int, int]], list[tuple[int, int]]]:
        async with Database(copy.of(Part.DELIVERY), prepare=True, size=1) as database:
            late = [Settle(orders, 5, attempt, token, Verdict.DELIVERED)]
            fenced = await database.transact(lambda connection: settle(connection, "acme", late))
            now = datetime.now(UTC)
            wanted = [Wanted(orders, 0, 10, retries_since=now - timedelta(minutes=1))]
            claimed = await database.transact(
                lambda connection: claim(connection, "acme", wanted, lane="push", lease_s=60)
            )
            return fenced, sorted((lease.sequence, lease.attempt) for lease in claimed.leases)

    assert asyncio.run(flow()) == ({(orders, 5)}, [(5, 2), (7, 2)])


def test_dead_letters_and_holes_are_told(healthy: Healthy, copy: Access):
    """By destination and code; and what is missing in each device's stream."""
    found = recovered(copy)
    [dead] = found.dead_letters.rows
    assert (dead.tenant, dead.project, dead.destination, dead.code, dead.number) == (
        "acme",
        "apollo",
        "orders",
        "rejected",
        1,
    )
    assert [(stream.producer, stream.cursor.holes()) for stream in found.holes.rows] == [
        ("device-01", [(11, 11), (14, 14)]),
        ("device-02", [(4, 4)]),
    ]
    assert (found.dead_letters.total, found.holes.total) == (1, 2)
    assert (found.since, found.quiet) == (None, None)


def test_streams_that_nobody_has_written_to_since_a_restore_are_told(healthy: Healthy, copy: Access):
    """By the restore's own mark or a time that is named. A duplicate counts, and a refusal does not."""

    async def written(*bodies: Inbound) -> None:
        async with running_service(Settings(window=64), copy) as service:
            for body in bodies:
                await service.inbox.receive(body)

    def quiet(since: datetime | None = None) -> list[tuple[str, str]]:
        found = recovered(copy, since=since).quiet
        assert found is not None
        assert found.total == len(found.rows)
        return [(stream.key.tenant, stream.producer) for stream in found.rows]

    async def mark() -> None:
        async with Database(copy.of(Part.ADMIN), prepare=True, size=1) as admin:
            await admin.transact(lambda connection: ACTOR.acted_on_platform(connection, "database.restore"))

    whole, raised, foreign = healthy.whole, healthy.raised, healthy.foreign
    first = raised.envelope(6)
    asyncio.run(written(raised.inbound(first)))
    asyncio.run(mark())
    everyone = [("acme", "device-01"), ("acme", "device-02"), ("umbra", "device-01")]
    assert quiet() == everyone
    asyncio.run(written(raised.inbound(first), foreign.inbound(foreign.envelope(1))))  # the other is a conflict
    assert quiet() == [("acme", "device-01"), ("umbra", "device-01")]
    asyncio.run(written(whole.inbound(whole.envelope(11))))
    assert quiet() == [("umbra", "device-01")]
    assert quiet(datetime.now(UTC) + timedelta(minutes=1)) == everyone
    assert quiet(datetime.now(UTC) - timedelta(days=1)) == []
    with as_owner(copy) as owner:
        owner.execute("UPDATE streams SET retired = true WHERE tenant = 'umbra'")
    assert quiet() == []


def test_thousands_of_leases_are_released_in_bounded_steps(healthy: Healthy, copy: Access):
    """No transaction moves more than a thousand, each is audited, and tenants are done one after the other."""
    with as_owner(copy) as owner:
        owner.execute("DELETE FROM queue")
        owner.execute(
            "INSERT INTO queue (tenant, stream, sequence, lane, stage, due_at, attempt, attempt_limit, token)"
            " SELECT tenant, stream, n, 'push', 'leased', now() - interval '1 hour', 1, 8, gen_random_uuid()"
            " FROM destinations, generate_series(1001, 2100) AS n WHERE destination = 'orders'"
        )
    assert recovered(copy).released == 2200
    with as_owner(copy) as owner:
        acts = owner.execute(
            "SELECT tenant, (detail->>'released')::int FROM audit_events WHERE action = 'lease.release' ORDER BY id"
        ).fetchall()
        left = owner.execute("SELECT count(*) FROM queue WHERE stage = 'leased'").fetchone()
    assert acts == [("acme", 1000), ("acme", 100), ("umbra", 1000), ("umbra", 100)]
    assert left == (0,)

"""Payloads of ended deliveries get their time, and what has expired is deleted, in turns and never while it is held."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from orders import Place, delivered, empty, place, settled, transact

from fleet import as_owner
from postseal.admin.actor import Actor
from postseal.admin.dead_letters import redrive
from postseal.errors import AdminError
from postseal.postgres.access import Access
from postseal.postgres.database import Part
from postseal.postgres.dead_letters import DeadFilter, redrive_one, redrive_some
from postseal.postgres.mail import Cancelled, cancel
from postseal.postgres.payloads import SWEEP_LOCK, Expired, Swept, date_ended, delete_expired, next_expired
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code, Verdict

DAY_S = 86_400


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


def dated(access: Access, *, most: int = 1000, default_s: int = 90 * DAY_S) -> int:
    """Date some, as administrators' role."""

    async def work(connection: Connection) -> int:
        return await date_ended(connection, default_retention_s=default_s, most=most)

    return transact(access, work, Part.ADMIN)


def swept(access: Access, *, after: str = "", most: int = 1000) -> Swept | None:
    """Delete some, as the sweep."""

    async def work(connection: Connection) -> Swept | None:
        return await delete_expired(connection, after=after, most=most)

    return transact(access, work, Part.SWEEP)


def redriven(orders: Place, delivery: UUID) -> bool:
    """Redrive one, as an administrator."""

    async def work(connection: Connection) -> bool:
        return await redrive_one(connection, orders.tenant, orders.project, delivery, budget=2)

    return transact(orders.access, work, Part.ADMIN)


def stock(access: Access, tenant: str, count: int, *, ago_s: float = 60.0) -> None:
    """So many payloads of a tenant, the first of which expired `ago_s` ago, each further one a millisecond later."""
    with as_owner(access) as owner:
        owner.execute("INSERT INTO tenants VALUES (%s) ON CONFLICT DO NOTHING", [tenant])
        owner.execute(
            "INSERT INTO payloads SELECT %s, 1, n, clock_timestamp() - make_interval(secs => %s - n / 1000.0), '', ''"
            " FROM generate_series(1, %s) AS n",
            [tenant, ago_s, count],
        )


def left(access: Access) -> dict[str, int]:
    """How many payloads each tenant has, of those that have any."""
    with as_owner(access) as owner:
        return dict(owner.execute("SELECT tenant, count(*) FROM payloads GROUP BY 1").fetchall())


def hold(access: Access, tenant: str) -> None:
    """Place a hold behind the service's back."""
    with as_owner(access) as owner:
        owner.execute("INSERT INTO holds (tenant, hold, reason, account) VALUES (%s, 'case', '', '')", [tenant])


@contextmanager
def sweep_locked(access: Access, function: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that has the sweep's lock, alone or shared."""
    with as_owner(access) as owner, owner.transaction():
        owner.execute(f"SELECT {function}(%s)".encode(), [SWEEP_LOCK])
        yield owner


def test_what_ended_gets_its_time_and_nothing_else_does(access: Access):
    """Delivered, dead, expired, cancelled: the time of the end, and the retention. What is pending or out has none."""
    orders = place(access)
    *_, cancelled = orders.seal(4)
    done, dead, overdue = orders.claim(fresh=3).leases
    orders.settle(*delivered([done]), settled(dead, Verdict.DEAD, Code.STATUS_5XX))
    orders.settle(settled(overdue, Verdict.RETRY, Code.STATUS_5XX))

    async def end(connection: Connection) -> Cancelled:
        return await cancel(connection, orders.tenant, orders.project, cancelled)

    assert transact(access, end, Part.ADMIN) is Cancelled.CANCELLED
    orders.expire()
    assert orders.claim().ended == 1
    orders.seal(2)
    orders.lease(fresh=1)
    assert dated(access) == 4
    assert dated(access) == 0
    rows = orders.rows(
        "(SELECT state FROM settlements s WHERE (s.stream, s.sequence) = (payloads.stream, payloads.sequence)),"
        " expires_at - (SELECT settled_at FROM settlements s WHERE (s.stream, s.sequence) = (payloads.stream,"
        " payloads.sequence)) = interval '90 days'",
        "payloads",
    )
    ended = [("delivered", True), ("dead", True), ("expired", True), ("cancelled", True)]
    assert rows == [*ended, (None, None), (None, None)]


def test_the_projects_retention_comes_before_the_tenants(access: Access):
    """And the tenant's before the default, which is that of who dates."""
    own, of_tenant = place(access), place(access, project="gemini")
    default = place(access, tenant="beta")
    for each in (own, of_tenant, default):
        each.seal()
        each.settle(*delivered(each.claim().leases))
    with as_owner(access) as owner:
        owner.execute("UPDATE tenants SET payload_retention = '2 days' WHERE tenant = 'acme'")
        owner.execute("UPDATE projects SET payload_retention = '1 day' WHERE project = 'apollo' AND tenant = 'acme'")
        assert dated(access, default_s=3 * DAY_S) == 3
        rows = owner.execute(
            "SELECT expires_at - settled_at FROM payloads JOIN settlements USING (tenant, stream, sequence) ORDER BY 1"
        ).fetchall()
    assert [interval.days for (interval,) in rows] == [1, 2, 3]


def test_a_batch_dates_those_that_ended_first(access: Access):
    """At most as many as it may; what somebody has is passed over and dated later."""
    orders = place(access)
    orders.kill(4)
    orders.as_owner("UPDATE settlements SET settled_at = settled_at - sequence * interval '1 hour'")
    assert dated(access, most=1) == 1
    with as_owner(access) as owner:
        assert owner.execute("SELECT sequence FROM settlements WHERE dated").fetchall() == [(4,)]
        with owner.transaction():
            owner.execute("SELECT FROM settlements WHERE sequence = 3 FOR UPDATE")
            assert dated(access) == 2
        assert dated(access) == 1


def test_a_redrive_takes_the_time_away(access: Access):
    """Though it had passed: the payload stays until the delivery ends again."""
    orders = place(access)
    [delivery] = orders.kill()
    assert dated(access, default_s=0) == 1
    assert redriven(orders, delivery)
    assert swept(access) == Swept(0, "")
    assert orders.rows("expires_at", "payloads") == [(None,)]
    orders.settle(*delivered([orders.lease()]))
    assert dated(access, default_s=0) == 1
    assert swept(access) == Swept(1, "")


def test_what_has_no_payload_is_not_redriven(access: Access):
    """By its id neither nor by a filter, which goes on to those that have one; it stays dead."""
    orders = place(access)
    gone, _ = orders.kill(2)
    orders.as_owner("UPDATE settlements SET settled_at = settled_at - interval '1 day' WHERE sequence = 1")
    assert dated(access, default_s=DAY_S // 2) == 2
    assert swept(access) == Swept(1, "")

    async def rest(connection: Connection) -> int:
        return await redrive_some(connection, "acme", "apollo", DeadFilter(), budget=2, limit=1)

    async def named(connection: Connection) -> None:
        await redrive(connection, Actor("os:ada"), "acme", "apollo", gone, budget=2)

    assert not redriven(orders, gone)
    with pytest.raises(AdminError, match="there is nothing left to send"):
        transact(access, named, Part.ADMIN)
    assert transact(access, rest, Part.ADMIN) == 1
    assert orders.rows("sequence", "queue") == [(2,)]
    assert orders.rows("sequence", "settlements") == [(1,)]


def test_what_has_not_expired_stays(access: Access):
    """Nor does what has no time go, whoever's it is."""
    stock(access, "acme", 3)
    stock(access, "beta", 2, ago_s=-60)
    place(access, tenant="gamma").seal()
    assert swept(access) == Swept(3, "")
    assert left(access) == {"beta": 2, "gamma": 1}


def test_a_batch_is_bounded_and_shared_equally(access: Access):
    """A tenant's million does not stand before another's few, however long ago it expired."""
    stock(access, "acme", 50, ago_s=1000)
    stock(access, "beta", 3)
    stock(access, "gamma", 30)
    assert swept(access, most=30) == Swept(10 + 3 + 10, "")
    assert left(access) == {"acme": 40, "gamma": 20}
    assert swept(access, most=30) == Swept(15 + 15, "")
    assert swept(access, most=30) == Swept(15 + 5, "")
    assert swept(access, most=30) == Swept(10, "")
    assert swept(access, most=30) == Swept(0, "")


def test_the_earliest_goes_first(access: Access):
    """Of one tenant, so that its oldest is never the last."""
    stock(access, "acme", 5)
    assert swept(access, most=2) == Swept(2, "")
    with as_owner(access) as owner:
        assert owner.execute("SELECT sequence FROM payloads ORDER BY 1").fetchall() == [(3,), (4,), (5,)]


def test_the_next_batch_goes_on_behind_the_last_tenant(access: Access, monkeypatch: pytest.MonkeyPatch):
    """Whether as many shared it as may, or as many were looked at; at the end it begins anew."""
    for number in range(5):
        stock(access, f"tenant-{number}", 1)
    monkeypatch.setattr("postseal.postgres.payloads.MAX_TENANTS", 2)
    assert swept(access) == Swept(2, "tenant-1")
    monkeypatch.setattr("postseal.postgres.payloads.MAX_WALKED", 1)
    assert swept(access) == Swept(0, "tenant-0")
    assert swept(access, after="tenant-1") == Swept(1, "tenant-2")
    assert swept(access, after="tenant-4") == Swept(0, "")
    assert left(access) == {"tenant-3": 1, "tenant-4": 1}


def test_a_held_tenant_loses_nothing(access: Access):
    """And takes no share of the others'."""
    stock(access, "acme", 50)
    stock(access, "beta", 30)
    hold(access, "acme")
    assert swept(access, most=30) == Swept(30, "")
    assert left(access) == {"acme": 50}
    with as_owner(access) as owner:
        owner.execute("DELETE FROM holds")
    assert swept(access) == Swept(50, "")


def test_one_batch_at_a_time(access: Access):
    """Beside another one, or while a hold or a redrive is being committed, there is none; and it waits for nobody."""
    stock(access, "acme", 1)
    for function in ("pg_advisory_xact_lock", "pg_advisory_xact_lock_shared"):
        with sweep_locked(access, function):
            assert swept(access) is None
    assert swept(access) == Swept(1, "")


def test_a_redrive_waits_for_the_batch(access: Access):
    """Else it could find a payload that is about to go."""
    orders = place(access)
    [delivery] = orders.kill()
    with sweep_locked(access, "pg_advisory_xact_lock"), pytest.raises(psycopg.errors.LockNotAvailable):
        redriven(orders, delivery)
    with sweep_locked(access, "pg_advisory_xact_lock_shared"):
        assert redriven(orders, delivery)


def test_a_dry_run_counts_by_tenant(access: Access):
    """What has expired, when the first of it did, and whether it is held; nothing of those that have nothing."""
    stock(access, "acme", 4)
    stock(access, "beta", 2, ago_s=-60)
    stock(access, "gamma", 3)
    hold(access, "gamma")

    def behind(after: str) -> Expired | None:
        async def work(connection: Connection) -> Expired | None:
            return await next_expired(connection, after=after)

        return transact(access, work, Part.SWEEP)

    first, second = behind(""), behind("acme")
    assert first is not None
    assert second is not None
    assert (first.tenant, first.expired, first.held) == ("acme", 4, False)
    assert (second.tenant, second.expired, second.held) == ("gamma", 3, True)
    assert behind("gamma") is None
    with as_owner(access) as owner:
        assert owner.execute("SELECT min(expires_at) FROM payloads").fetchone() == (first.first_expired_at,)
    assert left(access) == {"acme": 4, "beta": 2, "gamma": 3}

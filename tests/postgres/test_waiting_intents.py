"""Applications leave intents for themselves alone; sealers take them one by one, and let them wait with a code."""

from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
import pytest
from orders import empty, login_of_application, place, transact, transact_in_loop
from psycopg import errors

from fleet import as_owner
from postseal.postgres.access import Access
from postseal.postgres.intents import (
    RefusedIntent,
    WaitingIntent,
    drop_intents,
    refuse_intents,
    take_intent,
    take_intents,
    tenants_with_intents,
)
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import SealCode


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


INSERT_INTENT = (
    "INSERT INTO postseal.intents (tenant, delivery, project, destination, idempotency_key, data, attempt_limit, "
    "expires_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
)


@pytest.fixture
def application(access: Access) -> Iterator[str]:
    """The connection string of an application that may leave intents for apollo and gemini of acme."""
    place(access)
    name, password = f"app_{uuid4().hex}", uuid4().hex
    with as_owner(access) as owner:
        owner.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}' IN ROLE postseal_enqueue".encode())
        try:
            owner.execute("INSERT INTO enqueue_logins VALUES (%s, 'acme', ARRAY['apollo', 'gemini'])", [name])
            yield login_of_application(access, name, password)
        finally:
            owner.execute(f"DROP ROLE {name}".encode())


def leave(application: str, *deliveries: UUID, tenant: str = "acme", project: str = "apollo", data: str = "{}") -> None:
    """Write intents, each as a transaction of its own."""
    with psycopg.connect(application, autocommit=True) as connection:
        for delivery in deliveries:
            key = f"key:{delivery}"
            connection.execute(INSERT_INTENT, [tenant, delivery, project, "orders", key, data, 5, None])


DENIED = errors.InsufficientPrivilege


def test_an_application_leaves_intents_for_its_own_tenant_and_projects(application: str):
    """Row level security refuses every other, whatever the application claims to be."""
    leave(application, uuid4())
    leave(application, uuid4(), project="gemini")
    with pytest.raises(DENIED, match="row-level security"):
        leave(application, uuid4(), tenant="other")
    with pytest.raises(DENIED, match="row-level security"):
        leave(application, uuid4(), project="mercury")


NOT_AN_APPLICATIONS = [
    "INSERT INTO postseal.intents (tenant, project, destination, idempotency_key, data, login) VALUES ({}, 'other')",
    "INSERT INTO postseal.intents (tenant, project, destination, idempotency_key, data, code) VALUES ({}, 'x')",
    "INSERT INTO postseal.intents (tenant, project, destination, idempotency_key, data, tries) VALUES ({}, 1)",
    "INSERT INTO postseal.intents (tenant, project, destination, idempotency_key, data, due_at) VALUES ({}, now())",
    "INSERT INTO postseal.intents (tenant, project, destination, idempotency_key, data) VALUES ({}) RETURNING tenant",
    "SELECT FROM postseal.intents",
    "UPDATE postseal.intents SET data = '{{}}'",
    "DELETE FROM postseal.intents",
    "SELECT FROM postseal.enqueue_logins",
    "INSERT INTO postseal.enqueue_logins VALUES (session_user, 'other', ARRAY['apollo'])",
    "SELECT FROM postseal.destinations",
    "SELECT FROM postseal.deliveries",
]


def test_an_application_can_do_nothing_else(application: str):
    """It sees nothing, not even its own, and sets neither its name nor what the sealer keeps."""
    leave(application, uuid4())
    with psycopg.connect(application, autocommit=True) as connection:
        for statement in NOT_AN_APPLICATIONS:
            with pytest.raises(DENIED):  # the statement stands among the locals of a failure
                connection.execute(statement.format("'acme', 'apollo', 'orders', 'key:0001', '{}'").encode())


def test_a_login_without_an_entry_leaves_nothing(access: Access, application: str):
    """Being an application's login is not enough: the entry is."""
    with as_owner(access) as owner:
        owner.execute("DELETE FROM enqueue_logins")
    with pytest.raises(DENIED, match="row-level security"):
        leave(application, uuid4())


def take(access: Access, limit: int = 100, tenant: str = "acme") -> list[WaitingIntent]:
    """Take intents for a moment."""

    async def work(connection: Connection) -> list[WaitingIntent]:
        return await take_intents(connection, tenant, limit=limit)

    return transact(access, work)


def test_intents_are_taken_as_they_were_left(access: Access, application: str):
    """The longest due first, the text of the data untouched, with the login that left it."""
    first, second = uuid4(), uuid4()
    leave(application, first, data='{"b": 1, "b": 2}')
    leave(application, second, project="gemini")
    intents = take(access)
    assert [intent.delivery for intent in intents] == [first, second]
    login = psycopg.conninfo.conninfo_to_dict(application)["user"]
    assert intents[0] == WaitingIntent(
        first, "apollo", "orders", f"key:{first}", '{"b": 1, "b": 2}', 5, None, str(login), 0
    )
    assert [intent.delivery for intent in take(access, limit=1)] == [first]
    assert take(access, tenant="other") == []
    assert repr(intents[0]) == f"WaitingIntent({first})"


def test_at_most_a_hundred_intents_are_taken(access: Access, application: str):
    """Their destinations stay locked while they are signed."""
    leave(application, *(uuid4() for _ in range(101)))
    assert len(take(access, limit=1000)) == 100


def test_two_sealers_take_different_intents(access: Access, application: str):
    """What one has locked the other passes over, without waiting."""
    ours = [uuid4() for _ in range(4)]
    leave(application, *ours)

    async def outer(connection: Connection) -> list[WaitingIntent]:
        async def inner(connection: Connection) -> list[WaitingIntent]:
            return await take_intents(connection, "acme", limit=4)

        mine = await take_intents(connection, "acme", limit=2)
        return mine + await transact_in_loop(access, inner)

    assert [intent.delivery for intent in transact(access, outer)] == ours


def test_a_refused_intent_waits_with_its_code(access: Access, application: str):
    """5 s, then twice as long each time, and never more than 5 minutes."""
    delivery = uuid4()
    leave(application, delivery)
    waits: list[timedelta] = []

    async def refuse(connection: Connection) -> None:
        await refuse_intents(connection, "acme", [RefusedIntent(delivery, SealCode.DESTINATION_FULL, given_up=False)])

    for tries in range(1, 10):
        transact(access, refuse)
        assert take(access) == []
        with as_owner(access) as owner:
            row = owner.execute("SELECT due_at - clock_timestamp(), tries, code FROM intents").fetchone()
            assert row is not None
            assert row[1:] == (tries, "destination_full")
            waits.append(row[0])
            owner.execute("UPDATE intents SET due_at = clock_timestamp()")
    seconds = [wait.total_seconds() for wait in waits]
    expected = [min(5 * 2**n, 300) for n in range(9)]
    assert all(wait - 2 < second <= wait for second, wait in zip(seconds, expected, strict=True))


def test_an_intent_that_is_given_up_is_never_taken_again(access: Access, application: str):
    """It stays with its code, and its tenant has nothing due."""
    delivery = uuid4()
    leave(application, delivery)

    async def give_up(connection: Connection) -> list[str]:
        await refuse_intents(connection, "acme", [RefusedIntent(delivery, SealCode.EXPIRED, given_up=True)])
        assert await take_intent(connection, "acme", delivery) is None
        return await tenants_with_intents(connection, after="", limit=3)

    assert transact(access, give_up) == []
    assert take(access) == []
    with as_owner(access) as owner:
        assert owner.execute("SELECT due_at::text, tries, code FROM intents").fetchall() == [("infinity", 1, "expired")]


def test_what_was_refused_keeps_no_new_one_waiting(access: Access, application: str):
    """However many are due again, and longer: half of what is taken was never tried."""
    fresh = [uuid4() for _ in range(4)]
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO intents (tenant, project, destination, idempotency_key, data, tries, due_at) "
            "SELECT 'acme', 'apollo', 'orders', 'key:0001', '{}', 1, now() - interval '1 hour' "
            "FROM generate_series(1, 10)"
        )
    assert [intent.tries for intent in take(access, limit=6)] == [1, 1, 1]
    leave(application, *fresh)
    taken = take(access, limit=6)
    assert [intent.tries for intent in taken] == [1, 1, 1, 0, 0, 0]
    assert [intent.delivery for intent in taken[3:]] == fresh[:3]
    assert [intent.tries for intent in take(access, limit=100)] == [1] * 10 + [0] * 4


def test_one_intent_is_taken_by_its_id(access: Access, application: str):
    """If it is due, of this tenant, and nobody else has it."""
    delivery, other = uuid4(), uuid4()
    leave(application, delivery, other)

    async def outer(connection: Connection) -> WaitingIntent | None:
        assert await take_intent(connection, "other", delivery) is None

        async def inner(connection: Connection) -> WaitingIntent | None:
            return await take_intent(connection, "acme", delivery)

        mine = await take_intent(connection, "acme", delivery)
        assert await transact_in_loop(access, inner) is None
        return mine

    found = transact(access, outer)
    assert found is not None
    assert found.delivery == delivery


def test_sealed_intents_are_dropped(access: Access, application: str):
    """Those that are named, and of this tenant."""
    kept, sealed = uuid4(), uuid4()
    leave(application, kept, sealed)

    async def drop(connection: Connection, tenant: str) -> None:
        await drop_intents(connection, tenant, [sealed])

    transact(access, lambda connection: drop(connection, "other"))
    assert len(take(access)) == 2
    transact(access, lambda connection: drop(connection, "acme"))
    assert [intent.delivery for intent in take(access)] == [kept]


def test_tenants_with_due_intents_are_found_in_pages(access: Access):
    """By name, behind a name; those alone of which something is due."""
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO intents (tenant, project, destination, idempotency_key, data, tries, due_at) "
            "SELECT 'tenant-' || t, 'apollo', 'orders', 'key:0001', '{}', t % 2, "
            "       CASE WHEN t = 3 THEN 'infinity' ELSE clock_timestamp() END "
            "FROM generate_series(1, 5) AS t, generate_series(1, 3) AS n"
        )

    async def work(connection: Connection) -> None:
        page = await tenants_with_intents(connection, after="", limit=3)
        assert page == ["tenant-1", "tenant-2", "tenant-4"]
        assert await tenants_with_intents(connection, after=page[-1], limit=3) == ["tenant-5"]
        assert await tenants_with_intents(connection, after="tenant-5", limit=3) == []

    transact(access, work)

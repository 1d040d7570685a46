"""Destinations: made, listed, switched off and on; the secrets that sign for them; how they fare."""

from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from orders import URL, Place, empty, moment, place, settled, transact
from psycopg import errors

from postseal.postgres import destinations
from postseal.postgres.access import Access
from postseal.postgres.database import Part
from postseal.postgres.destinations import Destination, EncryptedSecret, Scheme, Target
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code, Verdict


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


def found(orders: Place) -> Destination:
    """A destination as an administrator sees it."""

    async def work(connection: Connection) -> Destination | None:
        return await destinations.find(connection, orders.tenant, orders.project, orders.name)

    destination = transact(orders.access, work, Part.ADMIN)
    assert destination is not None
    return destination


def test_a_new_destination_is_enabled_and_empty(access: Access):
    """And has its name in its project alone."""
    orders = place(access)
    assert found(orders) == Destination(
        orders.stream,
        "apollo",
        "orders",
        "push",
        URL,
        1000,
        None,
        None,
        found(orders).created_at,
        *(0, 0),
        *(None, None, None, None, None),
    )

    async def again(connection: Connection) -> None:
        made = {"mode": "push", "url": URL, "max_pending": 1}
        assert await destinations.create(connection, "acme", "apollo", "orders", **made) is None
        assert await destinations.find(connection, "acme", "apollo", "others") is None
        assert await destinations.find(connection, "other", "apollo", "orders") is None

    transact(access, again, Part.ADMIN)
    assert place(access, project="gemini").stream != orders.stream


def test_a_destination_belongs_to_a_project(access: Access):
    """There is none without."""
    place(access)

    async def work(connection: Connection) -> None:
        await destinations.create(connection, "acme", "mercury", "orders", mode="pull", url=None, max_pending=1)

    with pytest.raises(errors.ForeignKeyViolation):
        transact(access, work, Part.ADMIN)


@pytest.mark.parametrize(("mode", "url"), [("push", None), ("pull", URL)])
def test_what_is_pushed_and_only_that_has_an_address(access: Access, mode: destinations.Mode, url: str | None):
    """One mode a destination."""
    place(access)

    async def work(connection: Connection) -> None:
        await destinations.create(connection, "acme", "apollo", "others", mode=mode, url=url, max_pending=1)

    with pytest.raises(errors.CheckViolation):
        transact(access, work, Part.ADMIN)


def test_a_destination_tells_how_it_fares(access: Access):
    """What is pending, when the next is due, since when it fails and with what."""
    orders = place(access)
    orders.seal(3)
    leases = orders.claim(lease_s=600).leases
    orders.settle(settled(leases[0], Verdict.DELIVERED))
    orders.settle(settled(leases[1], Verdict.RETRY, Code.TLS_FAILED, delay_s=60))
    destination = found(orders)
    assert (destination.highest, destination.pending, destination.last_code) == (3, 2, "tls_failed")
    assert None not in (destination.failing_since, destination.last_failure_at, destination.last_success_at)
    assert [(destination.next_due_at,)] == orders.rows("min(due_at)", "queue", "min(due_at)")
    device = place(access, "device-01", mode="pull")
    device.seal()
    assert [(found(device).next_due_at,)] == device.rows("due_at", "queue")


def test_destinations_are_listed_in_pages(access: Access):
    """By name, of one project."""
    places = [place(access, name) for name in ("c", "a", "b")]
    place(access, "d", project="gemini")

    async def work(connection: Connection) -> None:
        page = await destinations.list_of_project(connection, "acme", "apollo", after="", limit=2)
        assert [each.destination for each in page] == ["a", "b"]
        page = await destinations.list_of_project(connection, "acme", "apollo", after="b", limit=2)
        assert [each.stream for each in page] == [places[0].stream]
        assert await destinations.list_of_project(connection, "other", "apollo", after="", limit=2) == []

    transact(access, work, Part.ADMIN)


def test_a_switch_is_turned_once(access: Access):
    """Whoever comes second learns that it was so already; the first reason stays."""
    orders = place(access)

    async def work(connection: Connection) -> None:
        key = (connection, "acme", orders.stream)
        assert await destinations.disable(*key, reason="gone")
        assert not await destinations.disable(*key, reason="operator")
        assert not await destinations.disable(connection, "other", orders.stream, reason="operator")
        destination = await destinations.find(connection, "acme", "apollo", "orders")
        assert destination is not None
        assert destination.disabled_at is not None
        assert destination.disabled_reason == "gone"
        assert await destinations.enable(*key)
        assert not await destinations.enable(*key)

    transact(access, work, Part.ADMIN)
    assert found(orders).disabled_at is None


def test_address_and_bound_can_be_changed(access: Access):
    """Of this tenant's."""
    orders = place(access)

    async def work(connection: Connection, tenant: str, url: str, max_pending: int) -> None:
        await destinations.set_url(connection, tenant, orders.stream, url)
        await destinations.set_max_pending(connection, tenant, orders.stream, max_pending)

    transact(access, lambda connection: work(connection, "acme", "https://new.example/", 5), Part.ADMIN)
    transact(access, lambda connection: work(connection, "other", "https://evil.example/", 6), Part.ADMIN)
    assert (found(orders).url, found(orders).max_pending) == ("https://new.example/", 5)


def add_secret(orders: Place, scheme: Scheme, encrypted: bytes) -> UUID:
    """Add a secret as an administrator."""
    secret = uuid4()

    async def work(connection: Connection) -> None:
        await destinations.insert_secret(
            connection, orders.tenant, orders.stream, secret=secret, scheme=scheme, encrypted=encrypted
        )

    transact(orders.access, work, Part.ADMIN)
    return secret


def targets(orders: Place, *streams: int) -> dict[int, Target]:
    """What a worker reads."""

    async def work(connection: Connection) -> dict[int, Target]:
        return await destinations.read_targets(connection, orders.tenant, streams)

    return transact(orders.access, work)


def test_a_target_has_the_secrets_that_sign_now(access: Access):
    """Newest first; an older one goes on signing until its time comes, and not after."""
    orders, device = place(access), place(access, "device-01", mode="pull")
    foreign = place(access, tenant="other")
    first = add_secret(orders, "v1", b"first")
    other_scheme = add_secret(orders, "v1a", b"asymmetric")
    second = add_secret(orders, "v1", b"second")

    async def rotate(connection: Connection, newest: UUID, for_s: int) -> int:
        return await destinations.let_older_sign_until(connection, "acme", orders.stream, newest=newest, for_s=for_s)

    assert transact(access, lambda connection: rotate(connection, second, 60), Part.ADMIN) == 1
    found = targets(orders, orders.stream, device.stream, foreign.stream)
    assert found == {
        orders.stream: Target(
            "acme",
            orders.stream,
            "apollo",
            "orders",
            "push",
            URL,
            disabled=False,
            secrets=[
                EncryptedSecret(second, "v1", b"second"),
                EncryptedSecret(other_scheme, "v1a", b"asymmetric"),
                EncryptedSecret(first, "v1", b"first"),
            ],
        ),
        device.stream: Target("acme", device.stream, "apollo", "device-01", "pull", None, disabled=False, secrets=[]),
    }
    assert "second" not in repr(found)
    third = add_secret(orders, "v1", b"third")
    assert transact(access, lambda connection: rotate(connection, third, 0), Part.ADMIN) == 2
    assert [secret.secret for secret in targets(orders, orders.stream)[orders.stream].secrets] == [third, other_scheme]
    orders.disable()
    assert targets(orders, orders.stream)[orders.stream].disabled


def test_a_rotation_never_lengthens(access: Access):
    """What was to sign for a minute more does not sign for an hour because a further one came."""
    orders = place(access)
    secrets = [add_secret(orders, "v1", b"x") for _ in range(3)]

    async def work(connection: Connection) -> None:
        for newest, for_s in ((secrets[1], 60), (secrets[2], 3600)):
            await destinations.let_older_sign_until(connection, "acme", orders.stream, newest=newest, for_s=for_s)
        now = moment(access)
        third, second, first = await destinations.list_secrets(connection, "acme", orders.stream)
        assert [third.secret, second.secret, first.secret] == secrets[::-1]
        assert third.sign_until is None
        assert second.sign_until is not None
        assert first.sign_until is not None
        assert second.sign_until - now > timedelta(seconds=3500)
        assert first.sign_until - now < timedelta(seconds=61)

    transact(access, work, Part.ADMIN)


def test_an_administrator_never_reads_a_secret(access: Access):
    """Not even encrypted."""
    orders = place(access)
    add_secret(orders, "v1", b"x")

    async def work(connection: Connection) -> None:
        await connection.execute("SELECT encrypted FROM destination_secrets")

    with pytest.raises(errors.InsufficientPrivilege):
        transact(access, work, Part.ADMIN)

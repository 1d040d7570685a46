"""Destinations: made, listed, switched off and on; the secrets that sign for them; how they fare."""

from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from orders import URL, Place, empty, moment, place, settled, transact
from psycopg import errors

from postseal.postgres import destinations
from postseal.postgres.access import Access
from postseal.postgres.database import Part
from postseal.postgres.destinations import Destination, EncryptedSecret, ListedSecret, TargetRow
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
    """Either or both, of this tenant's; what is not given stays."""
    orders = place(access)

    async def work(connection: Connection, tenant: str, url: str | None, max_pending: int | None) -> None:
        await destinations.change(connection, tenant, orders.stream, url=url, max_pending=max_pending)

    for tenant, url, max_pending, expected in (
        ("acme", "https://new.example/", 5, ("https://new.example/", 5)),
        ("acme", None, 6, ("https://new.example/", 6)),
        ("acme", URL, None, (URL, 6)),
        ("other", "https://evil.example/", 7, (URL, 6)),
    ):
        transact(access, lambda connection, t=tenant, u=url, m=max_pending: work(connection, t, u, m), Part.ADMIN)
        assert (found(orders).url, found(orders).max_pending) == expected


def test_what_a_retired_device_pulls_is_disabled(access: Access):
    """In each project, and for ever; one that was disabled keeps its time. No other device's, and nothing pushed."""
    mine = [place(access, "d1", project=project, mode="pull") for project in ("apollo", "gemini")]
    others = [
        place(access, "d2", mode="pull"),
        place(access, "d1", tenant="other", mode="pull"),
        place(access, "d1", project="mercury"),
    ]
    mine[1].disable()
    before = found(mine[1]).disabled_at

    async def work(connection: Connection) -> dict[str, int]:
        return await destinations.retire_of_device(connection, "acme", "d1")

    assert transact(access, work, Part.ADMIN) == {each.project: each.stream for each in mine}
    assert [found(each).disabled_reason for each in mine] == ["retired", "retired"]
    assert (found(mine[0]).disabled_at is None, found(mine[1]).disabled_at) == (False, before)
    assert [found(each).disabled_reason for each in others] == [None, None, None]


def add_secret(orders: Place, scheme: str, encrypted: bytes) -> UUID:
    """Add a secret as an administrator."""
    secret = uuid4()

    async def work(connection: Connection) -> None:
        await destinations.insert_secret(
            connection, orders.tenant, orders.stream, secret=secret, scheme=scheme, encrypted=encrypted
        )

    transact(orders.access, work, Part.ADMIN)
    return secret


def listed_secrets(orders: Place) -> list[ListedSecret]:
    """What an administrator sees of the secrets, newest first."""
    return transact(
        orders.access,
        lambda connection: destinations.list_secrets(connection, orders.tenant, orders.stream),
        Part.ADMIN,
    )


def let_older_sign(orders: Place, newest: UUID, for_s: int) -> int:
    """Let all secrets but the newest of its scheme sign so many seconds more; returns how many there are."""

    async def work(connection: Connection) -> int:
        return await destinations.let_older_sign_until(
            connection, orders.tenant, orders.stream, newest=newest, for_s=for_s
        )

    return transact(orders.access, work, Part.ADMIN)


def targets(orders: Place, *streams: int) -> dict[int, TargetRow]:
    """What a worker reads."""

    async def work(connection: Connection) -> dict[int, TargetRow]:
        return await destinations.read_targets(connection, orders.tenant, streams)

    return transact(orders.access, work)


def test_a_target_has_the_secrets_that_sign_now(access: Access):
    """Newest first; an older one goes on signing until its time comes, and not after."""
    orders, device = place(access), place(access, "device-01", mode="pull")
    foreign = place(access, tenant="other")
    add_secret(orders, "v1", b"first")
    add_secret(orders, "v1a", b"asymmetric")
    second = add_secret(orders, "v1", b"second")

    assert let_older_sign(orders, second, 60) == 1
    found = targets(orders, orders.stream, device.stream, foreign.stream)
    assert found == {
        orders.stream: TargetRow(
            "acme",
            orders.stream,
            "apollo",
            "orders",
            "push",
            URL,
            disabled=False,
            secrets=[
                EncryptedSecret("v1", b"second"),
                EncryptedSecret("v1a", b"asymmetric"),
                EncryptedSecret("v1", b"first"),
            ],
        ),
        device.stream: TargetRow(
            "acme", device.stream, "apollo", "device-01", "pull", None, disabled=False, secrets=[]
        ),
    }
    assert "second" not in repr(found)
    third = add_secret(orders, "v1", b"third")
    assert let_older_sign(orders, third, 0) == 2
    signing = targets(orders, orders.stream)[orders.stream].secrets
    assert [secret.encrypted for secret in signing] == [b"third", b"asymmetric"]
    orders.disable()
    assert targets(orders, orders.stream)[orders.stream].disabled


def test_a_rotation_never_lengthens(access: Access):
    """What was to sign for a minute more does not sign for an hour because a further one came."""
    orders = place(access)
    secrets = [add_secret(orders, "v1", b"x")]

    for for_s, older in ((60, 1), (3600, 2)):
        secrets.append(add_secret(orders, "v1", b"x"))
        assert let_older_sign(orders, secrets[-1], for_s) == older
    now = moment(access)
    third, second, first = listed_secrets(orders)
    assert [third.secret, second.secret, first.secret] == secrets[::-1]
    assert third.sign_until is None
    assert second.sign_until is not None
    assert first.sign_until is not None
    assert second.sign_until - now > timedelta(seconds=3500)
    assert first.sign_until - now < timedelta(seconds=61)


def test_the_newest_alone_signs_on(access: Access):
    """Even where the clock went back, so that an older one bears a later time."""
    orders = place(access)
    older, newest = add_secret(orders, "v1", b"older"), add_secret(orders, "v1", b"newest")
    later = "UPDATE destination_secrets SET created_at = created_at + interval '1 hour' WHERE encrypted = 'older'"
    orders.as_owner(later)

    assert let_older_sign(orders, newest, 60) == 1
    assert {each.secret: each.sign_until is None for each in listed_secrets(orders)} == {older: False, newest: True}


def test_secrets_that_sign_no_more_are_deleted(access: Access):
    """And no others; of this destination."""
    orders, others = place(access), place(access, "others")
    add_secret(orders, "v1", b"ended")
    ending, signing = (add_secret(orders, "v1", name) for name in (b"ending", b"signing"))
    kept = add_secret(others, "v1", b"ended")
    for name, at in (("ended", "-1 second"), ("ending", "1 hour")):
        change = f"UPDATE destination_secrets SET sign_until = clock_timestamp() + interval '{at}'"  # noqa: S608
        orders.as_owner(f"{change} WHERE encrypted = '{name}'")

    async def delete(connection: Connection) -> None:
        await destinations.delete_ended_secrets(connection, "acme", orders.stream)

    transact(access, delete, Part.ADMIN)
    assert {each.secret for each in listed_secrets(orders)} == {ending, signing}
    assert [each.secret for each in listed_secrets(others)] == [kept]


def test_an_administrator_never_reads_a_secret(access: Access):
    """Not even encrypted."""
    orders = place(access)
    add_secret(orders, "v1", b"x")

    async def work(connection: Connection) -> None:
        await connection.execute("SELECT encrypted FROM destination_secrets")

    with pytest.raises(errors.InsufficientPrivilege):
        transact(access, work, Part.ADMIN)

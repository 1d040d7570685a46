"""Destinations: changed, disabled and enabled however often, given new secrets; what becomes of a retired device's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from acts import do, scalar, trail

from fleet import as_owner, enrol
from outgoing import URL, Destination, new_destination
from postseal.admin import destinations, devices
from postseal.admin.actor import Actor
from postseal.admin.secrets import MAX_SECRETS, ShownSecret
from postseal.errors import AdminError
from postseal.outbound.holding import move_mail
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.senders import Scheme
from postseal.senders.secrets import DeploymentKey
from until import until_async, waits_for_lock

pytestmark = pytest.mark.anyio

ADA = Actor("os:ada")
KEY = DeploymentKey(bytes(range(32)))
ORDERS = ("acme", "apollo", "orders")
NEW_URL = "https://elsewhere.example.net/hook"


async def rotate(database: Database, *, schemes: list[Scheme] | None = None, overlap_s: int = 60) -> list[ShownSecret]:
    """New secrets of orders; of v1 where no scheme is named."""
    return await do(
        database,
        destinations.rotate_secret,
        ADA,
        *ORDERS,
        schemes=schemes or [Scheme.V1],
        overlap_s=overlap_s,
        key=KEY,
    )


def secrets_of(destination: Destination) -> list[tuple[str, str, bool]]:
    """Name, scheme and whether it signs until further notice, of all that are kept; the oldest first."""
    with as_owner(destination.access) as owner:
        return owner.execute(
            "SELECT secret::text, scheme, sign_until IS NULL FROM destination_secrets"
            " WHERE tenant = %s AND stream = %s ORDER BY created_at",
            [destination.tenant, destination.stream],
        ).fetchall()


def fill(destination: Destination, mode: str, count: int = 3) -> None:
    """Queue so many deliveries, in the lane of an enabled destination."""
    with as_owner(destination.access) as owner:
        owner.execute(
            "INSERT INTO queue (tenant, stream, sequence, lane, due_at, attempt_limit)"
            " SELECT %s, %s, n, %s, clock_timestamp(), 8 FROM generate_series(1, %s) n",
            [destination.tenant, destination.stream, mode, count],
        )


def lanes_of(destination: Destination) -> list[str]:
    """Where its mail waits."""
    with as_owner(destination.access) as owner:
        rows = owner.execute(
            "SELECT DISTINCT lane FROM queue WHERE tenant = %s AND stream = %s",
            [destination.tenant, destination.stream],
        ).fetchall()
    return [lane for (lane,) in rows]


async def refused(act: Awaitable[Any]) -> tuple[Reason, str]:
    """Why an act was refused."""
    with pytest.raises(AdminError) as error:
        await act
    return error.value.reason, str(error.value)


async def test_of_two_rotations_at_once_the_later_one_wins(database: Database, access: Access) -> None:
    """They take turns, so that one secret alone signs until further notice."""
    orders = new_destination(access)
    await rotate(database)
    with as_owner(access) as owner, owner.transaction():
        owner.execute("SELECT FROM destinations WHERE stream = %s FOR NO KEY UPDATE", [orders.stream])
        rotating = [asyncio.create_task(rotate(database)) for _ in range(2)]
        await until_async(lambda: waits_for_lock(access), within_s=10)
    shown = {str(made.secret) for [made] in await asyncio.gather(*rotating)}
    kept = secrets_of(orders)
    assert [signs for _, _, signs in kept] == [False, False, True]
    assert {secret for secret, _, _ in kept[1:]} == shown


async def test_few_secrets_sign_at_once(database: Database, access: Access) -> None:
    """A rotation too many is refused and changes nothing; one without an overlap always goes, and ends the others."""
    orders = new_destination(access)
    [asymmetric] = await rotate(database, schemes=[Scheme.V1A])
    for _ in range(MAX_SECRETS - 1):
        await rotate(database)
    before = secrets_of(orders)
    assert len(before) == MAX_SECRETS
    reason, line = await refused(rotate(database))
    assert reason is Reason.CONFLICT
    assert "at most 8 may" in line
    assert secrets_of(orders) == before
    [newest] = await rotate(database, overlap_s=0)
    assert secrets_of(orders) == [(str(asymmetric.secret), "v1a", True), (str(newest.secret), "v1", True)]


async def test_a_destination_is_changed(database: Database, access: Access) -> None:
    """The URL or the room or both; the trail says that the URL is a new one, and not which."""
    new_destination(access, max_pending=5)
    change = destinations.change
    for url, max_pending, expected, new_url in (
        (NEW_URL, None, (NEW_URL, 5), True),
        (None, 7, (NEW_URL, 7), False),
        (NEW_URL, 8, (NEW_URL, 8), False),
        (URL, 9, (URL, 9), True),
    ):
        told = await do(database, change, ADA, *ORDERS, url=url, max_pending=max_pending, allow_http=False)
        found = await do(database, destinations.require, *ORDERS)
        assert (told.url, told.max_pending) == (found.url, found.max_pending) == expected
        assert trail(access, "acme")[-1] == (
            "os:ada",
            "destination.change",
            {"destination": "orders", "newUrl": new_url, "maxPending": expected[1]},
        )


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("orders", {"url": None}, Reason.REQUEST_INVALID),
        ("orders", {"url": "http://receiver.example.net/"}, Reason.REQUEST_INVALID),
        ("orders", {"url": "https://user:hush@receiver.example.net/"}, Reason.REQUEST_INVALID),
        ("d1", {"url": NEW_URL}, Reason.CONFLICT),
        ("nobody", {"max_pending": 3}, Reason.NOT_FOUND),
    ],
)
async def test_what_is_not_changed(
    database: Database, access: Access, name: str, change: dict[str, Any], reason: Reason
) -> None:
    """Nothing, an address that nothing may be pushed to, the address of one that is pulled from, one that is not."""
    new_destination(access)
    new_destination(access, "d1", mode="pull")
    wanted = {"url": None, "max_pending": None} | change
    why, line = await refused(
        do(database, destinations.change, ADA, "acme", "apollo", name, allow_http=False, **wanted)
    )
    assert why is reason
    assert "hush" not in line
    assert trail(access, "acme") == []


async def test_what_is_pulled_from_gets_other_room(database: Database, access: Access) -> None:
    """It has no address and needs none."""
    new_destination(access, "d1", mode="pull")
    changed = await do(
        database, destinations.change, ADA, "acme", "apollo", "d1", url=None, max_pending=3, allow_http=False
    )
    assert (changed.mode, changed.url, changed.max_pending) == ("pull", None, 3)


@pytest.mark.parametrize(
    ("act", "stands", "lane", "left"),
    [
        (destinations.disable, "disabled_at = now(), disabled_reason = 'gone'", "push", "held"),
        (destinations.enable, "disabled_at = NULL, disabled_reason = NULL", "held", "push"),
    ],
    ids=["disable", "enable"],
)
async def test_a_switch_that_was_cut_off_is_turned_to_the_end(
    database: Database, access: Access, act: Callable[..., Any], stands: str, lane: str, left: str
) -> None:
    """Where the destination stands so already, the act moves the mail that is left, and is no further act."""
    orders = new_destination(access)
    fill(orders, lane)
    with as_owner(access) as owner:
        owner.execute(f"UPDATE destinations SET {stands}".encode())  # noqa: S608
    before = await do(database, destinations.require, *ORDERS)
    found = await do(database, act, ADA, *ORDERS)
    await move_mail(database, "acme", found.stream)
    assert lanes_of(orders) == [left]
    after = await do(database, destinations.require, *ORDERS)
    assert (after.disabled_at, after.disabled_reason) == (before.disabled_at, before.disabled_reason)
    assert trail(access, "acme") == []


async def test_a_retired_device_pulls_no_more(database: Database, access: Access) -> None:
    """What is for it is held, in each of its projects and for ever; the trail of each project says so."""
    enrol(access, "d1")
    enrol(access, "d2")
    mine = [new_destination(access, "d1", project=project, mode="pull") for project in ("apollo", "zeus")]
    other = new_destination(access, "d2", mode="pull")
    for each in (*mine, other):
        fill(each, "pull")
    for stream in await do(database, devices.retire, ADA, "acme", "d1"):
        await move_mail(database, "acme", stream)
    assert [lanes_of(each) for each in (*mine, other)] == [["held"], ["held"], ["pull"]]
    for each in mine:
        found = await do(database, destinations.require, "acme", each.project, "d1")
        assert found.disabled_reason == "retired"
    assert trail(access, "acme") == [
        ("os:ada", "device.retire", {"device": "d1"}),
        ("os:ada", "destination.disable", {"destination": "d1", "reason": "retired"}),
        ("os:ada", "destination.disable", {"destination": "d1", "reason": "retired"}),
    ]
    with as_owner(access) as owner:
        projects = owner.execute("SELECT project FROM audit_events WHERE action = 'destination.disable' ORDER BY id")
        assert projects.fetchall() == [("apollo",), ("zeus",)]
    why, line = await refused(do(database, destinations.enable, ADA, "acme", "apollo", "d1"))
    assert why is Reason.CONFLICT
    assert "device 'd1' is retired" in line
    await do(database, destinations.disable, ADA, "acme", "apollo", "d1")
    assert (await do(database, destinations.require, "acme", "apollo", "d1")).disabled_reason == "retired"


async def test_a_retired_device_gets_no_destination(database: Database, access: Access) -> None:
    """Nor one whose retirement is under way: who makes it waits, and then sees it."""
    device = enrol(access, "d1")
    with as_owner(access) as owner, owner.transaction():
        owner.execute("UPDATE streams SET retired = true WHERE stream = %s", [device.stream])
        making = asyncio.create_task(do(database, destinations.create_pull, ADA, "acme", "apollo", "d1", max_pending=5))
        await until_async(lambda: waits_for_lock(access), within_s=10)
    why, line = await refused(making)
    assert why is Reason.CONFLICT
    assert "is retired" in line
    with as_owner(access) as owner:
        assert scalar(owner, "SELECT count(*) FROM destinations") == 0

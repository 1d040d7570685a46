"""Acts on streams and keys wait for what is being taken in, and what comes after them sees them."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from acts import do, scalar, trail

from fleet import Device, as_owner, enrol, locked_stream
from postseal.admin import devices, keys, streams
from postseal.admin.actor import Actor
from postseal.envelope.canonical import MAX_INTEGER
from postseal.errors import AdminError
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.postgres.ingest import bitmap_to_bytes
from postseal.service import running_service
from postseal.settings import Settings
from until import until_async, waits_for_lock

pytestmark = pytest.mark.anyio

ADA = Actor("os:ada")


def two_streams(access: Access) -> tuple[Device, Device]:
    """One device with a stream in each of two projects, in the order of their ids."""
    device = enrol(access, "d1")
    with as_owner(access) as owner:
        owner.execute("INSERT INTO projects VALUES ('acme', 'gemini')")
        stream = scalar(
            owner, "INSERT INTO streams (tenant, project, producer) VALUES ('acme', 'gemini', 'd1') RETURNING stream"
        )
    return device, Device("acme", "gemini", "d1", device.seed, stream, device.token)


def stand_at(access: Access, device: Device, *, floor: int = 0, contiguous: int, highest: int, above: int = 0) -> None:
    """Put a stream somewhere."""
    with as_owner(access) as owner:
        owner.execute(
            "UPDATE streams SET floor = %s, contiguous = %s, highest = %s, above = %s WHERE stream = %s",
            [floor, contiguous, highest, bitmap_to_bytes(above), device.stream],
        )


@pytest.mark.parametrize(
    ("act", "row"),
    [
        (lambda device: (keys.revoke, ADA, "acme", device.keyid), "keys"),
        (lambda device: (keys.retire, ADA, "acme", device.keyid), "keys"),
        (lambda device: (devices.retire, ADA, "acme", device.name), "streams"),
    ],
    ids=["key revoke", "key retire", "device retire"],
)
async def test_all_streams_are_locked_in_order_before_anything_changes(
    database: Database, access: Access, act: Callable[[Device], tuple[Any, ...]], row: str
) -> None:
    """While the last stream is taken, the act holds the first and has changed nothing; then it goes on."""
    first, last = two_streams(access)
    with locked_stream(access, last):
        acting = asyncio.create_task(do(database, *act(first)))
        await until_async(lambda: waits_for_lock(access))
        with as_owner(access) as owner:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                owner.execute("SELECT 1 FROM streams WHERE stream = %s FOR UPDATE NOWAIT", [first.stream])
            # Nobody holds the key's row: its state was not changed yet.
            owner.execute("SELECT 1 FROM keys WHERE keyid = %s FOR UPDATE NOWAIT", [first.keyid])
        assert not acting.done()
    await acting
    with as_owner(access) as owner:
        state = scalar(owner, "SELECT state FROM keys WHERE keyid = %s", [first.keyid])
        retired = scalar(owner, "SELECT bool_and(retired) FROM streams WHERE producer = 'd1'")
    assert (state != "active", retired) == ((True, False) if row == "keys" else (False, True))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda device: (keys.revoke, ADA, "acme", device.keyid), Reason.KEY_REVOKED),
        (lambda device: (keys.retire, ADA, "acme", device.keyid), Reason.KEY_RETIRED),
        (lambda device: (devices.retire, ADA, "acme", device.name), Reason.STREAM_RETIRED),
    ],
    ids=["key revoke", "key retire", "device retire"],
)
async def test_a_running_service_heeds_the_act_at_once(
    database: Database, access: Access, act: Callable[[Device], tuple[Any, ...]], reason: Reason
) -> None:
    """The next new envelope is refused although the service remembers key and credential; a duplicate is answered."""
    device = enrol(access, "d1")
    body = device.envelope(1)
    async with running_service(Settings(), access) as service:
        assert (await service.inbox.receive(device.inbound(body))).outcome is Outcome.ACCEPTED
        await do(database, *act(device))
        refusal = await service.inbox.receive(device.inbound(device.envelope(2)))
        assert refusal.reason is reason
        assert (await service.inbox.receive(device.inbound(body))).outcome is Outcome.DUPLICATE


async def test_keys_only_fall(database: Database, access: Access) -> None:
    """active, verify-only, revoked: each step once and never back; each is audited with both states."""
    device = enrol(access, "d1")
    await do(database, keys.retire, ADA, "acme", device.keyid)
    with pytest.raises(AdminError, match="the key is verify-only already"):
        await do(database, keys.retire, ADA, "acme", device.keyid)
    await do(database, keys.revoke, ADA, "acme", device.keyid)
    for act in (keys.retire, keys.revoke):
        with pytest.raises(AdminError, match="the key is revoked already"):
            await do(database, act, ADA, "acme", device.keyid)
    details = [(action, detail["from"], detail["to"]) for _, action, detail in trail(access, "acme")]
    assert details == [("key.retire", "active", "verify-only"), ("key.revoke", "verify-only", "revoked")]


async def test_a_retiring_key_can_be_retired_at_once(database: Database, access: Access) -> None:
    """Its time is taken away with its state."""
    device = enrol(access, "d1")
    with as_owner(access) as owner:
        owner.execute("UPDATE keys SET state = 'retiring', accept_until = clock_timestamp() + interval '1 hour'")
    await do(database, keys.retire, ADA, "acme", device.keyid)
    [key] = await do(database, keys.list_of_tenant, "acme", window_s=86_400)
    assert (key.state, key.accept_until) == ("verify-only", None)


async def test_the_floor_closes_holes(database: Database, access: Access) -> None:
    """It rises to the given sequence, the cursor advances through what is then contiguous, and the trail says why."""
    device = enrol(access, "d1")
    # 1 and 2 are retained, and 5, 6 and 9 above the hole.
    stand_at(access, device, contiguous=2, highest=9, above=0b1001100)
    stream = await do(database, streams.show, "acme", "apollo", "d1")
    assert stream.cursor.holes() == [(3, 4), (7, 8)]

    raised = await do(database, streams.raise_floor, ADA, "acme", "apollo", "d1", floor=4, reason="disk lost, see 4711")
    assert (raised.cursor.floor, raised.cursor.contiguous, raised.cursor.highest) == (4, 6, 9)
    assert raised == await do(database, streams.show, "acme", "apollo", "d1")
    assert trail(access, "acme") == [
        (
            "os:ada",
            "stream.raise-floor",
            {"producer": "d1", "reason": "disk lost, see 4711", "forced": False, "from": 0, "to": 4},
        )
    ]


@pytest.mark.parametrize(
    ("floor", "reason", "line"),
    [
        (4, "lost", "the floor is at 4 and only rises"),
        (3, "lost", "the floor is at 4 and only rises"),
        (10, "lost", "10 is above the highest sequence, 9: it must be forced"),
        (MAX_INTEGER + 1, "lost", "a sequence is at most"),
        (5, " ", "the reason is one line"),
        (5, "two\nlines", "the reason is one line"),
        (5, "x" * 501, "the reason is one line"),
    ],
)
async def test_a_floor_that_may_not_be_is_refused(
    database: Database, access: Access, floor: int, reason: str, line: str
) -> None:
    """It only rises, to the highest sequence at most, and with a reason that fits a line."""
    device = enrol(access, "d1")
    stand_at(access, device, floor=4, contiguous=6, highest=9, above=0b100)
    before = await do(database, streams.show, "acme", "apollo", "d1")
    with pytest.raises(AdminError, match=line):
        await do(database, streams.raise_floor, ADA, "acme", "apollo", "d1", floor=floor, reason=reason)
    assert await do(database, streams.show, "acme", "apollo", "d1") == before
    assert trail(access, "acme") == []


async def test_force_raises_the_floor_above_all(database: Database, access: Access) -> None:
    """Cursor and highest go with it, so that the next sequence is the one behind it."""
    device = enrol(access, "d1")
    stand_at(access, device, contiguous=2, highest=5, above=0b100)
    raised = await do(
        database, streams.raise_floor, ADA, "acme", "apollo", "d1", floor=20, reason="new disk", force=True
    )
    assert (raised.cursor.floor, raised.cursor.contiguous, raised.cursor.highest) == (20, 20, 20)
    assert raised.cursor.holes() == []


async def test_the_floor_rises_over_what_was_taken_in_meanwhile(database: Database, access: Access) -> None:
    """A group that commits while the act waits for its lock is kept: the act works on the cursor after it."""
    device = enrol(access, "d1")
    stand_at(access, device, contiguous=1, highest=4, above=0b100)
    with locked_stream(access, device) as group:
        raising = asyncio.create_task(
            do(database, streams.raise_floor, ADA, "acme", "apollo", "d1", floor=2, reason="lost")
        )
        await until_async(lambda: waits_for_lock(access))
        group.execute("UPDATE streams SET highest = 6, above = %s WHERE stream = %s", [b"\x14", device.stream])
    raised = await raising
    assert (raised.cursor.floor, raised.cursor.contiguous, raised.cursor.highest) == (2, 2, 6)
    assert raised.cursor.holes() == [(3, 3), (5, 5)]
    assert raised == await do(database, streams.show, "acme", "apollo", "d1")

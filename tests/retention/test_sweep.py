"""The sweep beside a running service: what goes, what stays for ever, and who is not disturbed by it."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleet import ACCOUNT, Device, as_owner, enrol, stored
from postseal.admin import holds
from postseal.admin.actor import Actor
from postseal.errors import Unavailable
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.inbound.reading import ClosedRange, read_page
from postseal.outcomes import Outcome, Reason
from postseal.postgres import payloads as sql
from postseal.postgres.access import Access
from postseal.postgres.payloads import Swept
from postseal.postgres.reading import EnvelopeRow
from postseal.retention import Counts, Sweeper, composed_sweep, running_sweep
from postseal.service import Service
from postseal.settings import Settings
from postseal.verdicts import Receipt, Refusal
from until import until, until_async, waits_for_lock

pytestmark = pytest.mark.anyio

QUICK = Settings(sweep_pause_s=0.01)
POSTSEAL = Path(sys.executable).with_name("postseal")
DEADLINE_S = 40.0


async def send(service: Service, device: Device, body: bytes) -> Outcome | Reason:
    """What became of one envelope."""
    match await service.inbox.receive(device.inbound(body)):
        case Receipt() as receipt:
            return receipt.outcome
        case Refusal() as refusal:
            return refusal.reason


def let_expire(access: Access) -> None:
    """Let the time of everything that has one have passed a second ago."""
    with as_owner(access) as owner:
        owner.execute("UPDATE payloads SET expires_at = clock_timestamp() - interval '1 second'")


def stock(access: Access, device: Device, count: int) -> None:
    """So many expired payloads in the stream of a device, behind all that it will send."""
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO payloads SELECT %s, %s, 1000000 + n, clock_timestamp() - interval '1 hour', 'x', 'y'"
            " FROM generate_series(1, %s) AS n",
            [device.tenant, device.stream, count],
        )


def payloads(access: Access, *tenants: str) -> int:
    """How many there are, of all or of these tenants."""
    with as_owner(access) as owner:
        row = owner.execute(
            "SELECT count(*) FROM payloads WHERE %(all)s OR tenant = ANY (%(tenants)s)",
            {"all": not tenants, "tenants": list(tenants)},
        ).fetchone()
    assert row is not None
    return row[0]


async def sweep(access: Access) -> Counts:
    """Sweep until nothing is left."""
    async with composed_sweep(QUICK, access) as sweeper:
        return await sweeper.once()


async def read(service: Service, device: Device, *, after: int = 0, limit: int = 100) -> list[EnvelopeRow]:
    """What a consumer of the project reads, which is never a closed range here."""
    known = VerifiedIdentity(device.tenant, ACCOUNT, None, Role.CONSUMER, "c", frozenset({device.project}))
    page = await read_page(service.reads, known, device.project, device.name, after=after, limit=limit)
    assert not [item for item in page.items if isinstance(item, ClosedRange)]
    return [item for item in page.items if isinstance(item, EnvelopeRow)]


async def test_expiry_makes_no_old_event_new(service: Service, device: Device, access: Access) -> None:
    """Sent, expired, swept, and sent again it is a duplicate; its id, key and sequence are taken for ever."""
    payload = device.payload(1)
    body = device.envelope(1, **payload)
    assert await send(service, device, body) is Outcome.ACCEPTED
    before = stored(access, device)
    let_expire(access)
    assert (await sweep(access)).swept == 1
    after = stored(access, device)
    assert (after.payloads, after.sequences, after.cursor, after.audits) == (
        set(),
        before.sequences,
        before.cursor,
        before.audits,
    )
    assert await send(service, device, body) is Outcome.DUPLICATE
    other = {"data": payload["data"] | {"queueDepth": 1}}
    assert await send(service, device, device.envelope(1, **payload | other)) is Reason.EVENT_CONFLICT
    same_key = {"idempotencyKey": payload["idempotencyKey"]}
    assert await send(service, device, device.envelope(2, **same_key)) is Reason.IDEMPOTENCY_CONFLICT
    assert await send(service, device, device.envelope(1)) is Reason.SEQUENCE_CONFLICT
    assert await send(service, device, device.envelope(2)) is Outcome.ACCEPTED
    assert stored(access, device).payloads == {2}


async def test_readers_see_the_expiry_not_the_sweep(service: Service, device: Device, access: Access) -> None:
    """Expired from its time on, before the sweep and behind it; its event identity stays."""
    for sequence in (1, 2):
        await send(service, device, device.envelope(sequence))
    [whole, _] = await read(service, device)
    with as_owner(access) as owner:
        owner.execute("UPDATE payloads SET expires_at = now() WHERE sequence = 1")
    for _ in range(2):
        [first, second] = await read(service, device)
        assert (first.sequence, first.payload, first.signature) == (1, None, None)
        assert first.event_identity == whole.event_identity
        assert second.payload is not None
        await sweep(access)
    assert stored(access, device).payloads == {2}


async def test_a_hold_keeps_and_shows_what_has_expired(service: Service, device: Device, access: Access) -> None:
    """Until the last one is released: then it reads as expired, and goes. What is of others goes meanwhile."""
    other = enrol(access, tenant="beta")
    for each in (device, other):
        await send(service, each, each.envelope(1))
    let_expire(access)
    for name in ("case-1", "case-2"):
        await service.admin.transact(
            lambda connection, name=name: holds.place(connection, Actor("os:ada"), "acme", name, reason="a claim")
        )
    for name in ("case-1", "case-2"):
        assert (await sweep(access)).swept == (name == "case-1")
        [kept] = await read(service, device)
        assert kept.payload is not None
        assert (await read(service, other))[0].payload is None
        await service.admin.transact(
            lambda connection, name=name: holds.release(connection, Actor("os:ada"), "acme", name, reason="settled")
        )
    assert (await read(service, device))[0].payload is None
    assert (await sweep(access)).swept == 1
    assert payloads(access) == 0


async def test_a_hold_waits_for_the_batch_that_runs(service: Service, device: Device, access: Access) -> None:
    """Once it is answered nothing of the tenant goes, by a sweep that was under way neither."""
    stock(access, device, 5)

    async def place() -> None:
        await service.admin.transact(
            lambda connection: holds.place(connection, Actor("os:ada"), "acme", "case", reason="a claim")
        )

    async with under_way(access) as batch:
        placing = asyncio.create_task(place())
        await until_async(lambda: waits_for_the_sweep(access))
    await placing
    await batch
    assert payloads(access) == 0
    stock(access, device, 5)
    assert (await sweep(access)).swept == 0


def waits_for_the_sweep(access: Access) -> bool:
    """Whether somebody waits for the sweep's lock."""
    with as_owner(access) as owner:
        row = owner.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database"
            " WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
        ).fetchone()
    return row is not None and row[0] > 0


@asynccontextmanager
async def under_way(access: Access) -> AsyncIterator[asyncio.Task[Counts]]:
    """A sweep in the middle of its batch, which waits for the row of one payload until the block ends."""
    with as_owner(access) as owner, owner.transaction():
        owner.execute("SELECT FROM payloads ORDER BY sequence DESC LIMIT 1 FOR UPDATE")
        batch = asyncio.create_task(sweep(access))
        await until_async(lambda: waits_for_lock(access))
        yield batch


async def test_nobody_waits_for_a_batch(service: Service, device: Device, access: Access) -> None:
    """While one is under way envelopes are acknowledged and read, in the very stream whose payloads it deletes."""
    await send(service, device, device.envelope(1))
    stock(access, device, 5)
    async with under_way(access) as batch:
        assert await send(service, device, device.envelope(2)) is Outcome.ACCEPTED
        assert [row.payload is not None for row in await read(service, device)] == [True, True]
        assert not batch.done()
    assert (await batch).swept == 5
    assert stored(access, device).payloads == {1, 2}


async def test_two_sweeps_delete_each_once(device: Device, access: Access) -> None:
    """They take turns: together they delete what there is, and both come to their end."""
    stock(access, device, 12_000)
    async with asyncio.timeout(DEADLINE_S):
        both = await asyncio.gather(sweep(access), sweep(access))
    assert sum(counts.swept for counts in both) == 12_000
    assert payloads(access) == 0


async def test_a_tenants_many_do_not_keep_others_waiting(device: Device, access: Access) -> None:
    """Twenty tenants have a few each beside one with thousands: theirs are gone with the first step."""
    stock(access, device, 3000)
    others = [f"tenant-{number}" for number in range(20)]
    for tenant in others:
        stock(access, enrol(access, tenant=tenant), 3)
    async with composed_sweep(QUICK, access) as sweeper:
        await sweeper._step()
        assert payloads(access, *others) == 0
        assert payloads(access, "acme") > 2000


async def test_a_reader_beside_the_sweep_sees_each_envelope(
    service: Service, device: Device, access: Access, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole or expired, none skipped, and never whole again once it was expired."""
    monkeypatch.setattr("postseal.retention.LOOK_EVERY_S", 0.01)
    order = random.Random(seed)
    bodies = b"\n".join(device.envelope(sequence) for sequence in range(1, 101))
    await service.inbox.receive_batch(device.inbound(bodies))
    expired: set[int] = set()
    async with running_sweep(QUICK, access) as sweeper:
        monkeypatch.setattr("postseal.retention.MAX_BATCH", 10)
        for first in range(1, 101, 20):
            with as_owner(access) as owner:
                # None that the sweep is about to delete: it could not end while this thread waits for it.
                owner.execute(
                    "UPDATE payloads SET expires_at = now() WHERE sequence BETWEEN %s AND %s", [first, first + 19]
                )
            for _ in range(order.randint(2, 5)):
                rows = await read(service, device)
                assert [row.sequence for row in rows] == list(range(1, 101))
                seen = {row.sequence for row in rows if row.payload is None}
                assert expired <= seen
                expired = seen
            assert expired == set(range(1, first + 20))
        await until_async(lambda: sweeper.counts.swept == 100)


async def test_a_failed_step_is_tried_again_with_half(
    device: Device, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that a slow disk does not finish in time is halved until it is small enough; what failed is counted."""
    monkeypatch.setattr("postseal.retention.LOOK_EVERY_S", 0.01)
    stock(access, device, 700)
    async with composed_sweep(QUICK, access) as sweeper:
        whole, asked = Sweeper._delete, list[int]()

        async def slow(self: Sweeper, most: int) -> object:
            asked.append(most)
            if most > 300:
                raise Unavailable("too slow")
            return await whole(self, most)

        monkeypatch.setattr(Sweeper, "_delete", slow)
        stop = asyncio.Event()
        running = asyncio.create_task(sweeper.run(stop))
        await until_async(lambda: payloads(access) == 0)
        stop.set()
        await running
    assert asked[:4] == [1000, 500, 250, 500]
    assert sweeper.counts.swept == 700
    assert sweeper.counts.failed >= 3


async def test_a_sweep_that_is_stopped_ends_its_batch(device: Device, access: Access) -> None:
    """Whole, and begins no further one."""
    stock(access, device, 1500)
    asked = asyncio.Event()

    async def run() -> Counts:
        async with running_sweep(Settings(sweep_pause_s=60), access) as sweeper:
            await asked.wait()
        return sweeper.counts

    with as_owner(access) as owner, owner.transaction():
        owner.execute("SELECT FROM payloads ORDER BY sequence LIMIT 1 FOR UPDATE")
        running = asyncio.create_task(run())
        await until_async(lambda: waits_for_lock(access))
        asked.set()
    async with asyncio.timeout(DEADLINE_S):
        assert (await running).swept == 1000
    assert payloads(access) == 500


def test_killed_in_the_middle_it_breaks_nothing(access: Access) -> None:
    """Of the batch that was under way nothing is gone; the next sweep finds no lock, and deletes all."""
    stock(access, enrol(access), 1500)
    environment = {"POSTSEAL_DATABASE_URL": access.owner, "POSTSEAL_ROLES_FILE": str(access.passfile)}
    with as_owner(access) as owner, owner.transaction():
        owner.execute("SELECT FROM payloads ORDER BY sequence LIMIT 1 FOR UPDATE")
        pid = os.posix_spawn(POSTSEAL, [POSTSEAL, "sweep"], os.environ | environment)
        try:
            until(lambda: waits_for_lock(access))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    until(lambda: not others_at_work(access))
    assert payloads(access) == 1500
    assert asyncio.run(sweep(access)).swept == 1500


def others_at_work(access: Access) -> bool:
    """Whether some other session of this database is in a transaction."""
    with as_owner(access) as owner:
        row = owner.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND state <> 'idle' AND backend_type = 'client backend'"
        ).fetchone()
    return row is not None and row[0] > 0


async def test_what_is_dated_late_in_a_round_gets_another(access: Access, monkeypatch: pytest.MonkeyPatch):
    """A sweep that is to end does not before a whole round has neither dated nor deleted anything."""
    dated, rounds = iter([5, 0]), 0

    async def date_ended(*_: object, **__: object) -> int:
        return next(dated)

    async def delete_expired(*_: object, **__: object) -> Swept:
        nonlocal rounds
        rounds += 1
        return Swept(0, "")

    monkeypatch.setattr(sql, "date_ended", date_ended)
    monkeypatch.setattr(sql, "delete_expired", delete_expired)
    async with composed_sweep(QUICK, access) as sweeper:
        assert (await sweeper.once()).dated == 5
    assert rounds == 2

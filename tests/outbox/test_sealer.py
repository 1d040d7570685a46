"""The sealer makes deliveries of committed intents; what cannot be sealed waits, and keeps nothing else waiting."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from applications import Application, new_application, wanted
from psycopg import sql

from fleet import as_owner
from outgoing import Destination, audited, decision, new_destination, new_tenant, require_whole, signing_key
from postseal.envelope import ed25519
from postseal.envelope.kinds import NO_KINDS
from postseal.outbound.outbox import Outbox
from postseal.outbound.sealer import Sealer
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.rules.delivery import SealCode
from postseal.signing import SigningKeys
from postseal.signing.pem_folder import PemFolder
from until import until_async

pytestmark = pytest.mark.anyio

DEADLINE_S = 20.0


@pytest.fixture
def application(access: Access, destination: Destination) -> Iterator[Application]:
    """A login that may leave intents for project apollo."""
    with new_application(access) as application:
        application.allow()
        yield application


@pytest.fixture
def sealer(outbox: Outbox, database: Database) -> Sealer:
    """A sealer that looks often."""
    return Sealer(outbox, database, poll_s=0.02)


def waiting(access: Access) -> dict[UUID, tuple[str | None, int]]:
    """Code and tries of the intents that wait."""
    with as_owner(access) as owner:
        return {row[0]: (row[1], row[2]) for row in owner.execute("SELECT delivery, code, tries FROM intents")}


def raw(access: Access, data: str = "{}", **columns: Any) -> UUID:
    """An intent as nobody's helper would write it, under the rights of the owner."""
    members = {
        "tenant": "acme",
        "delivery": uuid4(),
        "project": "apollo",
        "destination": "orders",
        "idempotency_key": f"key:{uuid4()}",
        "attempt_limit": None,
        "expires_at": None,
    } | columns
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO intents (tenant, delivery, project, destination, idempotency_key, attempt_limit, expires_at,"
            " data) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
            [*members.values(), data],
        )
    return members["delivery"]


def given_up(access: Access) -> set[UUID]:
    """The intents that are never tried again."""
    with as_owner(access) as owner:
        return {row[0] for row in owner.execute("SELECT delivery FROM intents WHERE due_at = 'infinity'")}


def due_now(access: Access) -> None:
    """Let every intent be due."""
    with as_owner(access) as owner:
        owner.execute("UPDATE intents SET due_at = clock_timestamp()")


async def test_committed_intents_become_deliveries(
    sealer: Sealer, application: Application, access: Access, destination: Destination, public_key: bytes
):
    """Under the intent's own id, with what it says, in the login's name; nothing before the commit, nothing twice."""
    first, second = wanted(attempt_limit=2), wanted()
    with application.connect() as connection:
        connection.execute(*first.psycopg())
        assert await sealer.once() == 0
    application.leave(second)
    with application.connect() as connection:
        connection.execute(*wanted().psycopg())
        connection.rollback()
    assert await sealer.once() == 2
    assert await sealer.once() == 0
    rows = require_whole(destination, public_key)
    assert [(row.delivery, row.idempotency_key, row.attempt_limit) for row in rows] == [
        (first.delivery, first.idempotency_key, 2),
        (second.delivery, second.idempotency_key, 8),
    ]
    assert [row.event["data"] for row in rows] == [first.data, second.data]
    assert waiting(access) == {}
    told = [(f"login:{application.login}", "enqueue", "accepted", row.event_identity) for row in rows]
    assert audited(access) == told


async def test_a_key_that_comes_again(
    sealer: Sealer, application: Application, access: Access, destination: Destination, public_key: bytes
):
    """The same content leaves no second delivery and no intent; other content is given up with its code."""
    first = wanted()
    again = wanted(data=first.data, idempotency_key=first.idempotency_key)
    other = wanted(idempotency_key=first.idempotency_key)
    application.leave(first, again, other)
    assert await sealer.once() == 3
    assert len(require_whole(destination, public_key)) == 1
    assert waiting(access) == {other.delivery: (SealCode.IDEMPOTENCY_CONFLICT, 1)}
    assert given_up(access) == {other.delivery}


POISON: dict[str, tuple[dict[str, Any], SealCode]] = {
    "no object": ({"data": "[1]"}, SealCode.PAYLOAD_INVALID),
    "null": ({"data": "null"}, SealCode.PAYLOAD_INVALID),
    "no kind": ({"data": "{}"}, SealCode.PAYLOAD_INVALID),
    "a depth bomb": ({"data": "[" * 4000 + "]" * 4000}, SealCode.PAYLOAD_INVALID),
    "a deep member": ({"data": '{"kind":' + "[" * 3900 + "]" * 3900 + "}"}, SealCode.PAYLOAD_INVALID),
    "half a surrogate": ({"data": '{"kind":"\\ud800"}'}, SealCode.PAYLOAD_INVALID),
    "a NUL": ({"data": '{"kind":"\\u0000"}'}, SealCode.PAYLOAD_INVALID),
    "a long number": ({"data": '{"kind":' + "9" * 8000 + "}"}, SealCode.PAYLOAD_INVALID),
    "a great float": ({"data": '{"kind":1e999}'}, SealCode.PAYLOAD_INVALID),
    "free text": ({"data": json.dumps(decision(note="x"))}, SealCode.PAYLOAD_INVALID),
    "too much": ({"data": json.dumps(decision(note="x" * 7000))}, SealCode.PAYLOAD_INVALID),
    "no destination": ({"destination": "nowhere"}, SealCode.DESTINATION_UNKNOWN),
    "no project": ({"project": "nowhere"}, SealCode.DESTINATION_UNKNOWN),
    "expired": ({"expires_at": "2020-01-01Z"}, SealCode.EXPIRED),
}


async def test_poison_stops_nothing(
    sealer: Sealer, application: Application, access: Access, destination: Destination, public_key: bytes, seed: int
):
    """Whatever stands in an intent, it waits with its code, and every good one around it is sealed in the same turn."""
    order = list(POISON)
    random.Random(seed).shuffle(order)
    codes: dict[UUID, tuple[str, int]] = {}
    good = [wanted() for _ in order]
    for name, one in zip(order, good, strict=True):
        members, code = POISON[name]
        members = {"data": json.dumps(decision())} | members
        codes[raw(access, **members)] = (code, 1)
        application.leave(one)
    assert await sealer.once() == 2 * len(order)
    assert waiting(access) == codes
    assert given_up(access) == {delivery for delivery, (code, _) in codes.items() if code == SealCode.EXPIRED}
    assert {row.delivery for row in require_whole(destination, public_key)} == {one.delivery for one in good}


async def test_what_is_not_valid_is_given_up_in_time(sealer: Sealer, access: Access, destination: Destination):
    """Another sealer may know its kind, so it is tried ten times."""
    one = raw(access, data='{"kind":"nobodys"}')
    for tries in range(1, 11):
        assert await sealer.once() == 1
        assert waiting(access) == {one: (SealCode.PAYLOAD_INVALID, tries)}
        assert given_up(access) == ({one} if tries == 10 else set())
        if tries < 10:
            due_now(access)
    assert await sealer.once() == 0


async def test_what_the_database_refuses_is_sought_out(
    sealer: Sealer, application: Application, access: Access, destination: Destination, public_key: bytes
):
    """One that fails in the database itself waits alone; those that were taken with it are sealed one by one."""
    before, bad, after = wanted(), wanted(idempotency_key="poison:0001"), wanted()
    with as_owner(access) as owner:
        owner.execute("ALTER TABLE deliveries ADD CHECK (idempotency_key <> 'poison:0001')")
    application.leave(before, bad, after)
    assert await sealer.once() == 3
    assert waiting(access) == {bad.delivery: (SealCode.PAYLOAD_INVALID, 1)}
    assert {row.delivery for row in require_whole(destination, public_key)} == {before.delivery, after.delivery}


async def test_what_waits_is_sealed_once_it_can_be(
    sealer: Sealer, application: Application, access: Access, destination: Destination, folder: Path
):
    """Without a key, a destination or room an intent waits, is not looked at before its time, and is sealed then."""
    small = new_destination(access, "small", max_pending=1)
    first, second, third = wanted(), wanted("later"), wanted("small")
    application.leave(first, second, third)
    assert await sealer.once() == 3
    assert waiting(access) == {
        first.delivery: (SealCode.SIGNING_KEY_MISSING, 1),
        second.delivery: (SealCode.DESTINATION_UNKNOWN, 1),
        third.delivery: (SealCode.SIGNING_KEY_MISSING, 1),
    }
    assert await sealer.once() == 0
    public_key = ed25519.public_key(signing_key(access, folder))
    later = new_destination(access, "later")
    due_now(access)
    fourth = wanted("small")
    application.leave(fourth)
    assert await sealer.once() == 4
    assert waiting(access) == {fourth.delivery: (SealCode.DESTINATION_FULL, 1)}
    assert [len(require_whole(each, public_key)) for each in (destination, small, later)] == [1, 1, 1]


async def test_tenants_take_turns(
    sealer: Sealer, application: Application, access: Access, destination: Destination, public_key: bytes, folder: Path
):
    """A turn seals at most 100 of a tenant, so that nobody's backlog keeps another tenant's intent waiting."""
    new_tenant(access, "zeta")
    other = new_destination(access, tenant="zeta")
    others_key = ed25519.public_key(signing_key(access, folder, "zeta"))
    application.allow(tenant="zeta")
    application.leave(*(wanted() for _ in range(150)), wanted(tenant="zeta"))
    assert await sealer.once() == 101
    assert len(require_whole(destination, public_key)) == 100
    assert len(require_whole(other, others_key)) == 1
    assert await sealer.once() == 50
    assert len(require_whole(destination, public_key)) == 150


class Acmes:
    """Signing keys that are good for every tenant but acme, whose call is another."""

    def __init__(self, folder: Path, sign: Callable[[], Awaitable[None]]) -> None:
        self._good = PemFolder(folder)
        self._sign = sign

    async def sign(self, tenant: str, keyid: str, message: bytes) -> bytes:
        """Sign, after the other call where it is for acme."""
        if tenant == "acme":
            await self._sign()
        return await self._good.sign(tenant, keyid, message)


@pytest.fixture
def others(access: Access, application: Application, folder: Path) -> tuple[Destination, bytes]:
    """A destination of tenant zeta, which comes behind acme, and the public half of its key."""
    new_tenant(access, "zeta")
    other = new_destination(access, tenant="zeta")
    application.allow(tenant="zeta")
    return other, ed25519.public_key(signing_key(access, folder, "zeta"))


def sealer_with(database: Database, keys: SigningKeys) -> Sealer:
    """A sealer with signing keys of its own."""
    return Sealer(Outbox(database, keys, kinds=NO_KINDS, attempt_limit=8), database, poll_s=0.02)


async def test_keys_that_break_keep_nothing_waiting(
    database: Database,
    application: Application,
    access: Access,
    destination: Destination,
    public_key: bytes,
    others: tuple[Destination, bytes],
    folder: Path,
):
    """Whatever they raise for one tenant: its intents wait with a code, and the next tenant's are sealed."""

    async def break_down() -> None:
        raise RuntimeError("broken")

    mine = wanted()
    application.leave(mine, wanted(tenant="zeta"))
    assert await sealer_with(database, Acmes(folder, break_down)).once() == 2
    assert len(require_whole(*others)) == 1
    assert destination.highest() == 0
    assert waiting(access) == {mine.delivery: (SealCode.SIGNING_FAILED, 1)}


async def test_one_tenants_fault_is_its_own(
    sealer: Sealer,
    application: Application,
    access: Access,
    destination: Destination,
    public_key: bytes,
    others: tuple[Destination, bytes],
):
    """A fault of the database that only one tenant meets keeps the next tenant's intents from nothing."""
    mine = wanted()
    application.leave(mine, wanted(tenant="zeta"))
    with as_owner(access) as owner:
        owner.execute("CREATE FUNCTION break_down() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''broken''; END'")
        owner.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON deliveries FOR EACH ROW WHEN (NEW.tenant = 'acme')"
            " EXECUTE FUNCTION break_down()"
        )
    assert await sealer.once() == 1
    assert len(require_whole(*others)) == 1
    assert waiting(access) == {mine.delivery: (None, 0)}


async def test_slow_keys_hold_up_no_other_tenant(
    database: Database,
    application: Application,
    access: Access,
    destination: Destination,
    public_key: bytes,
    others: tuple[Destination, bytes],
    folder: Path,
):
    """While one tenant's signature is waited for, the others have their turns; and it counts when it comes."""
    came = asyncio.Event()

    async def wait() -> None:
        await came.wait()

    application.leave(wanted(), wanted(tenant="zeta"))
    turn = asyncio.create_task(sealer_with(database, Acmes(folder, wait)).once())
    try:
        await until_async(lambda: others[0].highest() == 1)
        came.set()
        assert await turn == 2
    finally:
        turn.cancel()
    assert len(require_whole(destination, public_key)) == 1


async def test_slow_keys_wedge_nothing(
    sealer: Sealer,
    application: Application,
    access: Access,
    destination: Destination,
    public_key: bytes,
    monkeypatch: pytest.MonkeyPatch,
):
    """What is signed when a turn's time is over is committed; the rest is due as it was, and gets its own turn."""
    monkeypatch.setattr("postseal.outbound.sealer.SIGNING_S", 0.0)
    intents = [wanted() for _ in range(3)]
    application.leave(*intents)
    for sealed in (1, 2, 3):
        assert await sealer.once() == 1
        rows = require_whole(destination, public_key)
        assert [row.delivery for row in rows] == [one.delivery for one in intents[:sealed]]
        assert waiting(access) == {one.delivery: (None, 0) for one in intents[sealed:]}


async def test_it_runs_until_it_is_stopped(
    sealer: Sealer, application: Application, access: Access, destination: Destination, public_key: bytes
):
    """It seals what commits meanwhile, outlives faults of the database, and ends at once when it is told."""
    stop = asyncio.Event()
    running = asyncio.create_task(sealer.run(stop))
    try:
        application.leave(wanted())
        await until_sealed(destination, 1)
        await asyncio.to_thread(rename, access, "intents", "hidden")
        await asyncio.sleep(0.1)
        await asyncio.to_thread(rename, access, "hidden", "intents")
        application.leave(wanted())
        await until_sealed(destination, 2)
    finally:
        stop.set()
        await asyncio.wait_for(running, DEADLINE_S)
    require_whole(destination, public_key)


async def test_many_sealers_and_applications(
    outbox: Outbox, database: Database, access: Access, destination: Destination, application: Application,
    public_key: bytes, seed: int,
):  # fmt: skip
    """Several sealers beside enqueues and applications that commit or not: each committed intent once, no hole."""
    chance = random.Random(seed)
    stop = asyncio.Event()
    sealers = [asyncio.create_task(Sealer(outbox, database, poll_s=0.01).run(stop)) for _ in range(3)]
    committed: set[UUID] = set()

    def work() -> None:
        for _ in range(15):
            intents = [wanted() for _ in range(chance.randint(1, 8))]
            with suppress(psycopg.Error), application.connect() as connection:
                for one in intents:
                    connection.execute(*one.psycopg())
                if chance.random() < 0.3:
                    connection.rollback()
                    continue
            committed.update(one.delivery for one in intents)

    try:
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(2)))
        await until_sealed(destination, len(committed))
    finally:
        stop.set()
        await asyncio.gather(*sealers)
    assert {row.delivery for row in require_whole(destination, public_key)} == committed
    assert waiting(access) == {}


def rename(access: Access, old: str, new: str) -> None:
    """Give a table another name: whoever looks for it meets a fault."""
    with as_owner(access) as owner:
        owner.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(sql.Identifier(old), sql.Identifier(new)))


async def until_sealed(destination: Destination, count: int) -> None:
    """Return once so many are sealed."""
    await until_async(lambda: destination.highest() >= count)

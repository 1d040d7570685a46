"""What is enqueued is sealed before the answer, in order, once, and with nothing that a failure would leave behind."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from fleet import as_owner
from outgoing import (
    DESTINATION,
    PROJECT,
    TENANT,
    Destination,
    audited,
    decision,
    new_destination,
    new_tenant,
    require_whole,
    signing_key,
    wish,
)
from postseal.envelope import ed25519
from postseal.envelope.kinds import NO_KINDS
from postseal.errors import Unavailable
from postseal.outbound.outbox import Outbox
from postseal.outbound.wishes import OwnedWish, Sealed, Unsealed, Wish
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.rules.delivery import SealCode, State
from postseal.signing import SigningFailed
from postseal.signing.pem_folder import PemFolder

pytestmark = pytest.mark.anyio

NOW_MS = 1_000


async def one(outbox: Outbox, wanted: Wish, project: str = PROJECT, tenant: str = TENANT) -> Sealed | Unsealed:
    """The result of one wanted."""
    [result] = await outbox.enqueue(tenant, project, [wanted], "owner-1")
    return result


async def sealed(outbox: Outbox, wanted: Wish) -> Sealed:
    """The delivery of one that is sealed."""
    result = await one(outbox, wanted)
    assert isinstance(result, Sealed)
    return result


def code(result: Sealed | Unsealed) -> SealCode:
    """Why it was not sealed."""
    assert isinstance(result, Unsealed)
    return result.code


class Failing:
    """Signing keys of which one call fails: the first, or the one of that number."""

    def __init__(self, folder: Path, fail: Callable[[], Awaitable[bytes]], call: int = 1) -> None:
        self._good = PemFolder(folder)
        self._fail = fail
        self._left = call

    async def sign(self, tenant: str, keyid: str, message: bytes) -> bytes:
        """Fail, or sign."""
        self._left -= 1
        return await (self._good.sign(tenant, keyid, message) if self._left else self._fail())


async def test_a_delivery_is_whole(outbox: Outbox, destination: Destination, public_key: bytes, access: Access):
    """Payload, signature, queue and audit event say one thing; it is due at once."""
    wanted = wish(attempt_limit=3, expires_at_ms=4_000_000_000_000)
    before_ms = time.time() * 1000
    made = await sealed(outbox, wanted)
    [row] = require_whole(destination, public_key)
    assert made == Sealed(wanted.delivery, DESTINATION, 1, row.event_identity, State.PENDING, new=True)
    assert row.event["data"] == wanted.data
    assert abs(row.event["issuedAtMs"] - before_ms) < 60_000
    assert (row.lane, row.attempt_limit, row.expires_at.timestamp()) == ("push", 3, 4_000_000_000)
    assert audited(access) == [("owner-1", "enqueue", "accepted", row.event_identity)]


async def test_many_are_numbered_in_order(outbox: Outbox, access: Access, public_key: bytes):
    """Results stand in the order of the wishes; each destination counts for itself; a bad one stops no other."""
    second = new_destination(access, "parts")
    wishes = [wish(), wish("parts"), wish("nowhere"), wish(data={"kind": "proposal-decision"}), wish(), wish("parts")]
    results = await outbox.enqueue(TENANT, PROJECT, wishes, "owner-1")
    assert [result.delivery for result in results] == [wanted.delivery for wanted in wishes]
    assert [result.sequence if isinstance(result, Sealed) else result.code for result in results] == [
        1,
        1,
        SealCode.DESTINATION_UNKNOWN,
        SealCode.PAYLOAD_INVALID,
        2,
        2,
    ]
    assert [row.attempt_limit for row in require_whole(second, public_key)] == [8, 8]


async def test_a_key_that_comes_again_brings_the_same(outbox: Outbox, destination: Destination, public_key: bytes):
    """The original, whatever its options are now: no second envelope, no number."""
    wanted = wish()
    first = await sealed(outbox, wanted)
    again = Wish(
        destination=DESTINATION,
        data=dict(reversed(wanted.data.items())),
        idempotency_key=wanted.idempotency_key,
        attempt_limit=1,
        expires_at_ms=NOW_MS,
    )
    results = await outbox.enqueue(TENANT, PROJECT, [again, wish(), again], "owner-1")
    assert (
        results[0]
        == results[2]
        == Sealed(first.delivery, DESTINATION, 1, first.event_identity, State.PENDING, new=False)
    )
    assert len(require_whole(destination, public_key)) == 2


async def test_a_key_in_one_call_twice(outbox: Outbox, destination: Destination, public_key: bytes):
    """The second is the first; with other content it conflicts."""
    first = wish()
    same = Wish(destination=DESTINATION, data=first.data, idempotency_key=first.idempotency_key)
    other = Wish(destination=DESTINATION, data=decision(), idempotency_key=first.idempotency_key)
    made, again, conflict = await outbox.enqueue(TENANT, PROJECT, [first, same, other], "owner-1")
    assert isinstance(made, Sealed)
    assert isinstance(again, Sealed)
    assert (made.new, again.new, again.delivery) == (True, False, made.delivery)
    assert code(conflict) is SealCode.IDEMPOTENCY_CONFLICT
    assert len(require_whole(destination, public_key)) == 1


@pytest.mark.parametrize("state", ["delivered", "dead", "expired", "cancelled"])
async def test_the_original_in_whatever_state(outbox: Outbox, destination: Destination, public_key: bytes, state: str):
    """What has ended is told as it ended."""
    wanted = wish()
    await sealed(outbox, wanted)
    destination.end(1, state, "rejected" if state == "dead" else None)
    assert (await sealed(outbox, wanted)).state == state


async def test_other_content_is_a_conflict(outbox: Outbox, access: Access, public_key: bytes):
    """In one destination; another destination's keys are its own."""
    new_destination(access, "parts")
    key = "order:0001"
    await sealed(outbox, wish(idempotency_key=key))
    result = await one(outbox, wish(idempotency_key=key))
    assert (code(result), result.reason) == (SealCode.IDEMPOTENCY_CONFLICT, Reason.IDEMPOTENCY_CONFLICT)  # type: ignore[union-attr]
    assert (await sealed(outbox, wish("parts", idempotency_key=key))).new


async def test_a_delivery_id_is_used_once(outbox: Outbox, destination: Destination, public_key: bytes):
    """An id that another delivery has seals nothing, in a later call and in the same one."""
    taken = uuid4()
    await sealed(outbox, wish(delivery=taken))
    results = await outbox.enqueue(TENANT, PROJECT, [wish(delivery=taken), wish()], "owner-1")
    assert code(results[0]) is SealCode.IDEMPOTENCY_CONFLICT
    twice = uuid4()
    results = await outbox.enqueue(TENANT, PROJECT, [wish(delivery=twice), wish(delivery=twice)], "owner-1")
    assert code(results[1]) is SealCode.IDEMPOTENCY_CONFLICT
    assert len(require_whole(destination, public_key)) == 3


BAD = {
    "no kind": {"data": {"proposalId": "x"}},
    "a kind that is none": {"data": decision(kind="nothing")},
    "a float": {"data": decision(revision=1.0)},
    "a member too many": {"data": decision(note="free text")},
    "beyond ASCII": {"data": decision(nöte=1)},
    "an upper-case id": {"data": decision(proposalId=str(uuid4()).upper())},
    "a short key": {"idempotency_key": "short"},
    "a key with a newline": {"idempotency_key": "long enough\n"},
    "no attempt": {"attempt_limit": 0},
    "too many attempts": {"attempt_limit": 101},
    "an expiry beyond 2100": {"expires_at_ms": 4_102_444_800_001},
}


@pytest.mark.parametrize("members", BAD.values(), ids=BAD)
async def test_what_is_not_valid(
    outbox: Outbox, destination: Destination, public_key: bytes, members: dict[str, object]
):
    """It is refused as `payload_invalid` and leaves nothing, while its neighbour is sealed."""
    results = await outbox.enqueue(TENANT, PROJECT, [wish(**members), wish()], "owner-1")
    assert code(results[0]) is SealCode.PAYLOAD_INVALID
    assert len(require_whole(destination, public_key)) == 1


@pytest.mark.parametrize("name", ["", "Orders", "../orders", "orders\0", "orders\n", "x" * 64])
async def test_what_is_no_destination(outbox: Outbox, public_key: bytes, name: str):
    """It is not found, whatever it is."""
    assert code(await one(outbox, wish(name))) is SealCode.DESTINATION_UNKNOWN


async def test_nothing_crosses_tenants_or_projects(
    outbox: Outbox, access: Access, destination: Destination, folder: Path
):
    """A destination of that name elsewhere is not there; another tenant's key signs nothing."""
    signing_key(access, folder)
    new_tenant(access, "beta", "apollo", "zeus")
    assert code(await one(outbox, wish(), tenant="beta")) is SealCode.DESTINATION_UNKNOWN
    assert code(await one(outbox, wish(), project="zeus")) is SealCode.DESTINATION_UNKNOWN
    new_destination(access, tenant="beta")
    result = await one(outbox, wish(), tenant="beta")
    assert code(result) is SealCode.SIGNING_KEY_MISSING
    assert destination.highest() == 0


async def test_an_expiry_in_the_past(outbox: Outbox, destination: Destination, public_key: bytes):
    """By the database's clock: it is refused, and the next one takes its number."""
    results = await outbox.enqueue(TENANT, PROJECT, [wish(expires_at_ms=NOW_MS), wish()], "owner-1")
    assert code(results[0]) is SealCode.EXPIRED
    assert isinstance(results[1], Sealed)
    assert results[1].sequence == 1


async def test_a_full_destination(outbox: Outbox, access: Access, public_key: bytes):
    """No more than may be are pending, within one call too; what has ended makes room, and a known key needs none."""
    small = new_destination(access, "small", max_pending=2)
    wishes = [wish("small") for _ in range(3)]
    results = await outbox.enqueue(TENANT, PROJECT, wishes, "owner-1")
    assert [type(result) for result in results] == [Sealed, Sealed, Unsealed]
    assert results[2] == Unsealed(
        wishes[2].delivery, SealCode.DESTINATION_FULL, "2 deliveries are pending for this destination", 2
    )
    assert not (await sealed(outbox, wishes[0])).new
    small.end(1, "delivered")
    assert (await sealed(outbox, wishes[2])).sequence == 3
    assert code(await one(outbox, wish("small"))) is SealCode.DESTINATION_FULL


@pytest.mark.parametrize(("mode", "lane"), [("push", "push"), ("pull", "pull")])
async def test_lanes(outbox: Outbox, access: Access, public_key: bytes, mode: str, lane: str):
    """Mail waits in its destination's lane; a disabled destination takes it and holds it."""
    made = new_destination(access, "other", mode=mode)
    await sealed(outbox, wish("other"))
    assert [row.lane for row in require_whole(made, public_key)] == [lane]
    made.disable()
    await sealed(outbox, wish("other"))
    assert [row.lane for row in require_whole(made, public_key)] == ["held", "held"]


async def refuse() -> bytes:
    """A key that cannot be used."""
    raise SigningFailed(SealCode.SIGNING_FAILED, "not today")


async def hang() -> bytes:
    """A key that never answers."""
    await asyncio.Event().wait()
    return b""


async def forge() -> bytes:
    """Another key's signature."""
    return ed25519.sign(ed25519.generate(), b"something")


async def say_nothing() -> bytes:
    """No signature at all."""
    return None  # type: ignore[return-value]


async def break_down() -> bytes:
    """A fault of whoever wrote these keys."""
    raise KeyError("hush")


@pytest.mark.parametrize("fail", [refuse, hang, forge, say_nothing, break_down])
async def test_a_failed_signature_uses_no_number(
    database: Database,
    destination: Destination,
    public_key: bytes,
    folder: Path,
    fail: Callable[[], Awaitable[bytes]],
    monkeypatch: pytest.MonkeyPatch,
):
    """Refused, late, broken or not the key's own: nothing is sealed in that call, and the next one begins at 1."""
    monkeypatch.setattr("postseal.outbound.signer.SIGN_S", 0.05)
    outbox = Outbox(database, Failing(folder, fail), kinds=NO_KINDS, attempt_limit=8)
    with capture_logs() as logs:
        results = await outbox.enqueue(TENANT, PROJECT, [wish(), wish()], "owner-1")
    assert [entry["event"] for entry in logs] == ["not_signed"]
    assert "hush" not in str(logs)
    assert [code(result) for result in results] == [SealCode.SIGNING_FAILED] * 2
    assert results[0].reason is Reason.SIGNING_UNAVAILABLE  # type: ignore[union-attr]
    assert destination.highest() == 0
    assert (await sealed(outbox, wish())).sequence == 1
    require_whole(destination, public_key)


async def test_a_failed_signature_in_the_middle(
    database: Database, destination: Destination, folder: Path, public_key: bytes
):
    """What was signed before it is sealed; it and what is behind it are not, and leave no hole."""
    outbox = Outbox(database, Failing(folder, refuse, call=2), kinds=NO_KINDS, attempt_limit=8)
    results = await outbox.enqueue(TENANT, PROJECT, [wish(), wish(), wish()], "owner-1")
    assert [type(result) for result in results] == [Sealed, Unsealed, Unsealed]
    assert len(require_whole(destination, public_key)) == 1


async def test_signatures_that_take_too_long(
    outbox: Outbox, database: Database, destination: Destination, public_key: bytes
):
    """What is signed when their time is over is sealed; the rest was not tried, and the same call again goes on."""
    wishes = [OwnedWish(PROJECT, "owner-1", wish()) for _ in range(3)]

    async def seal() -> list[Sealed | Unsealed]:
        return await database.transact(lambda connection: outbox.seal(connection, TENANT, wishes, signing_s=0.0))

    first = await seal()
    assert [isinstance(result, Sealed) for result in first] == [True, False, False]
    assert [(result.tried, result.reason) for result in first if isinstance(result, Unsealed)] == [
        (False, Reason.SIGNING_UNAVAILABLE)
    ] * 2
    assert [isinstance(result, Sealed) for result in await seal()] == [True, True, False]
    assert [row.delivery for row in require_whole(destination, public_key)] == [
        owned.wish.delivery for owned in wishes[:2]
    ]


async def test_concurrent_enqueues_leave_no_hole(
    outbox: Outbox, access: Access, destination: Destination, public_key: bytes, seed: int
):
    """Many at once, on several destinations, some bad, some again: each key once, numbers whole, none lost."""
    chance = random.Random(seed)
    destinations = {DESTINATION: destination} | {
        name: new_destination(access, name) for name in ("parts", "bills", "notes")
    }
    keys = [(name, f"key:{name}:{number:04}", decision()) for name in destinations for number in range(25)]

    def batch() -> list[Wish]:
        picked = chance.sample(keys, chance.randint(1, 20))
        good = [Wish(destination=name, data=data, idempotency_key=key) for name, key, data in picked]
        bad = [wish(data={"kind": "none"}), wish("nowhere")][: chance.randint(0, 2)]
        mixed = good + bad
        chance.shuffle(mixed)
        return mixed

    async def enqueue(wishes: list[Wish]) -> list[Sealed | Unsealed]:
        return await outbox.enqueue(TENANT, PROJECT, wishes, "owner-1")

    batches = [batch() for _ in range(40)]
    results = await asyncio.gather(*map(enqueue, batches))
    told: dict[tuple[str, str], set[tuple[int, bytes]]] = {}
    new = 0
    for wishes, answers in zip(batches, results, strict=True):
        for wanted, answer in zip(wishes, answers, strict=True):
            if isinstance(answer, Sealed):
                place = (answer.sequence, answer.event_identity)
                told.setdefault((wanted.destination, wanted.idempotency_key), set()).add(place)
                new += answer.new
            else:
                assert answer.code in (SealCode.PAYLOAD_INVALID, SealCode.DESTINATION_UNKNOWN)
    assert all(len(places) == 1 for places in told.values())
    kept = {
        (name, row.idempotency_key): {(row.sequence, row.event_identity)}
        for name, made in destinations.items()
        for row in require_whole(made, public_key)
    }
    assert kept == told
    assert new == len(kept)


async def test_nothing_is_known_without_a_database(
    outbox: Outbox, access: Access, public_key: bytes, destination: Destination
):
    """A commit that is not certain is Unavailable; the same call again finds what was sealed, or seals it."""
    wanted = wish()
    with as_owner(access) as owner, owner.transaction():
        owner.execute("LOCK TABLE deliveries IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(Unavailable):
            await one(outbox, wanted)
    assert (await sealed(outbox, wanted)).sequence == 1


def test_secrets_are_not_shown() -> None:
    """The data of a wish is in no repr."""
    assert "proposalId" not in repr(wish())

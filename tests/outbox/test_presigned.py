"""Envelopes that an application has signed itself: taken as they are, if they are exactly the next ones."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fleet import as_owner, signed
from outgoing import DESTINATION, PROJECT, TENANT, Destination, decision, register, require_whole, wish
from postseal.envelope import dsse, ed25519
from postseal.envelope.kinds import NO_KINDS
from postseal.errors import Refused
from postseal.outbound.outbox import Outbox
from postseal.outbound.presigned import enqueue_signed
from postseal.outbound.wishes import Sealed
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.signing.pem_folder import PemFolder

pytestmark = pytest.mark.anyio


@pytest.fixture
def own_seed(access: Access, destination: Destination) -> bytes:
    """The private half of the tenant's signing key, which is the application's own."""
    seed = ed25519.generate()
    register(access, seed)
    return seed


def payload(sequence: int, /, **changes: Any) -> dict[str, Any]:
    """A valid one under fresh names; `changes` replaces members, and leaves out those given as `...`."""
    members = {
        "protocol": "controlplane/v1",
        "schemaVersion": 1,
        "route": {"tenant": TENANT, "project": PROJECT, "producer": "controlplane", "audience": DESTINATION},
        "eventId": str(uuid4()),
        "idempotencyKey": f"key:{uuid4()}",
        "sequence": sequence,
        "issuedAtMs": 1_767_225_600_000,
        "data": decision(),
    } | changes
    return {name: value for name, value in members.items() if value is not ...}


async def take(database: Database, outbox: Outbox, body: bytes, **options: Any) -> Sealed:
    """Give it to the outbox."""
    scope = {"tenant": TENANT, "project": PROJECT, "account": "owner-1"}
    return await enqueue_signed(database, outbox, body=body, **(scope | options))


async def reason(database: Database, outbox: Outbox, body: bytes, **options: Any) -> Reason:
    """Why it is refused."""
    with pytest.raises(Refused) as raised:
        await take(database, outbox, body, **options)
    return raised.value.reason


async def test_the_next_ones_are_taken_as_they_are(
    database: Database, outbox: Outbox, destination: Destination, own_seed: bytes
):
    """Byte for byte, in order; one that comes again is what it was, and takes no number."""
    first, second = signed(payload(1), own_seed), signed(payload(2), own_seed)
    made = await take(database, outbox, first, attempt_limit=2)
    assert (made.sequence, made.new, made.event_identity) == (1, True, dsse.unwrap(first).identity)
    assert (await take(database, outbox, second)).sequence == 2
    again = await take(database, outbox, first)
    assert (again.delivery, again.new) == (made.delivery, False)
    rows = require_whole(destination, ed25519.public_key(own_seed))
    assert [dsse.wrap(row.payload, row.keyid, row.signature) for row in rows] == [first, second]
    assert [row.attempt_limit for row in rows] == [2, 8]


@pytest.mark.parametrize("sequence", [1, 3, 2**53 - 1])
async def test_only_exactly_the_next(
    database: Database, outbox: Outbox, destination: Destination, own_seed: bytes, sequence: int
):
    """Neither one that is taken nor one that leaves a hole."""
    await take(database, outbox, signed(payload(1), own_seed))
    assert await reason(database, outbox, signed(payload(sequence), own_seed)) is Reason.SEQUENCE_CONFLICT
    assert destination.highest() == 1


ROUTE = {"tenant": TENANT, "project": PROJECT, "producer": "controlplane", "audience": DESTINATION}
FAULTS: dict[str, tuple[dict[str, Any], Reason]] = {
    "another tenant": ({"route": ROUTE | {"tenant": "beta"}}, Reason.ROUTE_MISMATCH),
    "another project": ({"route": ROUTE | {"project": "zeus"}}, Reason.ROUTE_MISMATCH),
    "a device's": ({"route": ROUTE | {"producer": "device-01"}}, Reason.ROUTE_MISMATCH),
    "for nobody": (
        {"route": {name: ROUTE[name] for name in ("tenant", "project", "producer")}},
        Reason.IDENTITY_OUT_OF_BOUNDS,
    ),
    "for no name": ({"route": ROUTE | {"audience": "No Name"}}, Reason.IDENTITY_OUT_OF_BOUNDS),
    "for somebody else": ({"route": ROUTE | {"audience": "nobody"}}, Reason.NOT_FOUND),
    "no key": ({"idempotencyKey": ...}, Reason.IDENTITY_OUT_OF_BOUNDS),
    "no event id": ({"eventId": "x"}, Reason.IDENTITY_OUT_OF_BOUNDS),
    "another protocol": ({"protocol": "controlplane/v2"}, Reason.SCHEMA_VERSION_UNSUPPORTED),
    "a member too many": ({"note": "x"}, Reason.PAYLOAD_INVALID),
    "a bad kind": ({"data": {"kind": "nothing"}}, Reason.PAYLOAD_INVALID),
}


@pytest.mark.parametrize(("changes", "expected"), FAULTS.values(), ids=FAULTS)
async def test_faults(
    database: Database,
    outbox: Outbox,
    destination: Destination,
    own_seed: bytes,
    changes: dict[str, Any],
    expected: Reason,
):
    """Each has its reason and uses no number."""
    assert await reason(database, outbox, signed(payload(1, **changes), own_seed)) is expected
    assert (await take(database, outbox, signed(payload(1), own_seed))).sequence == 1


async def test_keys(database: Database, outbox: Outbox, access: Access, own_seed: bytes):
    """Only a signing key of the tenant that may sign now, and only with its own signature."""
    stranger = ed25519.generate()
    assert await reason(database, outbox, signed(payload(1), stranger)) is Reason.KEY_UNKNOWN
    register(access, stranger, state="revoked")
    assert await reason(database, outbox, signed(payload(1), stranger)) is Reason.KEY_UNKNOWN
    good = dsse.unwrap(signed(payload(1), own_seed))
    forged = dsse.wrap(good.payload, good.keyid, ed25519.sign(stranger, good.signed_bytes))
    assert await reason(database, outbox, forged) is Reason.SIGNATURE_INVALID
    assert await reason(database, outbox, b"{}") is Reason.ENVELOPE_MALFORMED


async def test_names_are_used_once(database: Database, outbox: Outbox, own_seed: bytes):
    """An event id or an idempotency key that another envelope has is a conflict."""
    first = payload(1)
    await take(database, outbox, signed(first, own_seed))
    same_event = payload(2, eventId=first["eventId"])
    assert await reason(database, outbox, signed(same_event, own_seed)) is Reason.EVENT_CONFLICT
    same_key = payload(2, idempotencyKey=first["idempotencyKey"])
    assert await reason(database, outbox, signed(same_key, own_seed)) is Reason.IDEMPOTENCY_CONFLICT


async def test_room_and_expiry(
    database: Database, outbox: Outbox, access: Access, own_seed: bytes, destination: Destination
):
    """What has expired and what finds no room is refused, and uses no number."""
    assert await reason(database, outbox, signed(payload(1), own_seed), expires_at_ms=1) is Reason.REQUEST_INVALID
    with as_owner(access) as owner:
        owner.execute("UPDATE destinations SET max_pending = 1")
    await take(database, outbox, signed(payload(1), own_seed))
    assert await reason(database, outbox, signed(payload(2), own_seed)) is Reason.DESTINATION_FULL
    assert destination.highest() == 1


@pytest.mark.parametrize(
    "options", [{"attempt_limit": 0}, {"attempt_limit": 101}, {"expires_at_ms": 4_102_444_800_001}]
)
async def test_options_lie_in_their_bounds(
    database: Database, outbox: Outbox, own_seed: bytes, options: dict[str, int], destination: Destination
):
    """As for what the service seals; refused, it uses no number."""
    assert await reason(database, outbox, signed(payload(1), own_seed), **options) is Reason.REQUEST_INVALID
    assert destination.highest() == 0


async def test_what_is_new_is_told(database: Database, folder: Path, own_seed: bytes):
    """Once, so that whoever delivers need not look for it."""
    told: list[tuple[str, list[int]]] = []
    outbox = Outbox(
        database,
        PemFolder(folder),
        kinds=NO_KINDS,
        attempt_limit=8,
        told=lambda tenant, new: told.append((tenant, [each.sequence for each in new])),
    )
    envelope = signed(payload(1), own_seed)
    await take(database, outbox, envelope)
    await take(database, outbox, envelope)
    assert told == [(TENANT, [1])]


async def test_beside_what_is_sealed_here(
    database: Database, outbox: Outbox, access: Access, destination: Destination, public_key: bytes
):
    """What the service seals takes the next number, which the application's own then cannot have."""
    [made] = await outbox.enqueue(TENANT, PROJECT, [wish()], "owner-1")
    assert isinstance(made, Sealed)
    retiring = ed25519.generate()
    register(access, retiring, state="retiring")
    assert await reason(database, outbox, signed(payload(1), retiring)) is Reason.SEQUENCE_CONFLICT
    assert (await take(database, outbox, signed(payload(2), retiring))).sequence == 2

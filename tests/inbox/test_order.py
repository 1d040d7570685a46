"""The checks run in their order: the earliest that fails decides, and nothing after it runs.

One request carries two faults of the table below; the answer must be the earlier one's. What ran is taken from the
server's own count of statements, and from the two pure steps that no statement shows.
"""

# Empties what the service remembers, and its limits:
# pyright: reportPrivateUsage=false

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import psycopg
import pytest

from fleet import PEER, Device, add_key, as_owner, enrol, issue
from postseal.envelope import canonical, dsse, ed25519, v1
from postseal.errors import Refused
from postseal.identity.tokens import NewToken, new_token
from postseal.inbound.inbox import Inbound
from postseal.outcomes import REASONS_OF_ENVELOPES, Outcome, Reason
from postseal.postgres.access import Access
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt

pytestmark = pytest.mark.anyio

LIMITED_PEER = "198.51.100.1"
SEQUENCES = 5
FLOOR = 2
EVENT_3 = "00000000-0000-4000-8000-000000000003"
NAMES_OF_3: dict[str, Any] = {"eventId": EVENT_3, "idempotencyKey": f"key:{EVENT_3}"}
WINDOW = Settings().window
PAYLOAD = frozenset({"route", "event", "idempotency", "sequence", "version", "data"})
"""What a payload that is another one altogether takes away from other faults."""


@dataclass
class Draft:
    """A request in the making: good as it is, spoiled by the faults below."""

    peer: str = PEER
    credential: str = "device"
    limited: bool = False
    outer_type: str = dsse.PAYLOAD_TYPE
    no_object: bool = False
    sent_before: bool = False
    unknown_key: bool = False
    break_signature: bool = False
    retired: bool = False
    key_state: str = "active"
    members: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Fault:
    """A way to spoil a draft; two faults that spoil the same input cannot come together."""

    answer: Outcome | Reason
    inputs: frozenset[str]
    spoil: Callable[[Draft], object]


def _sets(name: str, value: object) -> Callable[[Draft], object]:
    return lambda draft: setattr(draft, name, value)


def _member(**members: object) -> Callable[[Draft], object]:
    return lambda draft: draft.members.update(members)


def _fault(answer: Outcome | Reason, inputs: str, spoil: Callable[[Draft], object]) -> Fault:
    return Fault(answer, PAYLOAD if inputs == "payload" else frozenset(inputs.split()), spoil)


FOREIGN_ROUTE = {"tenant": "globex", "project": "apollo", "producer": "device-01"}
FAULTS = [
    # step 0
    _fault(Reason.PEER_RATE_LIMITED, "peer", _sets("peer", LIMITED_PEER)),
    # step 1
    _fault(Reason.UNAUTHENTICATED, "credential", _sets("credential", "unknown")),
    _fault(Reason.SYNC_RATE_LIMITED, "rate", _sets("limited", value=True)),
    _fault(Reason.ROLE_FORBIDDEN, "credential", _sets("credential", "operator")),
    # step 2
    _fault(Reason.ENVELOPE_MALFORMED, "outer", _sets("outer_type", "text/plain")),
    _fault(Reason.ENVELOPE_MALFORMED, "payload", _sets("no_object", value=True)),
    _fault(Reason.IDENTITY_OUT_OF_BOUNDS, "route", _member(route={"tenant": "acme", "project": 1})),
    _fault(Reason.ROUTE_MISMATCH, "route", _member(route=FOREIGN_ROUTE)),
    _fault(Reason.IDENTITY_OUT_OF_BOUNDS, "idempotency", _member(idempotencyKey="short")),
    _fault(Reason.IDENTITY_OUT_OF_BOUNDS, "sequence", _member(sequence=0)),
    # step 3
    _fault(Reason.KEY_UNKNOWN, "key", _sets("unknown_key", value=True)),
    _fault(Reason.SIGNATURE_INVALID, "signature", _sets("break_signature", value=True)),
    # step 4
    _fault(Reason.SCHEMA_VERSION_UNSUPPORTED, "version", _member(schemaVersion=2)),
    _fault(Reason.PAYLOAD_INVALID, "data", _member(data={"kind": "heartbeat", "free": "text"})),
    # step 5
    _fault(Outcome.DUPLICATE, "payload", _sets("sent_before", value=True)),
    _fault(Reason.STREAM_RETIRED, "retired", _sets("retired", value=True)),
    _fault(Reason.KEY_REVOKED, "key", _sets("key_state", "revoked")),
    _fault(Reason.KEY_RETIRED, "key", _sets("key_state", "verify-only")),
    _fault(Reason.EVENT_CONFLICT, "event", _member(eventId=EVENT_3)),
    _fault(Reason.IDEMPOTENCY_CONFLICT, "idempotency", _member(idempotencyKey=f"key:{EVENT_3}")),
    _fault(Reason.BELOW_REPLAY_FLOOR, "sequence", _member(sequence=FLOOR)),
    _fault(Reason.SEQUENCE_CONFLICT, "sequence", _member(sequence=SEQUENCES)),
    _fault(Reason.SEQUENCE_BEYOND_WINDOW, "sequence", _member(sequence=SEQUENCES + WINDOW + 1)),
]
PAIRS = [(one, other) for one, other in combinations(FAULTS, 2) if not one.inputs & other.inputs]

CREDENTIAL, KEY, VERIFY, OPEN, LOCK, AUDIT = "credential", "key", "verify", "open", "lock", "audit"
STATEMENTS = {
    CREDENTIAL: "%FROM credentials%",
    KEY: "%FROM keys k%JOIN streams s%",
    LOCK: "%FOR NO KEY UPDATE OF s%",
    AUDIT: "%INSERT INTO audit_events%",
}
RAN: dict[Outcome | Reason, set[str]] = {
    Reason.PEER_RATE_LIMITED: set(),
    Reason.UNAUTHENTICATED: {CREDENTIAL},
    Reason.SYNC_RATE_LIMITED: {CREDENTIAL},
    Reason.ROLE_FORBIDDEN: {CREDENTIAL, AUDIT},
    Reason.ENVELOPE_MALFORMED: {CREDENTIAL, AUDIT},
    Reason.ROUTE_MISMATCH: {CREDENTIAL, AUDIT},
    Reason.IDENTITY_OUT_OF_BOUNDS: {CREDENTIAL, AUDIT},
    Reason.KEY_UNKNOWN: {CREDENTIAL, KEY, AUDIT},
    Reason.SIGNATURE_INVALID: {CREDENTIAL, KEY, VERIFY, AUDIT},
    Reason.SCHEMA_VERSION_UNSUPPORTED: {CREDENTIAL, KEY, VERIFY, OPEN, AUDIT},
    Reason.PAYLOAD_INVALID: {CREDENTIAL, KEY, VERIFY, OPEN, AUDIT},
}
EVERYTHING = {CREDENTIAL, KEY, VERIFY, OPEN, LOCK, AUDIT}


@dataclass
class Scene:
    """A service, a device for each state of stream and key, and what the last request made run."""

    service: Service
    owner: psycopg.Connection[tuple[Any, ...]]
    devices: dict[tuple[bool, str], Device]
    sent: dict[str, bytes]
    operator: NewToken
    called: set[str]

    async def answer(self, draft: Draft) -> Outcome | Reason:
        """Send it to a service that remembers nothing, and forget what ran before."""
        inbox, door = self.service.inbox, self.service.door
        door._verified._values.clear()
        door._once_valid._values.clear()
        inbox._signers._values.clear()
        body = self._body(draft)
        spent = [self._drain(draft)] if draft.limited else []
        self.owner.execute(
            "SELECT public.pg_stat_statements_reset(0, oid) FROM pg_database WHERE datname = current_database()"
        )
        self.called.clear()
        try:
            caller = await door.identify(draft.peer, self._credential(draft))
            verdict = await inbox.receive(Inbound(caller, body))
        except Refused as refused:
            return refused.reason
        finally:
            for key in spent:
                inbox._sync.give_back(key, inbox._sync.rate.burst)
        return verdict.outcome if isinstance(verdict, Receipt) else verdict.reason

    def ran(self) -> set[str]:
        """Which steps did something for the last request."""
        return self.called | {
            step
            for step, like in STATEMENTS.items()
            if self.owner.execute(
                "SELECT FROM public.pg_stat_statements JOIN pg_database ON oid = dbid "
                "WHERE datname = current_database() AND query LIKE %s",
                [like],
            ).rowcount
        }

    def _device(self, draft: Draft) -> Device:
        return self.devices[draft.retired, draft.key_state]

    def _credential(self, draft: Draft) -> str:
        match draft.credential:
            case "operator":
                return self.operator.reveal()
            case "device":
                return self._device(draft).token.reveal()
            case _:
                return new_token().reveal()

    def _drain(self, draft: Draft) -> str:
        device = self._device(draft)
        is_operator = draft.credential == "operator"
        key = f"acme/owner-1/{self.operator.credential_id if is_operator else device.name}"
        limiter = self.service.inbox._sync
        limiter.give_back(key, limiter.rate.burst)
        assert limiter.take(key, limiter.rate.burst).granted
        return key

    def _body(self, draft: Draft) -> bytes:
        device = self._device(draft)
        seed = bytes(32) if draft.unknown_key else device.seed
        if draft.no_object:
            payload = b"[]"
        elif draft.sent_before:
            payload = self.sent[device.name]
        else:
            payload = canonical.encode(device.payload(SEQUENCES + 1, **draft.members))
        sealed = dsse.seal(payload, seed)
        signature = bytes(64) if draft.break_signature else sealed.signature
        body = dsse.wrap(sealed.payload, sealed.keyid, signature)
        return body.replace(dsse.PAYLOAD_TYPE.encode(), draft.outer_type.encode())


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Notes the two pure steps when they run; the real ones run."""
    called: set[str] = set()

    def noting(step: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            called.add(step)
            return real(*args)

        return noted

    monkeypatch.setattr(ed25519, "verify", noting(VERIFY, ed25519.verify))
    monkeypatch.setattr(v1, "open_claims", noting(OPEN, v1.open_claims))
    return called


@pytest.fixture
def owner(access: Access) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """The owner's connection, with the server's statement counts."""
    with as_owner(access) as owner:
        owner.execute("CREATE EXTENSION pg_stat_statements SCHEMA public")
        yield owner


@pytest.fixture
async def scene(access: Access, owner: psycopg.Connection[tuple[Any, ...]], called: set[str]) -> AsyncIterator[Scene]:
    """Six devices that have sent sequences 1 to 5, floor 2, and are then what the faults of step 5 need."""
    settings = Settings(peer_permits_per_s=1e-9, sync_permits_per_s=1e-9)
    states = list(product([False, True], ["active", "revoked", "verify-only"]))
    devices = {state: enrol(access, f"device-{n}") for n, state in enumerate(states)}
    async with running_service(settings, access) as service:
        sent: dict[str, bytes] = {}
        for (retired, key_state), device in devices.items():
            for sequence in range(1, SEQUENCES + 1):
                event = NAMES_OF_3 if sequence == 3 else dict[str, Any]()
                body = device.envelope(sequence, **event)
                sent[device.name] = dsse.unwrap(body).payload
                assert isinstance(await service.inbox.receive(device.inbound(body)), Receipt)
            owner.execute("UPDATE keys SET state = %s WHERE keyid = %s", [key_state, device.keyid])
            owner.execute(
                "UPDATE streams SET floor = %s, retired = %s WHERE stream = %s",
                [FLOOR, retired, device.stream],
            )
        for _ in range(settings.peer_burst):
            service.door.charge(LIMITED_PEER)
        operator = issue(access, "acme", None, ["apollo"], role="operator")
        yield Scene(service, owner, devices, sent, operator, called)


async def test_an_envelope_without_fault_passes_every_check(scene: Scene):
    """The draft itself is accepted, so each refusal below is its fault's; and every step is seen to run."""
    assert await scene.answer(Draft()) is Outcome.ACCEPTED
    assert scene.ran() == EVERYTHING


async def test_each_fault_alone_has_its_reason_and_stops_there(scene: Scene):
    """No step after the failing one runs: its statements are not seen by the server, its function is not called."""
    for fault in FAULTS:
        draft = Draft()
        fault.spoil(draft)
        assert await scene.answer(draft) == fault.answer
        _require_nothing_later(scene, fault)


async def test_of_every_two_faults_the_earlier_check_decides(scene: Scene):
    """All pairs that one request can carry; and still nothing after the earlier check runs."""
    for earlier, later in PAIRS:
        draft = Draft()
        earlier.spoil(draft)
        later.spoil(draft)
        answer = await scene.answer(draft)
        assert answer == earlier.answer, f"{earlier.answer} with {later.answer} was answered {answer}"
        _require_nothing_later(scene, earlier)


def _require_nothing_later(scene: Scene, fault: Fault) -> None:
    # The audit of a limited caller is written beside the request path, and for the first of them alone.
    beside = {AUDIT} if fault.answer is Reason.SYNC_RATE_LIMITED else set[str]()
    assert scene.ran() - beside == RAN.get(fault.answer, EVERYTHING), fault.answer


async def test_the_table_holds_every_reason_of_an_envelope():
    """A reason that is added to the protocol must get its place here."""
    elsewhere = {
        Reason.BODY_TOO_LARGE,
        Reason.REQUEST_TIMEOUT,
        Reason.UNSUPPORTED_MEDIA_TYPE,
        Reason.UNAVAILABLE,
    }
    assert {fault.answer for fault in FAULTS} - {Outcome.DUPLICATE} == set(REASONS_OF_ENVELOPES) - elsewhere
    assert len(PAIRS) > 150


async def test_a_removed_key_is_unknown_even_while_it_is_remembered(scene: Scene, access: Access):
    """Whether a key still counts is read under the stream's lock, never from what the process remembers."""
    device = scene.devices[False, "active"]
    seed = ed25519.generate()
    keyid = add_key(access, device, seed)
    inbox = scene.service.inbox
    sequence = SEQUENCES + 1
    assert isinstance(await inbox.receive(device.inbound(device.envelope(sequence, seed=seed))), Receipt)
    scene.owner.execute("UPDATE keys SET state = 'removed' WHERE keyid = %s", [keyid])
    verdict = await inbox.receive(device.inbound(device.envelope(sequence + 1, seed=seed)))
    assert not isinstance(verdict, Receipt)
    assert verdict.reason is Reason.KEY_UNKNOWN

"""Of two faults in one request, the earlier in protocol section 4 is answered, and under the lock in section 5."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any
from uuid import uuid4

from client import ENVELOPE, Answer, Caller, Device, canonical, envelope_of, event_identity
from promises import ACKNOWLEDGED, UNDER_THE_LOCK, assert_refused, audited
from world import PROJECT, TENANT, World

WINDOW = 1024
FLOOR = 3
RETAINED = (1, 2, 5)
CURSOR = {"contiguousThrough": FLOOR, "highest": 5}


@dataclass
class Staged:
    """A device whose stream can refuse for any reason: what it retained, and a key of its that was revoked."""

    device: Device
    revoked: Device
    consumer: Caller
    events: dict[int, dict[str, Any]]


@dataclass
class Draft:
    """A request in the making; faults change it one after the other."""

    staged: Staged
    event: dict[str, Any]
    credential: str | None
    media_type: str = ENVELOPE
    signer: Device | None = None
    members: dict[str, Any] = field(default_factory=dict)
    signature: bytes | None = None
    padding_bytes: int = 0

    def send(self) -> Answer:
        """Sign what has become of it, and send it."""
        envelope = envelope_of((self.signer or self.staged.device).key, canonical(self.event))
        if self.signature:
            envelope["signatures"][0]["sig"] = base64.b64encode(self.signature).decode()
        body = json.dumps(envelope | self.members).encode() + b" " * self.padding_bytes
        return Caller(self.staged.device.address, self.credential).send(body, self.media_type)


def members(**changed: Any) -> Callable[[Draft], None]:
    """Put members into the event."""
    return lambda draft: draft.event.update(changed)


def routed(**changed: Any) -> Callable[[Draft], None]:
    """Put members into the route."""
    return lambda draft: draft.event["route"].update(changed)


def kept(member: str, sequence: int) -> Callable[[Draft], None]:
    """Take a member from an event that is retained."""
    return lambda draft: draft.event.update({member: draft.staged.events[sequence][member]})


def attributes(**changed: Any) -> Callable[[Draft], None]:
    """Change the request around the event."""

    def change(draft: Draft) -> None:
        for name, value in changed.items():
            setattr(draft, name, value)

    return change


def signed_by_a_stranger(draft: Draft) -> None:
    """Sign with a key that nobody enrolled."""
    draft.signer = Device("", tenant="", project="", name="")


def signed_by_the_revoked(draft: Draft) -> None:
    """Sign with the device's key that was revoked."""
    draft.signer = draft.staged.revoked


def sent_by_a_consumer(draft: Draft) -> None:
    """Show a credential of another role."""
    draft.credential = draft.staged.consumer.credential


@dataclass(frozen=True)
class Fault:
    """A reason, the part of the request that this fault takes, and what it does to it."""

    reason: str
    part: str
    cause: Callable[[Draft], None]


IN_ORDER = [
    Fault("body_too_large", "size", attributes(padding_bytes=8192)),
    Fault("unsupported_media_type", "media type", attributes(media_type="application/json")),
    Fault("unauthenticated", "credential", attributes(credential="ps_nobody")),
    Fault("role_forbidden", "credential", sent_by_a_consumer),
    Fault("envelope_malformed", "outer form", attributes(members={"more": 1})),
    Fault("identity_out_of_bounds", "producer", routed(producer=1)),
    Fault("route_mismatch", "tenant", routed(tenant="other")),
    Fault("identity_out_of_bounds", "issued and names", members(issuedAtMs=0, eventId="1")),
    Fault("key_unknown", "key", signed_by_a_stranger),
    Fault("signature_invalid", "signature", attributes(signature=bytes(64))),
    Fault("schema_version_unsupported", "version", members(schemaVersion=2)),
    Fault("payload_invalid", "data", members(data={"kind": "gossip"})),
    Fault("key_revoked", "key", signed_by_the_revoked),
    Fault("event_conflict", "issued and names", kept("eventId", 1)),
    Fault("idempotency_conflict", "idempotency key", kept("idempotencyKey", 2)),
    Fault("below_replay_floor", "sequence", members(sequence=FLOOR)),
    Fault("sequence_conflict", "sequence", members(sequence=5)),
    Fault("sequence_beyond_window", "sequence", members(sequence=FLOOR + WINDOW + 1)),
]
RETIRED = Fault("stream_retired", "stream", lambda _: None)


def staged(world: World) -> Staged:
    """Retain 1, 2 and 5, raise the floor to 3, and revoke a second key of the device."""
    device = world.devices["staged"]
    events = {sequence: device.event(sequence) for sequence in RETAINED}
    for event in events.values():
        assert device.send(json.dumps(envelope_of(device.key, canonical(event))).encode()).word in ACKNOWLEDGED
    [second] = world.keys_added(device, 1)
    world.program.run_all(
        f"key revoke {TENANT} {second.key.keyid}",
        f"stream raise-floor {TENANT} {PROJECT} {device.name} {FLOOR} --reason staged",
    )
    return Staged(replace(device, credential=second.credential), second, world.consumer, events)


def drafted(stage: Staged, *faults: Fault) -> Draft:
    """A request with these faults and no other."""
    draft = Draft(stage, stage.device.event(4), stage.device.credential)
    for fault in faults:
        fault.cause(draft)
    return draft


def test_the_earlier_of_two_faults_is_answered(world: World):
    """For each pair that one request can have: the earlier one's reason, and nothing retained."""
    stage = staged(world)
    pairs = [(one, other) for one, other in combinations(IN_ORDER, 2) if one.part != other.part]
    assert wrong(stage, [(fault, fault) for fault in IN_ORDER]) == {}
    assert wrong(stage, pairs) == {}
    world.program.run("device", "retire", TENANT, stage.device.name)
    before = [(fault, RETIRED) for fault in IN_ORDER if fault.reason not in UNDER_THE_LOCK]
    after = [(RETIRED, fault) for fault in IN_ORDER if fault.reason in UNDER_THE_LOCK]
    assert wrong(stage, before + after) == {}
    assert_duplicates_come_first(world, stage)


def wrong(stage: Staged, pairs: list[tuple[Fault, Fault]]) -> dict[tuple[str, str], str]:
    """The pairs that were not answered with the reason of the first, and the word that came."""
    found: dict[tuple[str, str], str] = {}
    for earlier, later in pairs:
        answer = drafted(stage, later, earlier).send()
        if answer.word == earlier.reason:
            assert_refused(answer, earlier.reason, CURSOR if earlier.reason in UNDER_THE_LOCK else None)
        else:
            found[earlier.reason, later.reason] = answer.word
    return found


def assert_duplicates_come_first(world: World, stage: Staged) -> None:
    """A retained event is a duplicate below the floor, by a revoked key and in a retired stream."""
    draft = Draft(stage, stage.events[1], stage.device.credential, signer=stage.revoked)
    answer = draft.send()
    assert (answer.status, answer.word) == (200, "duplicate")
    assert answer.body["contiguousThrough"] == FLOOR
    identity = event_identity(canonical(stage.events[1]))
    world.owes(answer.body, audited(stage.device, "duplicate", PROJECT, identity))
    assert_refused(replace(draft, signature=bytes(64)).send(), "signature_invalid")
    assert_refused(
        Draft(stage, stage.device.event(4, eventId=str(uuid4())), stage.device.credential).send(),
        "stream_retired",
        CURSOR,
    )

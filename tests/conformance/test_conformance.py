"""Outcomes and reasons, one after the other, as a client reads them in protocol sections 2 to 6 and 12."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from client import (
    ENVELOPE,
    NDJSON,
    Device,
    Key,
    base64url,
    canonical,
    envelope_of,
    event_identity,
    opened,
    pae,
    proof,
    sealed,
    undecodable_identity,
)
from nacl.signing import SigningKey
from promises import (
    assert_acknowledged,
    assert_problem,
    assert_refused,
    audited,
    audited_undecodable,
)
from stream_model import NEW, Model
from world import PROJECT, TENANT, World

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
SEED_KEY = Key(SigningKey(bytes(range(32))))
STEPS_OF_WALK = 150


def test_the_numbers_of_section_12():
    """Keys, PAE, canonical form, envelope, identities and proof come out as the page prints them."""
    page = PAGE.read_text()
    vectors = dict(re.findall(r"<!-- vector: (\w+) -->\n```json\n(.*)\n```", page))
    payload = canonical(json.loads(vectors["payload"]))
    assert payload == vectors["payload"].encode()
    assert len(payload) == 338
    assert json.loads(vectors["envelope"]) == envelope_of(SEED_KEY, payload)
    assert opened(json.loads(vectors["envelope"]), {SEED_KEY.keyid: SEED_KEY.public}) == payload
    assert pae("http://example.com/HelloWorld", b"hello world").decode() in page
    for number in (
        SEED_KEY.public.hex(),
        base64url(SEED_KEY.public),
        SEED_KEY.keyid,
        event_identity(payload),
        undecodable_identity(b""),
        proof(SEED_KEY, "example-code", "acme", "device-01"),
    ):
        assert f"`{number}`" in page


def test_the_four_outcomes(world: World):
    """Next, one further, the one between, the first again: accepted, gap, reordered, duplicate, with their cursors."""
    device = world.devices["faulty"]
    floor = device.get(f"/v1/projects/{PROJECT}/streams/{device.name}").body["highest"]
    payloads = {step: canonical(device.event(floor + step)) for step in (1, 2, 3)}
    for step, outcome, through, highest in (
        (1, "accepted", 1, 1),
        (3, "gap", 1, 3),
        (2, "reordered", 3, 3),
        (1, "duplicate", 3, 3),
    ):
        answer = device.send(sealed(device.key, payloads[step]))
        cursor = {"contiguousThrough": floor + through, "highest": floor + highest}
        assert_acknowledged(answer, outcome, payloads[step], floor + step, cursor)
        world.owes(answer.body, audited(device, outcome, PROJECT, event_identity(payloads[step])))


def test_another_spelling_of_the_outer_form_is_the_same_event(world: World):
    """White space and the order of members are free; a correlation id that a client sends is not taken."""
    device = world.devices["faulty"]
    floor = device.get(f"/v1/projects/{PROJECT}/streams/{device.name}").body["highest"]
    payload = canonical(device.event(floor + 1))
    first = device.send(sealed(device.key, payload))
    spelled = json.dumps(dict(reversed(envelope_of(device.key, payload).items())), indent=3).encode()
    again = device.call("POST", "/v1/envelopes", spelled, {"Content-Type": ENVELOPE, "X-Correlation-Id": "mine"})
    assert (first.word, again.word) == ("accepted", "duplicate")
    assert again.body["correlationId"] not in {"mine", first.body["correlationId"]}


def test_a_random_walk_is_answered_as_the_model_says(world: World, seed: int):
    """Fresh, repeated and colliding events in any order meet the model's word and cursor."""
    randomness, device, model = random.Random(seed), world.devices["walker"], Model()
    known: list[dict[str, Any]] = []
    for _ in range(STEPS_OF_WALK):
        event = next_event(randomness, device, model, known)
        payload = canonical(event)
        word = model.judge(event, event_identity(payload))
        answer = device.send(sealed(device.key, payload))
        assert answer.word == word
        if word in NEW:
            known.append(event)
        if word in NEW or word == "duplicate":
            assert_acknowledged(answer, word, payload, event["sequence"], model.cursor)
        else:
            assert_refused(answer, word, model.cursor)
        world.owes(answer.body, audited(device, word, PROJECT, event_identity(payload)))
    state = device.get(f"/v1/projects/{PROJECT}/streams/{device.name}").body
    assert state == model.cursor | {
        "project": PROJECT,
        "producer": device.name,
        "replayFloor": 0,
        "nextSequence": model.highest + 1,
        "missing": model.missing,
        "retired": False,
    }


def next_event(randomness: random.Random, device: Device, model: Model, known: list[dict[str, Any]]) -> dict[str, Any]:
    """A fresh event near the cursor or at the window's edge, or a known one with some members kept."""
    edge = model.contiguous + 1024
    near = model.contiguous + randomness.choice([1, 1, 1, 2, 3, 5])
    fresh = device.event(randomness.choice([near] * 12 + [edge, edge + 1, 2**53 - 1]))
    if not known or randomness.random() < 0.5:
        return fresh
    old = randomness.choice(known)
    kept = randomness.choice([list(old), ["eventId"], ["idempotencyKey"], ["sequence"], ["eventId", "idempotencyKey"]])
    return fresh | {name: old[name] for name in kept}


KINDS: list[dict[str, Any]] = [
    {
        "kind": "proposal",
        "proposalId": str(uuid4()),
        "revision": 2**31 - 1,
        "action": "withdraw",
        "contentDigest": "sha256:" + "0" * 64,
        "contentBytes": 2**40,
    },
    {"kind": "proposal-decision", "proposalId": str(uuid4()), "revision": 1, "decision": "deferred"},
    {
        "kind": "proposal-decision",
        "proposalId": str(uuid4()),
        "revision": 1,
        "decision": "rejected",
        "reasonCode": "policy",
    },
    {"kind": "task-status", "taskId": str(uuid4()), "attempt": 10**6, "status": "failed", "progress": 100},
    {"kind": "acknowledgement", "ackEventId": str(uuid4()), "verdict": "applied"},
    {"kind": "heartbeat", "bootId": str(uuid4()), "uptimeMs": 2**53 - 1, "queueDepth": 10**7},
]


def batch_of(*bodies: bytes) -> bytes:
    """Lines, each ended."""
    return b"".join(body + b"\n" for body in bodies)


def test_a_batch_is_answered_line_by_line(world: World):
    """100 lines are accepted in order; 101, none, and over 1 MiB are refused whole; mixed lines differ."""
    device = world.devices["batcher"]
    kinds = [canonical(device.event(number, data=data)) for number, data in enumerate(KINDS, 1)]
    payloads = kinds + [canonical(device.event(number)) for number in range(len(kinds) + 1, 101)]
    hundred = device.send_batch(batch_of(*(sealed(device.key, payload) for payload in payloads)))
    assert (hundred.status, hundred.headers["content-type"]) == (200, NDJSON)
    assert [
        (line["status"], line["outcome"], line["sequence"], line["contiguousThrough"]) for line in hundred.lines
    ] == [(201, "accepted", number, number) for number in range(1, 101)]
    whole = [
        (device.send_batch(batch_of(*[device.seal(101)] * 101)), "envelope_malformed"),
        (device.send_batch(b""), "envelope_malformed"),
        (device.send_batch(b" " * (2**20 + 1)), "body_too_large"),
    ]
    for answer, reason in whole:
        assert_refused(answer, reason)
    overlong = b" " * (8193 - len(device.seal(101))) + device.seal(101)
    lines = [device.seal(101), overlong, b"", sealed(device.key, payloads[0]), device.seal(101), device.seal(104)]
    lines += [device.seal(103) + b"\r", device.seal(5000)]
    mixed = device.send_batch(b"\n".join(lines))
    words = [line.get("outcome") or line["reason"] for line in mixed.lines]
    assert words == [
        "accepted",
        "body_too_large",
        "envelope_malformed",
        "duplicate",
        "sequence_conflict",
        "gap",
        "reordered",
        "sequence_beyond_window",
    ]
    cursor = {"contiguousThrough": 101, "highest": 104}
    assert_problem(mixed.lines[1], "body_too_large")
    assert_problem(mixed.lines[7], "sequence_beyond_window", cursor)
    for line, payload in zip(hundred.lines, payloads, strict=True):
        world.owes(line, audited(device, "accepted", PROJECT, event_identity(payload)))
    for line, sent in zip(mixed.lines[1:3], lines[1:3], strict=True):
        world.owes(line, audited_undecodable(device, line["reason"], sent))
    for answer, reason in whole[:2]:
        world.owes(answer.body, audited_undecodable(device, reason, answer.sent))


def test_tenants_share_nothing(world: World):
    """A device with the same names in another tenant has another stream, other keys and another trail."""
    twin, device = world.stranger, world.devices["walker"]
    assert twin.send(twin.seal(1)).word == "accepted"
    assert_refused(replace(twin, tenant=TENANT).send(device.seal(1)), "route_mismatch")
    borrowed = twin.send(replace(twin, key=device.key).seal(2))
    assert_refused(borrowed, "key_unknown")
    assert borrowed.body["correlationId"] in world.program.trail("other")
    world.owes(borrowed.body, None)

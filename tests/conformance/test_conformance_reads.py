"""What consumers and devices read, what raising a floor and changing keys does to it, and how a device comes in."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from client import (
    Answer,
    Caller,
    Device,
    Key,
    base64url,
    canonical,
    event_identity,
    from_base64url,
    opened,
    proof,
    sealed,
)
from promises import ACKNOWLEDGED, assert_refused, audited
from world import OTHER_PROJECT, PROJECT, TENANT, World

DAY_MS = 86_400_000


def published(caller: Caller, producer: str) -> dict[str, bytes]:
    """The public keys of a producer by key id."""
    items = caller.get(f"/v1/projects/{PROJECT}/producers/{producer}/keys").body["items"]
    return {item["keyid"]: from_base64url(item["publicKey"]) for item in items}


def sent(device: Device, *sequences: int) -> dict[int, bytes]:
    """Send fresh events; their payloads by sequence."""
    payloads = {sequence: canonical(device.event(sequence)) for sequence in sequences}
    for payload in payloads.values():
        assert device.send(sealed(device.key, payload)).word in ACKNOWLEDGED
    return payloads


def test_a_consumer_reads_in_order_and_verifies_for_itself(world: World):
    """Only through the cursor, each envelope with its published key; a closed range stands where it was closed."""
    device, consumer = world.devices["reader"], world.consumer
    path = f"/v1/projects/{PROJECT}/streams/{device.name}"
    payloads = sent(device, 1, 2, 3, 6, 7)
    state = {"project": PROJECT, "producer": device.name, "nextSequence": 8, "highest": 7, "retired": False}
    hole = [{"from": 4, "to": 5}]
    assert consumer.get(path).body == state | {"contiguousThrough": 3, "replayFloor": 0, "missing": hole}
    first = consumer.get(f"{path}/envelopes?limit=2").body
    assert (first["next"], first["contiguousThrough"]) == (2, 3)
    assert_verified(first["items"], {number: payloads[number] for number in (1, 2)}, published(consumer, device.name))
    second = consumer.get(f"{path}/envelopes?after=2").body
    assert_verified(second["items"], {3: payloads[3]}, published(consumer, device.name))
    raised = world.program.run("stream", "raise-floor", TENANT, PROJECT, device.name, "5", "--reason", "lost for good")
    assert {name: raised[name] for name in ("contiguousThrough", "highest", "replayFloor")} == {
        "contiguousThrough": 7,
        "highest": 7,
        "replayFloor": 5,
    }
    assert consumer.get(path).body == state | {"contiguousThrough": 7, "replayFloor": 5, "missing": []}
    rest = consumer.get(f"{path}/envelopes?after=3").body
    assert rest["items"][0] == {"from": 4, "to": 5, "closed": True}
    assert_verified(
        rest["items"][1:], {number: payloads[number] for number in (6, 7)}, published(consumer, device.name)
    )
    cursor = {"contiguousThrough": 7, "highest": 7}
    assert_refused(device.send(device.seal(4)), "below_replay_floor", cursor)
    assert_refused(device.send(device.seal(7)), "sequence_conflict", cursor)
    assert_refused(device.send(device.seal(2)), "below_replay_floor", cursor)
    assert device.send(sealed(device.key, payloads[2])).word == "duplicate"
    assert consumer.get(f"{path}/envelopes?after=7").body == {"items": [], "contiguousThrough": 7, "next": 7}
    assert_wakes_a_waiting_reader(device, consumer, path)


def assert_wakes_a_waiting_reader(device: Device, consumer: Caller, path: str) -> None:
    """A read that waits is answered by what comes, long before its time is over."""
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.get, f"{path}/envelopes?after=7&wait=30")
        payloads = sent(device, 8)
        page = waiting.result().body
    assert_verified(page["items"], payloads, published(consumer, device.name))
    assert time.monotonic() - began < 10


def assert_verified(items: list[dict[str, Any]], payloads: dict[int, bytes], publics: dict[str, bytes]) -> None:
    """These events and no others, each with its name and a signature that holds."""
    assert [item["sequence"] for item in items] == list(payloads)
    for item in items:
        payload = opened(item["envelope"], publics)
        assert payload == payloads[item["sequence"]]
        assert item["eventIdentity"] == event_identity(payload)
        assert abs(item["acceptedAtMs"] - time.time() * 1000) < DAY_MS


def test_what_a_key_may_bring_ends_and_what_it_brought_stays(world: World):
    """Retired and revoked keys bring nothing new; duplicates, re-signed ones too, are answered; old events verify."""
    first = world.devices["keeper"]
    second, third = world.keys_added(first, 2)
    first = replace(first, credential=third.credential)
    payloads = sent(first, 1) | sent(second, 2) | sent(third, 3)
    world.program.run_all(f"key retire {TENANT} {second.key.keyid}", f"key revoke {TENANT} {third.key.keyid}")
    cursor = {"contiguousThrough": 3, "highest": 3}
    new = canonical(first.event(4))
    refused = {"key_retired": second.send(sealed(second.key, new)), "key_revoked": third.send(sealed(third.key, new))}
    for reason, answer in refused.items():
        assert_refused(answer, reason, cursor)
    assert second.send(sealed(second.key, payloads[2])).word == "duplicate"
    assert third.send(sealed(third.key, payloads[3])).word == "duplicate"
    assert first.send(sealed(first.key, payloads[3])).word == "duplicate"
    assert first.send(sealed(first.key, new)).word == "accepted"
    for reason, answer in refused.items():
        world.owes(answer.body, audited(first, reason, PROJECT, event_identity(new)))
    keys = world.consumer.get(f"/v1/projects/{PROJECT}/producers/{first.name}/keys").body["items"]
    assert [(key["keyid"], key["publicKey"], key["state"]) for key in keys] == [
        (device.key.keyid, base64url(device.key.public), state)
        for device, state in ((first, "active"), (second, "verify-only"), (third, "revoked"))
    ]
    page = world.consumer.get(f"/v1/projects/{PROJECT}/streams/{first.name}/envelopes").body
    assert_verified(page["items"], payloads | {4: new}, published(world.consumer, first.name))


def test_reads_stay_in_their_scope(world: World):
    """Other streams, projects and tenants are `not_found`; a wrong role, no credential and bad queries are told."""
    device, consumer = world.devices["walker"], world.consumer
    streams = f"/v1/projects/{PROJECT}/streams"
    own = device.get(streams).body
    assert ([item["producer"] for item in own["items"]], own["next"]) == ([device.name], None)
    everyone = consumer.get(streams).body["items"]
    producers = [item["producer"] for item in everyone]
    assert producers == sorted(producers)
    assert set(world.devices) <= set(producers)
    page = consumer.get(f"{streams}?limit=2&after={everyone[1]['producer']}").body
    assert (page["items"], page["next"]) == (everyone[2:4], everyone[3]["producer"])
    assert world.outsider.get(f"{streams}/{device.name}").body["highest"] <= 1
    answers: list[tuple[str, Answer]] = [
        ("not_found", device.get(f"{streams}/reader")),
        ("not_found", consumer.get(f"{streams}/nobody")),
        ("not_found", consumer.get(f"/v1/projects/{OTHER_PROJECT}/streams")),
        ("not_found", consumer.get(f"/v1/projects/{PROJECT}/producers/nobody/keys")),
        ("not_found", world.outsider.get(f"{streams}/reader")),
        ("not_found", world.outsider.get(f"{streams}/reader/envelopes")),
        ("not_found", consumer.get("/v1/nothing")),
        ("not_found", consumer.get(f"{streams}/wal%6Ber")),
        ("method_not_allowed", device.get("/v1/envelopes")),
        ("role_forbidden", device.get(f"{streams}/{device.name}/envelopes")),
        ("role_forbidden", device.get(f"/v1/projects/{PROJECT}/producers/{device.name}/keys")),
        ("role_forbidden", world.operator.get(streams)),
        ("unauthenticated", Caller(world.address).get(streams)),
        *(
            ("request_invalid", consumer.get(f"{streams}/{device.name}/envelopes?{query}"))
            for query in ("limit=0", "limit=1001", "after=-1", "after=x", "wait=31", "wait=-1", "limit=1&limit=1")
        ),
    ]
    for reason, answer in answers:
        assert_refused(answer, reason)


def enrolled(address: str, claim: dict[str, str]) -> Answer:
    """Ask for an enrolment with this body."""
    return Caller(address).call(
        "POST", "/v1/enrolments", json.dumps(claim).encode(), {"Content-Type": "application/json"}
    )


def test_an_enrolment_serves_one_key_and_can_be_had_again(world: World):
    """Another key, proof or code is refused alike; the same once more brings a new credential and ends the old one."""
    name, key = "newcomer", Key()
    code = world.program.run("device", "invite", TENANT, name, "--project", PROJECT)["code"]
    good = {"code": code, "publicKey": base64url(key.public), "proof": proof(key, code, TENANT, name)}
    other = Key()
    refused = [
        enrolled(world.address, good | {"proof": proof(key, code, TENANT, "somebody")}),
        enrolled(world.address, good | {"proof": proof(key, code, "other", name)}),
        enrolled(world.address, good | {"publicKey": base64url(other.public)}),
        enrolled(world.address, good | {"code": "pse_" + "A" * 43}),
        enrolled(world.address, good | {"publicKey": base64url(bytes(31) + b"\x80")}),
        enrolled(world.address, good | {"publicKey": base64url(b"\x01" + bytes(31))}),
    ]
    first, again = enrolled(world.address, good), enrolled(world.address, good)
    late = {"publicKey": base64url(other.public), "proof": proof(other, code, TENANT, name)}
    refused.append(enrolled(world.address, good | late))
    for answer in refused:
        assert_refused(answer, "enrolment_refused")
        assert answer.body["detail"] == refused[0].body["detail"]
    for answer in (first, again):
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        fixed = {"tenant": TENANT, "device": name, "projects": [PROJECT], "keyid": key.keyid}
        assert answer.body == fixed | {member: answer.body[member] for member in ("credential", "expiresAtMs")}
        assert abs(answer.body["expiresAtMs"] - time.time() * 1000 - 90 * DAY_MS) < DAY_MS
    assert first.body["credential"] != again.body["credential"]
    device = Device(world.address, first.body["credential"], TENANT, PROJECT, name, key)
    assert_refused(device.send(device.seal(1)), "unauthenticated")
    device = replace(device, credential=again.body["credential"])
    assert device.send(device.seal(1)).word == "accepted"
    acts = [row for row in world.program.trail(TENANT).values() if row["device"] == name and row["outcome"] == "done"]
    assert [(row["action"], row["detail"]["again"]) for row in acts] == [
        ("device.enrol", False),
        ("device.enrol", True),
    ]
    world.program.run("key", "revoke", TENANT, key.keyid)
    assert_refused(enrolled(world.address, good), "enrolment_refused")


@pytest.mark.parametrize(
    ("body", "media_type", "reason"),
    [
        (b"{}", "application/json", "request_invalid"),
        (b"[", "application/json", "request_invalid"),
        (b'{"code":"a","publicKey":"!","proof":"!"}', "application/json", "request_invalid"),
        (b"{}", "text/plain", "unsupported_media_type"),
        (b" " * 4097, "application/json", "body_too_large"),
    ],
)
def test_an_enrolment_of_another_form_is_refused(world: World, body: bytes, media_type: str, reason: str):
    """Form, media type and size are told apart from what is refused."""
    answer = Caller(world.address).call("POST", "/v1/enrolments", body, {"Content-Type": media_type})
    assert_refused(answer, reason)


def test_the_published_schema_and_the_health_calls_need_no_credential(world: World):
    """The schema is JSON Schema 2020-12; the process answers and commits."""
    anyone = Caller(world.address)
    schema = anyone.get("/schemas/payload.v1.schema.json")
    assert (schema.status, schema.headers["content-type"]) == (200, "application/schema+json")
    assert schema.body["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert [anyone.get(path).status for path in ("/healthz", "/readyz")] == [200, 200]

"""Each fault that a request can have by itself, with its reason and its audit event (protocol sections 4 to 6)."""

import base64
import json
import socket

import pytest
from client import ENVELOPE, Answer, Caller, Device, event_identity, undecodable_identity
from faulty_bodies import BEFORE_THE_ROUTE, BEHIND_THE_ROUTE, OUTER_FORM, Fault
from promises import assert_refused, audited, audited_undecodable, told
from world import PROJECT, TENANT, World

SOCKET_TIMEOUT_S = 10


def test_a_fault_of_the_outer_form_is_audited_by_its_body(world: World):
    """A body that breaks section 2 in any point is `envelope_malformed`; audit names the body as undecodable."""
    device = world.devices["faulty"]
    answers = provoked(device, OUTER_FORM)
    trail = world.program.trail(TENANT)
    for fault, answer in answers:
        expected = audited_undecodable(device, fault.reason, answer.sent)
        assert told(trail[answer.body["correlationId"]]) == expected, fault.what


@pytest.mark.parametrize(("faults", "project"), [(BEFORE_THE_ROUTE, None), (BEHIND_THE_ROUTE, PROJECT)])
def test_a_fault_of_the_event_is_audited_by_its_identity(world: World, faults: list[Fault], project: str | None):
    """Where the outer form holds, audit has the event's identity, and the project once the route has matched."""
    device = world.devices["faulty"]
    answers = provoked(device, faults)
    trail = world.program.trail(TENANT)
    for fault, answer in answers:
        identity = event_identity(base64.b64decode(json.loads(answer.sent)["payload"]))
        expected = audited(device, fault.reason, project, identity)
        assert told(trail[answer.body["correlationId"]]) == expected, fault.what


def provoked(device: Device, faults: list[Fault]) -> list[tuple[Fault, Answer]]:
    """The answer to each fault alone, with its reason checked; none leaves a trace in the stream."""
    answers: list[tuple[Fault, Answer]] = []
    for fault in faults:
        answer = device.send(fault.body(device))
        assert answer.word == fault.reason, fault.what
        assert_refused(answer, fault.reason)
        answers.append((fault, answer))
    assert device.get(f"/v1/projects/{PROJECT}/streams/{device.name}").body["highest"] == 0
    return answers


def test_the_adapter_refuses_size_media_type_and_encoding(world: World):
    """Before all else; a valid caller's refusals are in its tenant's trail, named by what had come of the body."""
    device = world.devices["faulty"]
    body, path = device.seal(9), "/v1/envelopes"
    encoded = {"Content-Type": ENVELOPE, "Content-Encoding": "identity"}
    answers = [
        ("body_too_large", device.send(body + b" " * (8193 - len(body)))),
        ("body_too_large", device.call("POST", path, None, {"Content-Type": ENVELOPE, "Content-Length": "8193"})),
        ("body_too_large", chunked(device, b" " * 8193)),
        ("unsupported_media_type", device.send(body, "application/json")),
        ("unsupported_media_type", device.send(body, f"{ENVELOPE}; charset=utf-8")),
        ("unsupported_media_type", device.call("POST", path, body)),
        ("unsupported_media_type", device.call("POST", path, body, encoded)),
        ("unsupported_media_type", device.call("POST", f"{path}/batch", body, {"Content-Type": ENVELOPE})),
    ]
    trail = world.program.trail(TENANT)
    for reason, answer in answers:
        assert_refused(answer, reason)
        row = told(trail[answer.body["correlationId"]])
        assert row | {"eventIdentity": None} == audited(device, reason, None, None, undecodable=True)


def chunked(device: Device, body: bytes) -> Answer:
    """Send a body in one chunk, without its length in the head."""
    head = f"POST /v1/envelopes HTTP/1.1\r\nHost: {device.address}\r\nAuthorization: Bearer {device.credential}\r\n"
    head += f"Content-Type: {ENVELOPE}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    host, port = device.address.split(":")
    with socket.create_connection((host, int(port)), timeout=SOCKET_TIMEOUT_S) as connection:
        connection.sendall(head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    return Answer.parsed(received, body)


@pytest.mark.parametrize("credential", [None, "", "x", "ps_" + "0" * 32 + "_" + "a" * 43])
def test_unauthenticated(world: World, credential: str | None):
    """Whatever is no valid credential is 401 with its challenge."""
    assert_refused(Caller(world.address, credential).send(b"{}"), "unauthenticated")


def test_role_forbidden(world: World):
    """A consumer or operator sends nothing; the trail names a body that was not looked into."""
    body = world.devices["faulty"].seal(9)
    answers = {"consumer": world.consumer.send(body), "operator": world.operator.send(body)}
    trail = world.program.trail(TENANT)
    for account, answer in answers.items():
        assert_refused(answer, "role_forbidden")
        row = told(trail[answer.body["correlationId"]])
        assert (row["account"], row["device"], row["project"]) == (account, None, None)
        assert (row["reason"], row["eventIdentity"]) == ("role_forbidden", undecodable_identity(body))

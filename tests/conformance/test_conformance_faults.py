"""Each fault that a request can have by itself, with its reason and its audit event (protocol sections 4 to 6)."""

import base64
import json
import socket

import pytest
from client import ENVELOPE, Answer, Caller, Device, event_identity
from faulty_bodies import BEFORE_THE_ROUTE, BEHIND_THE_ROUTE, OUTER_FORM, Fault
from promises import ANY_IDENTITY, assert_refused, audited, audited_undecodable
from world import PROJECT, World

SOCKET_TIMEOUT_S = 10


def test_each_fault_has_its_reason_and_its_audit_event(world: World):
    """Audit names the body where the outer form breaks, else the event, and the project once the route has matched."""
    device = world.devices["faulty"]
    outer_form = provoked(device, OUTER_FORM)
    before, behind = provoked(device, BEFORE_THE_ROUTE), provoked(device, BEHIND_THE_ROUTE)
    for fault, answer in outer_form:
        world.owes(answer.body, audited_undecodable(device, fault.reason, answer.sent))
    for project, answers in ((None, before), (PROJECT, behind)):
        for fault, answer in answers:
            identity = event_identity(base64.b64decode(json.loads(answer.sent)["payload"]))
            world.owes(answer.body, audited(device, fault.reason, project, identity))


def provoked(device: Device, faults: list[Fault]) -> list[tuple[Fault, Answer]]:
    """The answer to each fault alone, with its reason checked; none leaves a trace in the stream."""
    stream = f"/v1/projects/{PROJECT}/streams/{device.name}"
    state = device.get(stream).body
    answers: list[tuple[Fault, Answer]] = []
    for fault in faults:
        answer = device.send(fault.body(device))
        assert answer.word == fault.reason, fault.what
        assert_refused(answer, fault.reason)
        answers.append((fault, answer))
    assert device.get(stream).body == state
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
    for reason, answer in answers:
        assert_refused(answer, reason)
        world.owes(answer.body, audited(device, reason, None, ANY_IDENTITY, undecodable=True))


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
    device = world.devices["faulty"]
    body = device.seal(9)
    answers = {"consumer": world.consumer.send(body), "operator": world.operator.send(body)}
    for account, answer in answers.items():
        assert_refused(answer, "role_forbidden")
        event = audited_undecodable(device, "role_forbidden", body) | {"account": account, "device": None}
        world.owes(answer.body, event)

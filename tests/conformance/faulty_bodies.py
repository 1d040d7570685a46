"""Bodies with exactly one fault each, in the order of the steps 2 to 4 of protocol section 4."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from client import EVENT, Device, Key, canonical, envelope_of, sealed
from world import OTHER_PROJECT

SEQUENCE = 9
Body = Callable[[Device], bytes]


def outer(**members: Any) -> Body:
    """An envelope with these outer members."""
    return lambda device: json.dumps(envelope_of(device.key, fresh(device)) | members).encode()


def inner(**members: Any) -> Body:
    """A signed envelope whose event has these members."""
    return lambda device: sealed(device.key, canonical(device.event(SEQUENCE) | members))


def raw(payload: bytes) -> Body:
    """A signed envelope around any bytes."""
    return lambda device: sealed(device.key, payload)


def spelled(old: bytes, new: bytes) -> Body:
    """A signed envelope whose payload is written otherwise."""

    def body(device: Device) -> bytes:
        payload = fresh(device)
        assert old in payload
        return sealed(device.key, payload.replace(old, new, 1))

    return body


def routed(**members: Any) -> Body:
    """A signed envelope with another route; None leaves a member out."""

    def body(device: Device) -> bytes:
        route = device.event(SEQUENCE)["route"] | members
        return device.seal(SEQUENCE, route={name: value for name, value in route.items() if value is not None})

    return body


def signed_with(**members: Any) -> Body:
    """An envelope with these members of its signature."""

    def body(device: Device) -> bytes:
        envelope = envelope_of(device.key, fresh(device))
        envelope["signatures"][0] |= members
        return json.dumps(envelope).encode()

    return body


def without(member: str) -> Body:
    """A signed envelope whose event lacks a member."""

    def body(device: Device) -> bytes:
        event = device.event(SEQUENCE)
        del event[member]
        return sealed(device.key, canonical(event))

    return body


def replaced(old: str, new: str) -> Body:
    """An envelope whose text is written otherwise."""
    return lambda device: device.seal(SEQUENCE).replace(old.encode(), new.encode(), 1)


def fresh(device: Device) -> bytes:
    """The payload of an event without a fault."""
    return canonical(device.event(SEQUENCE))


def unpadded(device: Device) -> bytes:
    """An envelope whose payload's base64 lacks its padding."""
    payload = fresh(device)
    payload += b" " * (3 - len(payload) % 3 + 1)
    return json.dumps(envelope_of(device.key, payload)).replace('==", "payloadType"', '", "payloadType"').encode()


def loose_bits(device: Device) -> bytes:
    """An envelope whose signature's base64 has a one among its unused bits."""
    envelope = envelope_of(device.key, fresh(device))
    [signature] = envelope["signatures"]
    last = signature["sig"][-3]
    signature["sig"] = signature["sig"][:-3] + {"A": "B", "Q": "R", "g": "h", "w": "x"}[last] + "=="
    return json.dumps(envelope).encode()


def two_signatures(device: Device) -> bytes:
    """An envelope signed twice."""
    envelope = envelope_of(device.key, fresh(device))
    return json.dumps(envelope | {"signatures": envelope["signatures"] * 2}).encode()


@dataclass(frozen=True)
class Fault:
    """One reason, what is wrong, and a body with this fault alone."""

    reason: str
    what: str
    body: Body


OUTER_FORM = [
    Fault("envelope_malformed", "empty body", lambda _: b""),
    Fault("envelope_malformed", "no JSON", lambda _: b"{"),
    Fault("envelope_malformed", "a list", lambda _: b"[]"),
    Fault("envelope_malformed", "further member", outer(more=1)),
    Fault("envelope_malformed", "other payloadType", outer(payloadType="application/json")),
    Fault("envelope_malformed", "no signature", outer(signatures=[])),
    Fault("envelope_malformed", "two signatures", two_signatures),
    Fault("envelope_malformed", "member twice", replaced('{"payload"', f'{{"payloadType": "{EVENT}", "payload"')),
    Fault("envelope_malformed", "escaped name", replaced('"payload"', '"p\\u0061yload"')),
    Fault("envelope_malformed", "escaped value", replaced('"application', '"\\u0061pplication')),
    Fault("envelope_malformed", "no base64", outer(payload="!")),
    Fault("envelope_malformed", "line break in base64", outer(payload="e30=\n")),
    Fault("envelope_malformed", "base64url", signed_with(sig="_" * 85 + "A==")),
    Fault("envelope_malformed", "without padding", unpadded),
    Fault("envelope_malformed", "loose bits", loose_bits),
    Fault("envelope_malformed", "63 bytes of signature", signed_with(sig=base64.b64encode(bytes(63)).decode())),
    Fault("envelope_malformed", "42 characters of keyid", signed_with(keyid="a" * 42)),
    Fault("envelope_malformed", "further member of the signature", signed_with(more=1)),
    Fault("envelope_malformed", "empty payload", raw(b"")),
    Fault("envelope_malformed", "4,097 bytes of payload", raw(b'{"a":"' + b"a" * 4089 + b'"}')),
]
"""The outer form breaks in a point of section 2: audit names the body."""

BEFORE_THE_ROUTE = [
    Fault("envelope_malformed", "payload is a list", raw(b"[]")),
    Fault("envelope_malformed", "payload is no UTF-8", raw(b'{"a":"\xff"}')),
    Fault("envelope_malformed", "payload has a lone surrogate", raw(b'{"a":"\\ud800"}')),
    Fault("envelope_malformed", "payload is nested deeply", raw(b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}")),
    Fault("identity_out_of_bounds", "no route", raw(b"{}")),
    Fault("identity_out_of_bounds", "route is a text", inner(route="acme")),
    Fault("identity_out_of_bounds", "no tenant", routed(tenant=None)),
    Fault("identity_out_of_bounds", "project is a number", routed(project=1)),
    Fault("route_mismatch", "other tenant", routed(tenant="other")),
    Fault("route_mismatch", "other project", routed(project=OTHER_PROJECT)),
    Fault("route_mismatch", "unknown project", routed(project="nowhere")),
    Fault("route_mismatch", "other producer", routed(producer="walker")),
    Fault("route_mismatch", "the service's producer", routed(producer="controlplane")),
]
"""The event has its identity, and no project is known yet."""

BEHIND_THE_ROUTE = [
    Fault("identity_out_of_bounds", "upper-case event id", inner(eventId=str(uuid4()).upper())),
    Fault("identity_out_of_bounds", "event id without hyphens", inner(eventId=uuid4().hex)),
    Fault("identity_out_of_bounds", "no event id", without("eventId")),
    Fault("identity_out_of_bounds", "short idempotency key", inner(idempotencyKey="a" * 7)),
    Fault("identity_out_of_bounds", "long idempotency key", inner(idempotencyKey="a" * 129)),
    Fault("identity_out_of_bounds", "sequence 0", inner(sequence=0)),
    Fault("identity_out_of_bounds", "sequence 2^53", inner(sequence=2**53)),
    Fault("identity_out_of_bounds", "sequence is true", inner(sequence=True)),
    Fault("identity_out_of_bounds", "sequence is a text", inner(sequence="9")),
    Fault("identity_out_of_bounds", "sequence is 9.0", spelled(b'"sequence":9', b'"sequence":9.0')),
    Fault("key_unknown", "a new key", lambda device: replace(device, key=Key()).seal(SEQUENCE)),
    Fault("signature_invalid", "zeros", signed_with(sig=base64.b64encode(bytes(64)).decode())),
    Fault(
        "signature_invalid",
        "of other bytes",
        lambda device: outer(payload=envelope_of(device.key, fresh(device))["payload"])(device),
    ),
    Fault("schema_version_unsupported", "protocol v2", inner(protocol="controlplane/v2")),
    Fault("schema_version_unsupported", "no protocol", without("protocol")),
    Fault("schema_version_unsupported", "version 2", inner(schemaVersion=2)),
    Fault("schema_version_unsupported", "version true", inner(schemaVersion=True)),
    Fault("schema_version_unsupported", "version 1.0", spelled(b'"schemaVersion":1', b'"schemaVersion":1.0')),
    Fault("payload_invalid", "further member", inner(more=1)),
    Fault("payload_invalid", "audience", routed(audience="anybody")),
    Fault("payload_invalid", "further member of the route", routed(more="x")),
    Fault("payload_invalid", "no issuedAtMs", without("issuedAtMs")),
    Fault("payload_invalid", "issuedAtMs too great", inner(issuedAtMs=4102444800001)),
    Fault("payload_invalid", "unknown kind", inner(data={"kind": "gossip"})),
    Fault("payload_invalid", "no data", without("data")),
    Fault("payload_invalid", "white space", spelled(b'"schemaVersion":1', b'"schemaVersion": 1')),
    Fault("payload_invalid", "member twice", spelled(b'"issuedAtMs":0', b'"issuedAtMs":0,"issuedAtMs":0')),
    Fault(
        "payload_invalid", "sequence twice, the last in bounds", spelled(b'"sequence":9', b'"sequence":0,"sequence":9')
    ),
    Fault("payload_invalid", "needless escape", spelled(b"conformance:", b"conf\\u006frmance:")),
    Fault("payload_invalid", "a float that is whole", spelled(b'"uptimeMs":1', b'"uptimeMs":1.0')),
    Fault("payload_invalid", "minus zero", spelled(b'"issuedAtMs":0', b'"issuedAtMs":-0')),
]
"""The route has matched, so audit knows the project as well."""

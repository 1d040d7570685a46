"""What holds for any bytes at all: one function a parser, which raises AssertionError where a promise is broken.

Whatever another error is than the refusal that the protocol names, a broken promise it is too. Each of them runs over
the kept corpus and, in a process of its own, under a fuzzer that looks for inputs which reach new code.
"""

import ipaddress
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import httptools
import jsonschema_rs
from every_kind import JOB_FILE, KINDS, data_of, event
from independent import is_event, is_version_1, read_json, rfc8785
from securesystemslib.dsse import Envelope as DsseEnvelope

from postseal.envelope import dsse, ed25519, enrolment, v1
from postseal.envelope.kinds import Kinds, read_kinds
from postseal.envelope.schema import payload_schema
from postseal.errors import Refused, StartupError
from postseal.identity.codes import code_hash
from postseal.inbound.inbox import MAX_BATCH_LINES, split_lines
from postseal.kinds_folder import compile_schema
from postseal.limits import peer_key
from postseal.outcomes import Reason
from postseal.web import enrolments
from postseal.web.calls import decode_body
from postseal.web.head import read_head
from postseal.web.peer import NOBODY, TrustedProxies

T = TypeVar("T")

MAX_DETAIL_CHARACTERS = 120
NAMES = set(re.findall(r'"([A-Za-z]+)"', payload_schema(KINDS).decode())) | {"code", "publicKey", "proof"}
"""The member names that a refusal may say."""


def body(raw: bytes) -> None:
    """An envelope is read as every DSSE library reads it, or is malformed; then its payload is read too."""
    envelope = attempt(lambda: dsse.unwrap(raw), Reason.ENVELOPE_MALFORMED)
    if envelope is None:
        return
    outer = read_json(raw)
    [signature] = outer["signatures"]
    in_order = {name: outer[name] for name in ("payload", "payloadType", "signatures")}
    in_order["signatures"] = [{name: signature[name] for name in ("keyid", "sig")}]
    emitted = dsse.wrap(envelope.payload, envelope.keyid, envelope.signature)
    assert emitted == json.dumps(in_order, separators=(",", ":")).encode()
    assert sorted(emitted) == sorted(raw.translate(None, b" \t\r\n"))
    assert dsse.unwrap(emitted) == envelope
    theirs = DsseEnvelope.from_dict(outer)  # pyright: ignore[reportUnknownMemberType]  # bare dict
    assert (theirs.payload, theirs.pae()) == (envelope.payload, envelope.signed_bytes)
    assert {keyid: bytes.fromhex(found.signature) for keyid, found in theirs.signatures.items()} == {
        envelope.keyid: envelope.signature
    }
    payload(envelope.payload)


def payload(raw: bytes) -> None:
    """An event opens exactly if it is one by the published schema and RFC 8785, and comes back byte for byte."""
    if len(raw) > dsse.MAX_PAYLOAD_BYTES:
        return
    claims = attempt(lambda: v1.read_claims(raw), Reason.ENVELOPE_MALFORMED)
    route = claims and attempt(claims.route, Reason.IDENTITY_OUT_OF_BOUNDS)
    identities = claims and attempt(claims.identities, Reason.IDENTITY_OUT_OF_BOUNDS)
    if claims is None:
        step_4 = Reason.ENVELOPE_MALFORMED
    else:
        step_4 = Reason.PAYLOAD_INVALID if is_version_1(raw) else Reason.SCHEMA_VERSION_UNSUPPORTED
    received = attempt(lambda: v1.open_payload(raw, KINDS), step_4)
    sent = attempt(lambda: v1.open_delivery(raw, KINDS), step_4)
    assert received is None or sent is None
    opened = received or sent
    assert (opened is not None) is is_event(raw)
    if opened is None:
        return
    assert v1.encode_payload(opened, KINDS) == raw
    assert route
    assert (route.tenant, route.project, route.producer) == (
        opened.route.tenant,
        opened.route.project,
        opened.route.producer,
    )
    assert identities == v1.Identities(
        event_id=opened.event_id, idempotency_key=opened.idempotency_key, sequence=opened.sequence
    )


PROBES: list[Any] = [None, True, 0, -1, 1.5, 2**53, "", "a", "a" * 3000, [], [None], {}, {"zzz": {}}]


def kind(raw: bytes) -> None:
    """A schema file is refused in one line with its place, or takes nothing that is not closed and canonical."""
    try:
        kinds = read_kinds({JOB_FILE: raw}, compile_schema)
    except StartupError as error:
        message = str(error)
        assert message.startswith(f"kind schema {JOB_FILE}, at #"), message
        assert message.isprintable()
        return
    [found] = kinds.values()
    assert jsonschema_rs.meta.is_valid(json.loads(payload_schema(kinds)))
    data = data_of("acme.job")
    assert found.fault(data | {"zzz": 1}) is not None
    assert found.fault({}) is not None
    for name in {*data, *found.schema["properties"]} - {"kind"}:
        for value in PROBES:
            probe = event("acme.job") | {"data": data | {name: value}}
            raw_probe = json.dumps(probe, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
            opened = opened_or_invalid(raw_probe, kinds)
            assert opened is None or v1.encode_payload(opened, kinds) == raw_probe == rfc8785(probe)


def opened_or_invalid(raw: bytes, kinds: Kinds) -> v1.Payload | v1.DeploymentPayload | None:
    """The event; None where it is `payload_invalid`. The names in a refusal are the schema's, whatever they are."""
    try:
        return v1.open_payload(raw, kinds)
    except Refused as error:
        refused = error
    assert refused.reason is Reason.PAYLOAD_INVALID
    return None


def lines(raw: bytes) -> None:
    """The lines of a batch, put together again, are the body; none has an LF, and one LF may end the last."""
    found = split_lines(raw)
    if raw.removesuffix(b"\n").count(b"\n") >= MAX_BATCH_LINES:  # too many: they are refused, however they are split
        assert len(found) > MAX_BATCH_LINES
        return
    assert b"\n".join(found) == raw.removesuffix(b"\n")
    assert len(found) == raw.count(b"\n") + (not raw.endswith(b"\n") and raw != b"")
    assert not any(b"\n" in line for line in found)


PROXIES = TrustedProxies(["10.0.0.0/8", "fd00::/8"])
OURS = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")]
OUR_SOCKETS = ["10.1.1.1", "::ffff:10.1.1.1", "fd00::1"]
SOCKETS = [*OUR_SOCKETS, "203.0.113.9", "2001:db8::9", "no address", None]


def peer(raw: bytes) -> None:
    """First byte: whose socket it is; then X-Forwarded-For, a field a line. Only our proxies are believed."""
    if not raw:
        return
    socket_peer = SOCKETS[raw[0] % len(SOCKETS)]
    forwarded = raw[1:].split(b"\n")
    found = PROXIES.peer(socket_peer, forwarded)
    assert peer_key(found)
    assert PROXIES.peer(socket_peer, [b",".join(forwarded)]) == found
    if found == (socket_peer or NOBODY):
        return
    assert socket_peer in OUR_SOCKETS, "a stranger was believed"
    address = ipaddress.ip_address(found)
    assert str(address) == found
    assert not any(address in network for network in OURS)
    # Whatever stands left of the decisive hop changes nothing.
    assert PROXIES.peer(socket_peer, [b"10.9.9.9, x, 198.51.100.9", *forwarded]) == found


def head(raw: bytes) -> None:
    """The lines of a head, as the HTTP parser of the service lets them through, each have one meaning or none."""
    fields = _fields(raw)
    if fields is None:
        return
    scope = {"type": "http", "headers": fields, "client": ("10.1.1.1", 4711)}
    found = read_head(scope, PROXIES)
    values = {name: [value for other, value in fields if other == name] for name, _ in fields}
    if found.credential is not None:
        [authorization] = values[b"authorization"]
        assert found.credential.isascii()
        assert found.credential == found.credential.strip(" ") != ""
        assert authorization.lower().startswith(b"bearer ")
        assert authorization.rstrip(b" ").endswith(found.credential.encode())
    if found.media_type is not None:
        [media_type] = values[b"content-type"]
        assert found.media_type == media_type.strip().lower()
    assert found.encoded or b"content-encoding" not in values
    assert found.encoded or {value.strip().lower() for value in values.get(b"transfer-encoding", [])} <= {b"chunked"}
    assert [found.declared_bytes] == [int(value) for value in values.get(b"content-length", [b"0"])]
    assert 0 <= found.declared_bytes < 2**64
    assert found.peer == PROXIES.peer("10.1.1.1", values.get(b"x-forwarded-for", []))


def _fields(raw: bytes) -> list[tuple[bytes, bytes]] | None:
    """The fields of a head as the server hands them over; None where it refuses the request itself."""
    fields: list[tuple[bytes, bytes]] = []
    ended: list[bool] = []

    class Sink:
        def on_header(self, name: bytes, value: bytes) -> None:
            fields.append((name.lower(), value))

        def on_headers_complete(self) -> None:
            ended.append(True)
            raise EOFError  # what follows is body

    with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        httptools.HttpRequestParser(Sink()).feed_data(b"POST / HTTP/1.1\r\nHost: a\r\n" + raw + b"\r\n\r\n")
    return fields if ended else None


def enrol(raw: bytes) -> None:
    """A request to enrol holds a code, a key of 32 bytes and a proof of 64 in their one spelling, or is invalid."""
    wanted = attempt(lambda: decode_body(raw, enrolments.Enrolment), Reason.REQUEST_INVALID)
    if wanted is None:
        return
    read = enrolments._from_base64url  # pyright: ignore[reportPrivateUsage]  # the call around it needs a database
    public = attempt(lambda: read(wanted.public_key), Reason.REQUEST_INVALID)
    proof = attempt(lambda: read(wanted.proof), Reason.REQUEST_INVALID)
    digest = code_hash(wanted.code)
    assert digest is None or len(wanted.code) == len("pse_") + 43
    if public is None or proof is None:
        return
    assert (len(public), len(proof)) == (ed25519.PUBLIC_KEY_BYTES, ed25519.SIGNATURE_BYTES)
    assert not enrolment.proves(public, proof, code=wanted.code, device="d", keyid="k", tenant="t")


HARNESSES: dict[str, Callable[[bytes], None]] = {
    harness.__name__: harness for harness in (body, payload, kind, lines, peer, head, enrol)
}


def attempt(read: Callable[[], T], reason: Reason) -> T | None:
    """What `read` returns, or None where it refuses for `reason`, in plain words that quote nothing."""
    try:
        return read()
    except Refused as error:
        refused = error
    assert refused.reason is reason
    assert refused.detail.isascii()
    assert refused.detail.isprintable()
    assert len(refused.detail) <= MAX_DETAIL_CHARACTERS
    assert refused.__suppress_context__ or refused.__context__ is None
    for place in re.findall(r"\$(\S+)", refused.detail):
        assert all(name.isdigit() or name in NAMES for name in place.strip(".").split("."))
    return None

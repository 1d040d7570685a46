"""The envelope: its bytes, what DSSE libraries make of them, and every outer form that is refused."""

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope as DsseEnvelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey  # pyright: ignore[reportPrivateImportUsage]  # documented there
from wire_samples import SEED, canonical, payloads, sample

from postseal.envelope import dsse, ed25519, v1
from postseal.errors import Refused
from postseal.outcomes import Reason

PUBLIC = ed25519.public_key(SEED)
SEALED = dsse.seal(canonical(sample()), SEED)
BODY = dsse.wrap(SEALED.payload, SEALED.keyid, SEALED.signature)


def test_section_12_pae():
    """The PAE of DSSE's own example has the bytes that protocol section 12 gives."""
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert dsse.pae("http://example.com/HelloWorld", b"hello world") == expected


def test_pae_counts_bytes():
    """Lengths are of bytes, not of characters."""
    assert dsse.pae("\u00e9", "\u00e9\u00e9".encode()) == "DSSEv1 2 \u00e9 4 \u00e9\u00e9".encode()


def test_wrap_writes_the_one_form():
    """Members in order, no white space, padded base64: byte for byte."""
    expected = (
        b'{"payload":"e30=","payloadType":"application/vnd.controlplane.event.v1+json",'
        b'"signatures":[{"keyid":"K","sig":"' + b"A" * 86 + b'=="}]}'
    )
    assert dsse.wrap(b"{}", "K", bytes(64)) == expected


def test_seal_fills_in_everything():
    """Key id, signed bytes, identity and signature are those of the payload and the key."""
    assert SEALED.keyid == "1IG2tMH7J2wbJZnOf8LJzQitKf7LMvoAElsuDMVM54Y"
    assert SEALED.signed_bytes == dsse.pae(dsse.PAYLOAD_TYPE, SEALED.payload)
    assert SEALED.identity == hashlib.sha256(SEALED.signed_bytes).digest()
    assert ed25519.verify(PUBLIC, SEALED.signed_bytes, SEALED.signature)
    assert dsse.unwrap(BODY) == SEALED


def test_identity_outlives_a_rotation():
    """The same payload signed by another key is the same event."""
    assert dsse.seal(SEALED.payload, bytes(32)).identity == SEALED.identity


@pytest.mark.parametrize("length", [0, dsse.MAX_PAYLOAD_BYTES + 1])
def test_seal_keeps_the_payload_bound(length: int):
    """Nothing that `unwrap` would refuse for its length is signed."""
    with pytest.raises(ValueError, match="1 to 4096 bytes"):
        dsse.seal(bytes(length), SEED)


@pytest.mark.parametrize("length", [1, 2, 3, dsse.MAX_PAYLOAD_BYTES])
def test_payload_bounds_are_inclusive(length: int):
    """1 to 4,096 bytes go through, and the largest fits the body limit."""
    sealed = dsse.seal(bytes(length), SEED)
    body = dsse.wrap(sealed.payload, sealed.keyid, sealed.signature)
    assert dsse.unwrap(body) == sealed
    assert len(body) <= dsse.MAX_ENVELOPE_BYTES


@settings(deadline=None)  # a busy machine is no failure
@given(payloads(audience=False), st.binary(min_size=32, max_size=32))
def test_round_trip(payload: dict[str, Any], seed: bytes):
    """Seal, wrap, unwrap, verify, open, encode: whatever went in comes out."""
    raw = canonical(payload)
    sealed = dsse.seal(raw, seed)
    envelope = dsse.unwrap(dsse.wrap(sealed.payload, sealed.keyid, sealed.signature))
    assert envelope == sealed
    assert ed25519.verify(ed25519.public_key(seed), envelope.signed_bytes, envelope.signature)
    assert v1.encode_payload(v1.open_payload(envelope.payload)) == raw


def test_securesystemslib_reads_and_verifies_us():
    """What we emit is DSSE to another library: same PAE, valid signature; a changed payload fails."""
    theirs = DsseEnvelope.from_dict(json.loads(BODY))  # pyright: ignore[reportUnknownMemberType]  # bare dict
    key = SSlibKey(SEALED.keyid, "ed25519", "ed25519", {"public": PUBLIC.hex()})
    assert theirs.pae() == SEALED.signed_bytes
    assert theirs.verify([key], 1) == {SEALED.keyid: key}
    theirs.payload += b" "
    with pytest.raises(VerificationError):
        theirs.verify([key], 1)


def test_white_space_and_order_are_free():
    """Any order of members and any JSON white space between tokens give the same envelope."""
    reordered = {name: json.loads(BODY)[name] for name in ("signatures", "payloadType", "payload")}
    [signature] = reordered["signatures"]
    reordered["signatures"] = [{"sig": signature["sig"], "keyid": signature["keyid"]}]
    assert dsse.unwrap(json.dumps(reordered, indent="\t").encode()) == SEALED
    assert dsse.unwrap(b"\r\n " + BODY.replace(b",", b" ,\t").replace(b":", b"\n:") + b"\r\n") == SEALED


def test_no_flipped_bit_passes():
    """Of all bodies one bit away none opens and verifies under the key that its keyid names."""
    keys = {SEALED.keyid: PUBLIC}
    for bit in range(len(BODY) * 8):
        flipped = bytearray(BODY)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            envelope = dsse.unwrap(bytes(flipped))
        except Refused:
            continue
        key = keys.get(envelope.keyid)
        assert key is None or not ed25519.verify(key, envelope.signed_bytes, envelope.signature), bit


B64 = base64.b64encode(SEALED.payload)
SIG = base64.b64encode(SEALED.signature)
TYPE = dsse.PAYLOAD_TYPE.encode()
KEYID = SEALED.keyid.encode()
SIGNATURES = b'[{"keyid":"%b","sig":"%b"}]' % (KEYID, SIG)


def body(payload: bytes = B64, kind: bytes = TYPE, signatures: bytes = SIGNATURES) -> bytes:
    """Make an envelope out of the JSON texts of its parts."""
    return b'{"payload":"%b","payloadType":"%b","signatures":%b}' % (payload, kind, signatures)


def signature(keyid: bytes = KEYID, sig: bytes = SIG) -> bytes:
    """Make an envelope with other members in its signature."""
    return body(signatures=b'[{"keyid":"%b","sig":"%b"}]' % (keyid, sig))


MALFORMED = {
    "empty": b"",
    "no JSON": b"hello",
    "an array": b"[]",
    "null": b"null",
    "truncated": BODY[:-1],
    "trailing garbage": BODY + b"x",
    "two documents": BODY + BODY,
    "byte order mark": b"\xef\xbb\xbf" + BODY,
    "NUL after it": BODY + b"\0",
    "form feed is no JSON white space": BODY + b"\f",
    "bad UTF-8 in a value": body(payload=b"\xff\xff\xff\xff"),
    "bad UTF-8 in a name": BODY.replace(b'"payload"', b'"p\xffyload"'),
    "bad UTF-8 outside": b"\xff" + BODY,
    "depth bomb": b"[" * 100_000,
    "depth bomb in a member": body(signatures=b'{"a":' * 10_000),
    "extra member": BODY[:-1] + b',"extra":1}',
    "extra signature member": BODY.replace(b'"keyid"', b'"x":1,"keyid"'),
    "payload absent": BODY.replace(b'"payload":"%b",' % B64, b""),
    "payloadType absent": BODY.replace(b'"payloadType":"%b",' % TYPE, b""),
    "signatures absent": BODY.replace(b',"signatures":%b' % SIGNATURES, b""),
    "keyid absent": BODY.replace(b'"keyid":"%b",' % KEYID, b""),
    "sig absent": BODY.replace(b',"sig":"%b"' % SIG, b""),
    "capital member name": BODY.replace(b'"payload"', b'"Payload"'),
    "snake case member name": BODY.replace(b'"payloadType"', b'"payload_type"'),
    "space in a member name": BODY.replace(b'"payload"', b'"payload "'),
    "repeated payload": BODY[:-1] + b',"payload":"%b"}' % B64,
    "repeated payload, null first": BODY.replace(b"{", b'{"payload":null,', 1),
    "repeated payloadType": BODY[:-1] + b',"payloadType":"%b"}' % TYPE,
    "repeated signatures": BODY[:-1] + b',"signatures":%b}' % SIGNATURES,
    "repeated keyid": BODY.replace(b'"keyid"', b'"keyid":"","keyid"'),
    "repeated sig": BODY.replace(b'"sig"', b'"sig":"","sig"'),
    "escaped member name": BODY.replace(b'"payload"', rb'"p\u0061yload"'),
    "escaped signature member name": BODY.replace(b'"sig"', rb'"\u0073ig"'),
    "escaped name, repeated": BODY[:-1] + rb',"\u0070ayload":"%b"}' % B64,
    "escaped solidus in a value": BODY.replace(b"application/", rb"application\/"),
    "escaped letter in the keyid": signature(keyid=rb"\u0031" + KEYID[1:]),
    "no signature": body(signatures=b"[]"),
    "two signatures": body(signatures=SIGNATURES[:-1] + b"," + SIGNATURES[1:]),
    "signatures an object": body(signatures=SIGNATURES[1:-1]),
    "signatures null": body(signatures=b"null"),
    "a string as signature": body(signatures=b'["%b"]' % SIG),
    "another payloadType": body(kind=b"application/json"),
    "payloadType in capitals": body(kind=TYPE.upper()),
    "payloadType with a parameter": body(kind=TYPE + b"; charset=utf-8"),
    "payloadType with a space": body(kind=TYPE + b" "),
    "payloadType a number": BODY.replace(b'"%b"' % TYPE, b"1"),
    "payload a number": BODY.replace(b'"%b"' % B64, b"1"),
    "payload null": BODY.replace(b'"%b"' % B64, b"null"),
    "payload empty": body(payload=b""),
    "payload 4,097 bytes": body(payload=base64.b64encode(bytes(4097))),
    "payload unpadded": body(payload=b"e30"),
    "payload padded too much": body(payload=b"e30=="),
    "payload padded by a whole group": body(payload=b"e30====="),
    "payload with stray trailing bits": body(payload=b"e31="),
    "payload in base64url": body(payload=b"_-8="),
    "payload with a space": body(payload=b"e3 0="),
    "payload with an escaped line break": body(payload=rb"e30=\n"),
    "payload with data after the padding": body(payload=b"e30=e30="),
    "payload with one character left over": body(payload=b"e30A0"),
    "payload beyond ASCII": body(payload="é30=".encode()),
    "signature 63 bytes": signature(sig=base64.b64encode(bytes(63))),
    "signature 65 bytes": signature(sig=base64.b64encode(bytes(65))),
    "signature empty": signature(sig=b""),
    "signature unpadded": signature(sig=SIG.rstrip(b"=")),
    "signature with stray trailing bits": signature(sig=base64.b64encode(bytes(64))[:-3] + b"B=="),
    "signature in hexadecimal": signature(sig=SEALED.signature.hex().encode()),
    "keyid 42 characters": signature(keyid=KEYID[:-1]),
    "keyid 44 characters": signature(keyid=KEYID + b"A"),
    "keyid with a line break after it": signature(keyid=KEYID + rb"\n"),
    "keyid in base64": signature(keyid=KEYID[:-1] + b"+"),
    "keyid beyond ASCII": signature(keyid=KEYID[:-1] + "é".encode()),
    "keyid empty": signature(keyid=b""),
    "keyid null": BODY.replace(b'"%b"' % KEYID, b"null"),
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_envelopes(malformed: bytes):
    """Each departure from the outer form is `envelope_malformed`, told without a word of the body."""
    assert malformed != BODY
    with pytest.raises(Refused) as caught:
        dsse.unwrap(malformed)
    assert caught.value.reason is Reason.ENVELOPE_MALFORMED
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert SEALED.keyid not in str(caught.value)


@settings(deadline=None)  # a busy machine is no failure
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_noise_is_malformed(noise: bytes):
    """Arbitrary bytes meet one refusal and no other error."""
    with pytest.raises(Refused) as caught:
        dsse.unwrap(noise)
    assert caught.value.reason is Reason.ENVELOPE_MALFORMED


def test_undecodable_identity():
    """A refused body is named by SHA-256 over a prefix and the body, never by its PAE."""
    expected = hashlib.sha256(b"postseal-undecodable\x00" + BODY).digest()
    assert dsse.undecodable_identity(BODY) == expected
    assert expected != SEALED.identity

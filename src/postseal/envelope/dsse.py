"""The envelope: a strict profile of DSSE with one signature (protocol section 2).

    {"payload":B64,"payloadType":"application/vnd.controlplane.event.v1+json","signatures":[{"keyid":K,"sig":S}]}

What `wrap` writes any DSSE library reads. What `unwrap` accepts is narrower: exactly these members, each once
and spelled without escapes, and base64 in its one canonical spelling, so that two bodies of the same content
differ in white space and the order of members alone. No signature is verified here.
"""

import binascii
import hashlib

import msgspec

from postseal.envelope import ed25519
from postseal.envelope.names import KEYID
from postseal.errors import Refused
from postseal.outcomes import Reason

ENVELOPE_MEDIA_TYPE = "application/vnd.controlplane.envelope.v1+json"
PAYLOAD_TYPE = "application/vnd.controlplane.event.v1+json"
MAX_ENVELOPE_BYTES = 8192
"""The default of the body limit. Whoever takes a body in enforces it, before `unwrap` sees a byte."""
MAX_PAYLOAD_BYTES = 4096

_JSON_WHITESPACE = b" \t\r\n"


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """An envelope whose outer form holds; whether its signature does is for `ed25519.verify` to say."""

    payload: bytes
    keyid: str
    signature: bytes
    signed_bytes: bytes
    """The PAE: what the signature is over."""
    identity: bytes
    """The event identity, 32 bytes: SHA-256 of the signed bytes."""


class _Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keyid: str
    sig: str


class _Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    payload: str
    payload_type: str
    signatures: tuple[_Signature]


_OUTER = msgspec.json.Decoder(_Outer)


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: the bytes that are signed for a payload of that type."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def unwrap(body: bytes) -> Envelope:
    """Read an envelope; Refused with `envelope_malformed` unless its outer form holds in every point.

    White space between JSON tokens and the order of members are free. A refused body has no event identity of
    its own, even where its payload alone could be read: audit names it by `undecodable_identity`.
    """
    try:
        outer = _OUTER.decode(body)
    except (ValueError, RecursionError):
        # No chained cause: msgspec's messages may quote the body.
        raise _malformed("the body is not a JSON object with exactly an envelope's members") from None
    [signature] = outer.signatures
    if outer.payload_type != PAYLOAD_TYPE:
        raise _malformed(f"payloadType is not {PAYLOAD_TYPE}")
    if not KEYID.fullmatch(signature.keyid):
        raise _malformed("keyid is not 43 base64url characters")
    payload = _from_base64("payload", outer.payload)
    if not 1 <= len(payload) <= MAX_PAYLOAD_BYTES:
        raise _malformed(f"the payload is not 1 to {MAX_PAYLOAD_BYTES} bytes long")
    sig = _from_base64("sig", signature.sig)
    if len(sig) != ed25519.SIGNATURE_BYTES:
        raise _malformed(f"the signature is not {ed25519.SIGNATURE_BYTES} bytes long")
    # None of the values holds white space or what JSON must escape, so with white space taken away every
    # spelling that has each member once is exactly as long as ours. Repeated members and escapes add to it.
    least = _FRAME_BYTES + len(outer.payload) + len(signature.keyid) + len(signature.sig)
    if len(body.translate(None, _JSON_WHITESPACE)) != least:
        raise _malformed("a member is repeated or spelled with an escape")
    return _envelope(payload, signature.keyid, sig, pae(PAYLOAD_TYPE, payload))


def wrap(payload: bytes, keyid: str, signature: bytes) -> bytes:
    """Return the envelope's bytes as we emit them: members in order, no white space."""
    return b'{"payload":"%b","payloadType":"%b","signatures":[{"keyid":"%b","sig":"%b"}]}' % (
        binascii.b2a_base64(payload, newline=False),
        PAYLOAD_TYPE.encode("ascii"),
        keyid.encode("ascii"),
        binascii.b2a_base64(signature, newline=False),
    )


_FRAME_BYTES = len(wrap(b"", "", b""))


def seal(payload: bytes, seed: bytes) -> Envelope:
    """Sign 1 to 4,096 payload bytes with the key of `seed`. ValueError for another length.

    >>> sealed = seal(b"{}", bytes(range(32)))
    >>> unwrap(wrap(sealed.payload, sealed.keyid, sealed.signature)) == sealed
    True
    """
    if not 1 <= len(payload) <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload has 1 to {MAX_PAYLOAD_BYTES} bytes, not {len(payload)}")
    signed_bytes = pae(PAYLOAD_TYPE, payload)
    keyid = ed25519.thumbprint(ed25519.public_key(seed))
    return _envelope(payload, keyid, ed25519.sign(seed, signed_bytes), signed_bytes)


def undecodable_identity(body: bytes) -> bytes:
    """Return the 32-byte name of a body or batch line that `unwrap` refused (protocol section 6)."""
    return hashlib.sha256(b"postseal-undecodable\0" + body).digest()


def _envelope(payload: bytes, keyid: str, signature: bytes, signed_bytes: bytes) -> Envelope:
    identity = hashlib.sha256(signed_bytes).digest()
    return Envelope(payload, keyid, signature, signed_bytes, identity)


def _from_base64(member: str, text: str) -> bytes:
    try:
        raw = binascii.a2b_base64(text)
    except ValueError:
        raw = b""
    # Decoders skip foreign characters and stray trailing bits; only one text comes back from encoding again.
    if binascii.b2a_base64(raw, newline=False) != text.encode("utf-8"):
        raise _malformed(f"{member} is not canonical base64")
    return raw


def _malformed(detail: str) -> Refused:
    return Refused(Reason.ENVELOPE_MALFORMED, detail)

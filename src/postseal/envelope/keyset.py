"""The signed set of a tenant's signing keys, by which a device that trusts an old key comes to trust the new ones.

    {"payload":B64,"payloadType":"application/vnd.controlplane.keyset.v1+json","signatures":[{"keyid":K,"sig":S},…]}

A DSSE envelope like any other, but with one signature by each key that may speak for the others. Its payload, in
canonical form, has the tenant, a version that only grows, and the keys. For one version it is always the same bytes, so
a key's `state` is the one that it was given: that a retiring key's time is over, its `acceptUntilMs` tells.
"""

import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from postseal.envelope import base64url, canonical, dsse, ed25519

KEYSET_PAYLOAD_TYPE = "application/vnd.controlplane.keyset.v1+json"
MAX_KEYSET_BYTES = 65_536
MAX_SET_KEYS = 64
REVOKED = "revoked"


class KeysetRefused(ValueError):
    """A set of keys is not to be believed; the message is one line that says why."""


class KeysetKey(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One key: its id, its public half in base64url, and how it stands; `acceptUntilMs` is there while it retires."""

    keyid: str
    public_key: str
    state: str
    accept_until_ms: int | UnsetType = UNSET


class Keyset(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's signing keys in one version, oldest first; revoked ones are named, removed ones left out."""

    keys: Annotated[list[KeysetKey], Meta(max_length=MAX_SET_KEYS)]
    tenant: str
    version: Annotated[int, Meta(ge=0, le=canonical.MAX_INTEGER)]

    def trusted(self) -> dict[str, bytes]:
        """The keys whose signatures are to be believed, by id."""
        return {key.keyid: base64url.decode(key.public_key) for key in self.keys if key.state != REVOKED}


class KeysetSignature(Struct, frozen=True):
    """The signature of one key, in base64."""

    keyid: str
    sig: str


class SignedKeyset(Struct, frozen=True, rename="camel"):
    """A set of keys and its signatures, as a DSSE envelope."""

    payload: str
    payload_type: str
    signatures: Annotated[list[KeysetSignature], Meta(max_length=MAX_SET_KEYS)]


def encode(keyset: Keyset) -> bytes:
    """Return the payload: the canonical form of a set."""
    return canonical.encode(keyset)


def signed_bytes(payload: bytes) -> bytes:
    """Return what is signed: the PAE of the payload."""
    return dsse.pae(KEYSET_PAYLOAD_TYPE, payload)


def wrap(payload: bytes, signatures: Sequence[tuple[str, bytes]]) -> SignedKeyset:
    """Return the envelope of a payload with its signatures, each with the id of its key."""
    return SignedKeyset(
        _base64(payload), KEYSET_PAYLOAD_TYPE, [KeysetSignature(keyid, _base64(sig)) for keyid, sig in signatures]
    )


def follow(raw: bytes, *, tenant: str, trusted: Mapping[str, bytes], version: int) -> Keyset:
    """Return the set that `raw` brings, for somebody who trusts the keys `trusted` (by id) and has seen `version`.

    From then on they trust what its `trusted()` says, and that alone. The same version may come again. Raises
    KeysetRefused: no signature of a trusted key holds, it is another tenant's, or it is older.
    """
    if len(raw) > MAX_KEYSET_BYTES:
        raise KeysetRefused(f"a set of keys has at most {MAX_KEYSET_BYTES} bytes")
    try:
        signed = msgspec.json.decode(raw, type=SignedKeyset)
        payload = binascii.a2b_base64(signed.payload, strict_mode=True)
        signatures = [(each.keyid, binascii.a2b_base64(each.sig, strict_mode=True)) for each in signed.signatures]
    except (ValueError, RecursionError):
        raise KeysetRefused("this is no DSSE envelope") from None
    if signed.payload_type != KEYSET_PAYLOAD_TYPE:
        raise KeysetRefused(f"payloadType is not {KEYSET_PAYLOAD_TYPE}")
    message = signed_bytes(payload)
    if not any(keyid in trusted and ed25519.verify(trusted[keyid], message, sig) for keyid, sig in signatures):
        raise KeysetRefused("no signature by a key that is trusted already holds")
    keyset = _decode(payload)
    if keyset.tenant != tenant:
        raise KeysetRefused("it is another tenant's")
    if keyset.version < version:
        raise KeysetRefused("it is older than what is known")
    return keyset


def _decode(payload: bytes) -> Keyset:
    try:
        keyset = msgspec.json.decode(payload, type=Keyset)
        for key in keyset.keys:
            public_key = base64url.decode(key.public_key)
            ed25519.check_public_key(public_key)
            if ed25519.thumbprint(public_key) != key.keyid:
                raise ValueError("another id")
    except (ValueError, RecursionError):
        raise KeysetRefused("its payload is no set of keys") from None
    if not canonical.is_canonical(payload, keyset):
        raise KeysetRefused("its payload is not in canonical form")
    return keyset


def _base64(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode("ascii")

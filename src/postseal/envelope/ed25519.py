"""Ed25519 keys and signatures: a private key is its 32-byte seed, a public key its 32-byte encoded point.

libsodium's bindings are called as they are, without the key objects above them: one verification (about
50 us) is most of what an envelope costs. libsodium refuses a signature whose S is not below the group order,
or whose R is of small order, so nobody can turn one valid signature into another one.
"""

import base64
import binascii
import hashlib
import re
import secrets

from nacl import bindings
from nacl.exceptions import BadSignatureError

SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_PKCS8_PREFIX = bytes.fromhex("302e020100300506032b657004220420")  # RFC 8410: everything before the seed
_PEM = re.compile(rb"\s*-----BEGIN PRIVATE KEY-----\s+([A-Za-z0-9+/]{64})\s+-----END PRIVATE KEY-----\s*\Z")


def generate() -> bytes:
    """Make a private key: 32 bytes from the operating system's random source."""
    return secrets.token_bytes(SEED_BYTES)


def public_key(seed: bytes) -> bytes:
    """Return the 32-byte public key of a 32-byte seed."""
    public, _ = bindings.crypto_sign_seed_keypair(seed)
    return public


def sign(seed: bytes, message: bytes) -> bytes:
    """Return the 64-byte signature of `message`; deterministic (RFC 8032)."""
    return sign_with(signing_form(seed), message)


def signing_form(seed: bytes) -> bytes:
    """Return the 64 bytes of a private key that `sign_with` takes, seed and public key; who signs often makes it once.

    Another key's public half behind the seed would give the private key away with two signatures.
    """
    _, secret = bindings.crypto_sign_seed_keypair(seed)
    return secret


def sign_with(secret: bytes, message: bytes) -> bytes:
    """Return the same signature by a private key in its `signing_form`."""
    return bindings.crypto_sign(message, secret)[:SIGNATURE_BYTES]


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Say whether `signature` is `public_key`'s over exactly `message`; never so where a length is wrong."""
    # libsodium reads both without a look at their length.
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        bindings.crypto_sign_open(signature + message, public_key)
    except BadSignatureError:
        return False
    return True


def check_public_key(public_key: bytes) -> None:
    """Raise ValueError unless these are 32 bytes that encode, canonically, a point of the prime-order group.

    libsodium's point check refuses encodings with y >= 2^255 - 19, x = 0 with its sign bit set, points off
    the curve, the eight of small order, and sums of those eight with a good point (protocol section 8).
    """
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    if not bindings.crypto_core_ed25519_is_valid_point(public_key):
        raise ValueError("these bytes are no canonical Ed25519 public key of full order")


def thumbprint(public_key: bytes) -> str:
    """Return the key id: the RFC 7638 thumbprint of the key as an RFC 8037 JWK, 43 base64url characters."""
    x = base64.urlsafe_b64encode(public_key).rstrip(b"=")
    digest = hashlib.sha256(b'{"crv":"Ed25519","kty":"OKP","x":"%b"}' % x).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def seed_to_pem(seed: bytes) -> bytes:
    """Return the private key as unencrypted PKCS#8 PEM, as `openssl genpkey -algorithm ed25519` writes it."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"an Ed25519 seed has {SEED_BYTES} bytes, not {len(seed)}")
    body = base64.b64encode(_PKCS8_PREFIX + seed)
    return b"-----BEGIN PRIVATE KEY-----\n%b\n-----END PRIVATE KEY-----\n" % body


def seed_from_pem(pem: bytes) -> bytes:
    """Return the seed in an unencrypted PKCS#8 PEM private key; else ValueError, which quotes no key."""
    found = _PEM.match(pem)
    der = binascii.a2b_base64(found[1]) if found else b""
    if not der.startswith(_PKCS8_PREFIX):
        raise ValueError("this is no unencrypted PKCS#8 PEM file with one Ed25519 private key")
    return der[len(_PKCS8_PREFIX) :]

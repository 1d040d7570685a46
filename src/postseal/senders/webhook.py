"""Signatures of HTTP requests as the Standard Webhooks have them: made here, and verified for those who receive.

    webhook-id         the delivery's id, the same on each attempt
    webhook-timestamp  when this attempt was made, in seconds since 1970
    webhook-signature  `v1a,<base64>` (Ed25519) and `v1,<base64>` (HMAC-SHA256), each over `<id>.<timestamp>.<body>`

As text, a shared secret is `whsec_<base64>`, and the public half of a key pair `whpk_<base64>`. Why signatures of
requests, where the envelope inside is signed too: they say that this request is the destination's and of now, and any
webhook library can verify them.
"""

import base64
import binascii
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from postseal.envelope import ed25519
from postseal.senders import Scheme, Secret

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"

TOLERANCE_S = 300
"""How far the timestamp of a request may lie from the receiver's clock, either way."""
SHARED_BYTES = 32
"""Of a secret that is made here."""
MIN_SHARED_BYTES, MAX_SHARED_BYTES = 24, 64
MAX_SIGNATURES = 32
"""Of one request, for whoever verifies it: more are not looked at."""

_SHARED, _PUBLIC = "whsec_", "whpk_"
_TIMESTAMP = re.compile(r"[0-9]{1,12}", re.ASCII)


class SignatureInvalid(Exception):
    """A request is not known to come from whom it should; the message says why and quotes nothing."""


def make_secret(scheme: Scheme) -> Secret:
    """A new one, from the operating system's random source."""
    if scheme is Scheme.V1:
        return Secret(scheme, secrets.token_bytes(SHARED_BYTES))
    return Secret(scheme, ed25519.signing_form(ed25519.generate()))


def for_receiver(secret: Secret) -> str:
    """What a receiver has to know, and an operator is shown: the shared secret, or the public half of the key pair."""
    if secret.scheme is Scheme.V1:
        return _encoded(_SHARED, secret.key)
    return _encoded(_PUBLIC, secret.key[ed25519.SEED_BYTES :])


def sign(secrets_of: Sequence[Secret], delivery: UUID, body: bytes, now_s: float) -> dict[str, str]:
    """The three headers of one attempt. Each secret signs; `v1a` stands first, else the order is that of the secrets.

    >>> sign([Secret(Scheme.V1, bytes(24))], UUID(int=1), b"{}", 1767225600.5)["webhook-timestamp"]
    '1767225600'
    """
    timestamp = str(int(now_s))
    signed = _signed_bytes(str(delivery), timestamp, body)
    ordered = sorted(secrets_of, key=lambda secret: secret.scheme is not Scheme.V1A)
    return {
        ID: str(delivery),
        TIMESTAMP: timestamp,
        SIGNATURE: " ".join(_signature(secret, signed) for secret in ordered),
    }


class Verifier:
    """Verifies requests by what a receiver knows: any of `whsec_…` and `whpk_…`. ValueError for other texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._shared: list[bytes] = []
        self._public: list[bytes] = []
        for text in texts:
            if text.startswith(_PUBLIC):
                self._public.append(_read_public(text))
            else:
                self._shared.append(_read_shared(text))
        if not self._shared and not self._public:
            raise ValueError("nothing to verify with: neither a shared secret nor a public key")

    def verify(self, headers: Mapping[str, str], body: bytes, now_s: float) -> None:
        """Raise SignatureInvalid unless one signature holds and its timestamp lies within five minutes of `now_s`.

        The names of `headers` are looked up in small letters.
        """
        identity, timestamp, signature = (headers.get(name, "") for name in (ID, TIMESTAMP, SIGNATURE))
        if not (identity and timestamp and signature):
            raise SignatureInvalid("a header of the signature is missing")
        if not _TIMESTAMP.fullmatch(timestamp) or abs(int(timestamp) - now_s) > TOLERANCE_S:
            raise SignatureInvalid("the timestamp is none, or not of now")
        signed = _signed_bytes(identity, timestamp, body)
        if not any(self._holds(one, signed) for one in signature.split(" ")[:MAX_SIGNATURES]):
            raise SignatureInvalid("no signature holds")

    def _holds(self, signature: str, signed: bytes) -> bool:
        scheme, _, text = signature.partition(",")
        try:
            given = binascii.a2b_base64(text)
        except ValueError:
            return False
        if scheme == Scheme.V1:
            return any(hmac.compare_digest(hmac.digest(key, signed, "sha256"), given) for key in self._shared)
        return scheme == Scheme.V1A and any(ed25519.verify(key, signed, given) for key in self._public)


def _signature(secret: Secret, signed: bytes) -> str:
    by_v1 = secret.scheme is Scheme.V1
    made = hmac.digest(secret.key, signed, "sha256") if by_v1 else ed25519.sign_with(secret.key, signed)
    return _encoded(f"{secret.scheme},", made)


def _signed_bytes(identity: str, timestamp: str, body: bytes) -> bytes:
    return b"%b.%b.%b" % (identity.encode(), timestamp.encode(), body)


def _read_shared(text: str) -> bytes:
    key = _decoded(text, _SHARED)
    if not MIN_SHARED_BYTES <= len(key) <= MAX_SHARED_BYTES:
        raise ValueError(f"a shared secret has {MIN_SHARED_BYTES} to {MAX_SHARED_BYTES} bytes behind {_SHARED}")
    return key


def _read_public(text: str) -> bytes:
    key = _decoded(text, _PUBLIC)
    ed25519.check_public_key(key)
    return key


def _decoded(text: str, prefix: str) -> bytes:
    try:
        if not text.startswith(prefix):
            raise ValueError
        return base64.b64decode(text.removeprefix(prefix), validate=True)
    except ValueError:
        raise ValueError(f"this is not {prefix} and base64 behind it") from None


def _encoded(prefix: str, raw: bytes) -> str:
    return prefix + base64.b64encode(raw).decode("ascii")

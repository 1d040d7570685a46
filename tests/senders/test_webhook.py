"""Signatures of requests, held against other people's libraries."""

import base64
import time
from uuid import UUID

import pytest
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from standardwebhooks import Webhook, WebhookVerificationError

from postseal.envelope import ed25519
from postseal.senders import Scheme, Secret
from postseal.senders.webhook import SignatureInvalid, Verifier, for_receiver, make_secret, sign

DELIVERY = UUID("0190d3a4-7b7c-7cc1-8e5b-0123456789ab")
BODY = b'{"payload":"e30="}'
# The same in each process of a run: some stand in the names of tests.
SHARED = Secret(Scheme.V1, bytes(range(32)))
SEED = bytes(range(1, 33))
PAIR = Secret(Scheme.V1A, SEED + ed25519.public_key(SEED))


def test_standardwebhooks_verifies_a_shared_secret() -> None:
    """The reference library takes our headers with what the operator was shown, and no changed body."""
    headers = sign([SHARED, PAIR], DELIVERY, BODY, time.time())
    webhook = Webhook(for_receiver(SHARED))
    assert webhook.verify(BODY, headers) == {"payload": "e30="}
    with pytest.raises(WebhookVerificationError):
        webhook.verify(BODY + b" ", headers)


def test_nacl_verifies_a_public_key() -> None:
    """The v1a signature is Ed25519 over `id.timestamp.body`, by the public key that the operator was shown."""
    headers = sign([PAIR], DELIVERY, BODY, 1767225600.9)
    assert headers["webhook-id"] == str(DELIVERY)
    assert headers["webhook-timestamp"] == "1767225600"
    scheme, _, signature = headers["webhook-signature"].partition(",")
    key = VerifyKey(base64.b64decode(for_receiver(PAIR).removeprefix("whpk_")))
    signed = b"%s.1767225600.%s" % (str(DELIVERY).encode(), BODY)
    assert scheme == "v1a"
    key.verify(signed, base64.b64decode(signature))
    with pytest.raises(BadSignatureError):
        key.verify(signed + b" ", base64.b64decode(signature))


def test_the_example_of_the_standard() -> None:
    """The published example: id, time, body and secret give that signature."""
    verifier = Verifier(["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    verifier.verify(headers, b'{"test": 2432232314}', 1614265330)


def test_every_secret_signs_and_v1a_stands_first() -> None:
    """While a secret is rotated the old and the new one sign; within a scheme the newest comes first."""
    other, newer = make_secret(Scheme.V1), make_secret(Scheme.V1A)
    made = sign([SHARED, newer, other, PAIR], DELIVERY, BODY, 0)["webhook-signature"].split(" ")
    alone = [sign([secret], DELIVERY, BODY, 0)["webhook-signature"] for secret in (newer, PAIR, SHARED, other)]
    assert made == alone
    for secret in (SHARED, newer, other, PAIR):
        Verifier([for_receiver(secret)]).verify(sign([SHARED, newer, other, PAIR], DELIVERY, BODY, 9), BODY, 9)


def test_secrets_as_text() -> None:
    """A receiver is shown the shared secret, and of a key pair the public half alone; a new secret is another one."""
    assert for_receiver(SHARED) == "whsec_" + b64(SHARED.key)
    assert for_receiver(PAIR) == "whpk_" + b64(ed25519.public_key(SEED))
    assert make_secret(Scheme.V1) != SHARED
    assert make_secret(Scheme.V1A) != PAIR


def test_a_secret_is_shown_nowhere() -> None:
    """Its repr has no byte of the key."""
    assert repr(SHARED) == "Secret(scheme=<Scheme.V1: 'v1'>)"


def b64(raw: bytes) -> str:
    """As text."""
    return base64.b64encode(raw).decode()


@pytest.mark.parametrize(
    "text",
    [
        "whsec_",
        "whsec_" + b64(bytes(23)),
        "whsec_" + b64(bytes(65)),
        "whsec_" + b64(bytes(32))[:-1],
        "whsec_!!!!" + b64(bytes(32)),
        b64(bytes(32)),
    ],
)
def test_other_texts_are_no_secret(text: str) -> None:
    """Too short, too long, not base64: refused, and not quoted."""
    with pytest.raises(ValueError, match="whsec_") as raised:
        Verifier([text])
    assert len(text) < 12 or text[6:] not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["", "whpk_", "whpk_" + b64(bytes(32)), "whpk_" + b64(bytes(31)), "whsk_" + b64(PAIR.key)]
)
def test_a_verifier_needs_something_to_verify_with(text: str) -> None:
    """A public key that is none, of small order, or private is refused; so is nothing at all."""
    with pytest.raises(ValueError, match=r"whpk_|whsec_|Ed25519"):
        Verifier([text])
    with pytest.raises(ValueError, match="nothing to verify with"):
        Verifier([])


@pytest.mark.parametrize("secret", [SHARED, PAIR])
def test_what_a_verifier_refuses(secret: Secret) -> None:
    """Another body, id, time, key or scheme; a header too few; a time that is not of now; each alone is enough."""
    verifier = Verifier([for_receiver(secret)])
    now_s = 1_767_225_600
    headers = sign([secret], DELIVERY, BODY, now_s)
    for good_s in (now_s - 300, now_s, now_s + 300):
        verifier.verify(headers, BODY, good_s)
    verifier.verify(headers | {"webhook-signature": "v9,x v1 , " + headers["webhook-signature"]}, BODY, now_s)

    def refuses(changed: dict[str, str], body: bytes = BODY, at_s: float = now_s) -> None:
        with pytest.raises(SignatureInvalid):
            verifier.verify(changed, body, at_s)

    refuses(headers, BODY + b" ")
    refuses(headers, at_s=now_s - 301)
    refuses(headers, at_s=now_s + 301)
    refuses(headers | {"webhook-id": str(UUID(int=1))})
    refuses(headers | {"webhook-timestamp": str(now_s + 1)})
    for text in ("", "-1", "1e9", f" {now_s}", f"{now_s}.0", "٣" * 10, "9" * 13):
        refuses(headers | {"webhook-timestamp": text})
    signature = headers["webhook-signature"]
    refuses(headers | {"webhook-signature": "v1,AAAA " * 32 + signature})  # more than anybody rotates
    other = "v1" if secret.scheme is Scheme.V1A else "v1a"
    for text in ("", "v1", "v1,", "v1a,", signature[:-4], f"{other},{signature.partition(',')[2]}"):
        refuses(headers | {"webhook-signature": text})
    refuses(headers | sign([make_secret(secret.scheme)], DELIVERY, BODY, now_s))
    for name in headers:
        refuses({known: value for known, value in headers.items() if known != name})

"""What a control plane sends: signed deliveries of one tenant, and requests that carry them."""

import base64
import json
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from postseal.envelope import canonical, dsse, ed25519
from postseal.senders import Scheme, Secret
from postseal.senders.webhook import make_secret, sign

SEED = bytes(range(32))
SHARED, PAIR = make_secret(Scheme.V1), make_secret(Scheme.V1A)


def key_set(*seeds: bytes) -> bytes:
    """The JWK Set of these keys, as `GET /v1/keys` gives it."""
    keys = [
        {"kty": "OKP", "crv": "Ed25519", "kid": "not looked at", "state": "active", "x": base64url(seed)}
        for seed in seeds or (SEED,)
    ]
    return json.dumps({"keys": keys}).encode()


def base64url(seed: bytes) -> str:
    """A public key."""
    return base64.urlsafe_b64encode(ed25519.public_key(seed)).rstrip(b"=").decode()


def delivery(sequence: int = 1, *, seed: bytes = SEED, audience: str | None = "erp", **changed: Any) -> bytes:
    """An envelope of the control plane's."""
    route = {"tenant": "acme", "project": "apollo", "producer": "controlplane"}
    payload = {
        "protocol": "controlplane/v1",
        "schemaVersion": 1,
        "route": route | ({} if audience is None else {"audience": audience}),
        "eventId": str(uuid4()),
        "idempotencyKey": f"delivery:{sequence}",
        "sequence": sequence,
        "issuedAtMs": 1767225600000,
        "data": {"kind": "heartbeat", "bootId": str(UUID(int=1)), "uptimeMs": 5, "queueDepth": 0},
    }
    sealed = dsse.seal(canonical.encode(payload | changed), seed)
    return dsse.wrap(sealed.payload, sealed.keyid, sealed.signature)


def headers(body: bytes, *, secrets: Sequence[Secret] = (SHARED, PAIR), identity: UUID | None = None) -> dict[str, str]:
    """The headers of an attempt of now."""
    return sign(secrets, identity or uuid4(), body, time.time())

"""A second client of controlplane/v1, written from docs/protocol.md alone: it shares no line with the package.

Where the package and this file disagree about a byte, the page decides which of them is wrong. It has keys, canonical
JSON, the PAE, envelopes, enrolment proofs, and HTTP with one connection a request.
"""

import base64
import hashlib
import http.client
import json
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from nacl.signing import SigningKey, VerifyKey

ENVELOPE = "application/vnd.controlplane.envelope.v1+json"
EVENT = "application/vnd.controlplane.event.v1+json"
ENROLMENT = "application/vnd.controlplane.enrolment.v1+json"
NDJSON = "application/x-ndjson"
PROBLEM = "application/problem+json"

EXCHANGE_TIMEOUT_S = 35
"""Longer than the longest wait that a read may ask for."""


def canonical(value: Any) -> bytes:
    """RFC 8785 for values without floats whose member names are ASCII (protocol section 2)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def pae(kind: str, payload: bytes) -> bytes:
    """What is signed (protocol section 2)."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def event_identity(payload: bytes) -> str:
    """The name of an event in answers and audit (protocol section 1)."""
    return hashlib.sha256(pae(EVENT, payload)).hexdigest()


def undecodable_identity(body: bytes) -> str:
    """The name of a body whose outer form does not hold, or was not looked into (protocol section 6)."""
    return hashlib.sha256(b"postseal-undecodable\0" + body).hexdigest()


def base64url(raw: bytes) -> str:
    """RFC 4648 section 5 without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def from_base64url(text: str) -> bytes:
    """The bytes of `base64url`."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def base64_padded(raw: bytes) -> str:
    """RFC 4648 section 4 with padding."""
    return base64.b64encode(raw).decode()


@dataclass(frozen=True)
class Key:
    """An Ed25519 key pair."""

    signer: SigningKey = field(default_factory=SigningKey.generate)

    @property
    def public(self) -> bytes:
        """The 32 public bytes."""
        return bytes(self.signer.verify_key)

    @property
    def keyid(self) -> str:
        """The RFC 7638 thumbprint of the public key."""
        return thumbprint(self.public)

    def sign(self, kind: str, payload: bytes) -> bytes:
        """64 bytes over the PAE."""
        return self.signer.sign(pae(kind, payload)).signature


def thumbprint(public: bytes) -> str:
    """The key id of a public key (protocol section 2)."""
    return base64url(hashlib.sha256(canonical({"crv": "Ed25519", "kty": "OKP", "x": base64url(public)})).digest())


def envelope_of(key: Key, payload: bytes) -> dict[str, Any]:
    """A signed envelope as an object."""
    signature = {"keyid": key.keyid, "sig": base64_padded(key.sign(EVENT, payload))}
    return {"payload": base64_padded(payload), "payloadType": EVENT, "signatures": [signature]}


def sealed(key: Key, payload: bytes) -> bytes:
    """A signed envelope as a body."""
    return json.dumps(envelope_of(key, payload)).encode()


def opened(envelope: dict[str, Any], publics: dict[str, bytes]) -> bytes:
    """The payload of an envelope that verifies with the published key that it names; BadSignatureError otherwise."""
    [signature] = envelope["signatures"]
    payload = base64.b64decode(envelope["payload"], validate=True)
    public = publics[signature["keyid"]]
    assert thumbprint(public) == signature["keyid"]
    VerifyKey(public).verify(pae(envelope["payloadType"], payload), base64.b64decode(signature["sig"], validate=True))
    return payload


def proof(key: Key, code: str, tenant: str, device: str) -> str:
    """The proof of an enrolment (protocol section 8)."""
    claim = canonical({"code": code, "device": device, "keyid": key.keyid, "tenant": tenant})
    return base64url(key.sign(ENROLMENT, claim))


@dataclass(frozen=True)
class Answer:
    """What came back: header names in lower case, the JSON of the body or of its lines."""

    status: int
    headers: dict[str, str]
    raw: bytes
    sent: bytes

    @classmethod
    def parsed(cls, received: bytes, sent: bytes) -> "Answer":
        """Read an answer whose end is the end of the connection."""
        top, _, raw = received.partition(b"\r\n\r\n")
        status, *fields = top.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in fields)}
        return cls(int(status.split()[1]), headers, raw, sent)

    @property
    def body(self) -> dict[str, Any]:
        """The one JSON object."""
        return json.loads(self.raw)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON objects of a batch's answer."""
        return [json.loads(line) for line in self.raw.splitlines()]

    @property
    def word(self) -> str:
        """The outcome or the reason."""
        return self.body.get("outcome") or self.body["reason"]


@dataclass
class Caller:
    """Whoever calls the service, with or without a credential."""

    address: str
    credential: str | None = None

    def call(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own."""
        bearer = {"Authorization": f"Bearer {self.credential}"} if self.credential else {}
        connection = http.client.HTTPConnection(self.address, timeout=EXCHANGE_TIMEOUT_S)
        try:
            connection.request(method, path, body=body, headers=bearer | (headers or {}))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read(), body or b"")
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        """Read."""
        return self.call("GET", path)

    def send(self, body: bytes, media_type: str = ENVELOPE) -> Answer:
        """Send one envelope."""
        return self.call("POST", "/v1/envelopes", body, {"Content-Type": media_type})

    def send_batch(self, body: bytes) -> Answer:
        """Send lines of envelopes."""
        return self.call("POST", "/v1/envelopes/batch", body, {"Content-Type": NDJSON})


@dataclass
class Device(Caller):
    """A device: its route, its key and its credential."""

    tenant: str = ""
    project: str = ""
    name: str = ""
    key: Key = field(default_factory=Key)

    def enrol(self, code: str) -> Answer:
        """Show the code and prove the key; keep the credential that comes back."""
        claim = {"code": code, "publicKey": base64url(self.key.public)}
        claim["proof"] = proof(self.key, code, self.tenant, self.name)
        answer = Caller(self.address).call(
            "POST", "/v1/enrolments", json.dumps(claim).encode(), {"Content-Type": "application/json"}
        )
        self.credential = answer.body.get("credential", self.credential)
        return answer

    def event(self, sequence: Any, **other: Any) -> dict[str, Any]:
        """A heartbeat with fresh names; `other` replaces members."""
        heartbeat = {"kind": "heartbeat", "bootId": str(uuid4()), "uptimeMs": 1, "queueDepth": 0}
        payload = {
            "protocol": "controlplane/v1",
            "schemaVersion": 1,
            "route": {"tenant": self.tenant, "project": self.project, "producer": self.name},
            "eventId": str(uuid4()),
            "idempotencyKey": f"conformance:{uuid4()}",
            "sequence": sequence,
            "issuedAtMs": 0,
            "data": heartbeat,
        }
        return payload | other

    def seal(self, sequence: Any, **other: Any) -> bytes:
        """A fresh event, signed, as a body."""
        return sealed(self.key, canonical(self.event(sequence, **other)))

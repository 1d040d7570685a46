"""docs/receiving.md: the receiver and the puller that stand there run, and take and refuse what they should."""

import asyncio
import json
import sqlite3
import sys
import time
import urllib.request
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import tables
from programs import line_of, of_deployment, program, running, serving

from fleet import as_owner, enrol, issue
from outgoing import decision, new_destination, signing_key
from postseal.envelope import canonical, dsse, ed25519
from postseal.postgres.access import Access
from postseal.rules.delivery import Attempted, Code
from postseal.senders import PROBE, Mail, Scheme, Secret
from postseal.senders.http import HttpSender
from postseal.senders.webhook import for_receiver, make_secret, sign

SEED = bytes(range(32))
ROUTE = {"tenant": "acme", "project": "apollo", "producer": "controlplane", "audience": "orders"}
SECRETS = {Scheme.V1: make_secret(Scheme.V1), Scheme.V1A: make_secret(Scheme.V1A)}
VARIABLE = {Scheme.V1: "SECRET", Scheme.V1A: "PUBLIC_KEY"}


def key_set(public_key: bytes) -> str:
    """The JWK Set of one key."""
    x = urlsafe_b64encode(public_key).rstrip(b"=").decode()
    return json.dumps({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": ed25519.thumbprint(public_key), "x": x}]})


def envelope(sequence: int, *, seed: bytes = SEED, **route: str) -> bytes:
    """An envelope of the control plane's."""
    payload = {
        "protocol": "controlplane/v1",
        "schemaVersion": 1,
        "route": ROUTE | route,
        "eventId": str(uuid4()),
        "idempotencyKey": f"key:{uuid4()}",
        "sequence": sequence,
        "issuedAtMs": 1_767_225_600_000,
        "data": decision(),
    }
    sealed = dsse.seal(canonical.encode(payload), seed)
    return dsse.wrap(sealed.payload, sealed.keyid, sealed.signature)


@dataclass(frozen=True)
class Pusher:
    """Pushes to the receiver with postseal's own sender."""

    url: str
    secrets: Sequence[Secret]

    def push(self, body: bytes, *secrets: Secret, off_s: float = 0.0) -> Attempted:
        """How one attempt went; signed with `secrets`, else with the destination's, by a clock that is off."""
        mail = Mail(uuid4(), "acme", "apollo", "orders", self.url, body, secrets or self.secrets, 1)

        async def send() -> Attempted:
            loopback = [ip_network("127.0.0.0/8")]
            async with HttpSender(allowed=loopback, allow_http=True, now=lambda: time.time() + off_s) as sender:
                return await sender.send(mail)

        return asyncio.run(send())


def settings(scheme: Scheme, folder: Path, store: Path | None = None) -> dict[str, str]:
    """The environment of the receiver."""
    keys = folder / "keys.json"
    keys.write_text(key_set(ed25519.public_key(SEED)))
    return {
        VARIABLE[scheme]: for_receiver(SECRETS[scheme]),
        "KEYS": str(keys),
        "STORE": str(store or folder / "store.db"),
        "TENANT": "acme",
        "PROJECT": "apollo",
        "AUDIENCE": "orders",
        "PORT": "0",
    }


@pytest.mark.parametrize("scheme", Scheme)
def test_the_receiver(scheme: Scheme, tmp_path: Path):
    """It takes an event once, answers a duplicate and a test alike, and refuses what either signature does not hold."""
    file = program("receiving.md", "receiver.py", tmp_path)
    with running([sys.executable, file], settings(scheme, tmp_path), tmp_path) as receiver:
        port = line_of(receiver).removeprefix("listens on port ")
        pusher = Pusher(f"http://127.0.0.1:{port}/hook", [SECRETS[scheme]])
        first, taken, refused = envelope(1), Attempted(), Attempted(Code.STATUS_4XX)
        told: list[str] = []

        def push(body: bytes, *secrets: Secret, off_s: float = 0.0) -> Attempted:
            attempted = pusher.push(body, *secrets, off_s=off_s)
            told.append(line_of(receiver))
            return attempted

        assert push(first) == push(first, *SECRETS.values()) == push(envelope(7)) == taken
        assert pusher.push(PROBE) == taken
        assert push(envelope(2), make_secret(scheme)) == push(PROBE, make_secret(scheme)) == refused
        assert push(first, off_s=-310) == push(first, off_s=310) == refused
        assert push(envelope(2), make_secret(scheme), SECRETS[scheme]) == taken
        assert push(envelope(3, seed=bytes(32))) == push(envelope(3, audience="bills")) == refused
        assert push(envelope(3, tenant="globex")) == push(envelope(1)) == push(b"{}") == push(b"\xff") == refused
        assert push(envelope(3)) == taken
    assert told == [
        "204 1 proposal-decision new",
        "204 1 proposal-decision duplicate",
        "204 7 proposal-decision new",
        *[f"401 no {scheme} signature holds"] * 2,
        *[f"401 {'no v1 signature holds' if scheme is Scheme.V1 else 'the timestamp is not of now'}"] * 2,
        "204 2 proposal-decision new",
        "400 no key of the tenant signed this envelope",
        *["400 the event is for somebody else"] * 2,
        "400 this sequence came before, with another event",
        *(
            ["400 this is no envelope"] * 2
            if scheme is Scheme.V1A
            else ["400 this is no envelope", "401 no v1 signature holds"]
        ),
        "204 3 proposal-decision new",
    ]


def test_a_receiver_without_room(tmp_path: Path):
    """It asks for time, and postseal leaves it that."""
    file = program("receiving.md", "receiver.py", tmp_path)
    environment = settings(Scheme.V1, tmp_path, tmp_path / "nowhere" / "store.db")
    with running([sys.executable, file], environment, tmp_path) as receiver:
        port = line_of(receiver).removeprefix("listens on port ")
        pusher = Pusher(f"http://127.0.0.1:{port}/", [SECRETS[Scheme.V1]])
        assert pusher.push(envelope(1)) == Attempted(Code.STATUS_5XX, 30.0)


def ask(url: str, credential: str, document: object = None, **headers: str) -> Any:
    """What the service answers."""
    body = None if document is None else json.dumps(document).encode()
    fields = {"Authorization": f"Bearer {credential}", "Content-Type": "application/json", **headers}
    with urllib.request.urlopen(urllib.request.Request(url, body, fields), timeout=30) as answer:  # noqa: S310 - ours
        return json.load(answer)


@pytest.mark.timeout(120)
def test_the_puller(access: Access, tmp_path: Path):
    """It claims, verifies with the keys that the service publishes, and settles; what it refuses is a dead letter."""
    device = enrol(access)
    new_destination(access, device.name, mode="pull")
    signing_key(access, tmp_path / "signing")
    sender = issue(access, "acme", None, ["apollo"], "sender").reveal()
    program("receiving.md", "receiver.py", tmp_path)
    file = program("receiving.md", "puller.py", tmp_path)
    deployment = of_deployment(access, tmp_path)
    with serving(deployment, tmp_path) as url:
        for _ in range(2):
            data = decision()
            wanted = {"destination": device.name, "kind": data["kind"], "data": data}
            ask(f"{url}/v1/projects/apollo/deliveries", sender, wanted, **{"Idempotency-Key": str(uuid4())})
        (tmp_path / "keys.json").write_text(json.dumps(ask(f"{url}/v1/keys", device.token.reveal())))
        spoil(tmp_path / "store.db", device.name, 2)
        environment = {
            "CREDENTIAL": device.token.reveal(),
            "POSTSEAL_URL": url,
            "KEYS": str(tmp_path / "keys.json"),
            "STORE": str(tmp_path / "store.db"),
            "TENANT": "acme",
            "DEVICE": device.name,
        }
        with running([sys.executable, file], environment, tmp_path) as puller:
            assert {line_of(puller), line_of(puller)} == {
                "delivered 1 new",
                "reject 2 this sequence came before, with another event",
            }
            with as_owner(access) as owner:
                query = "SELECT sequence, state, code FROM settlements ORDER BY sequence"
                while len(found := owner.execute(query).fetchall()) < 2:
                    assert puller.poll() is None
    assert found == [(1, "delivered", None), (2, "dead", "rejected")]


def spoil(store: Path, audience: str, sequence: int) -> None:
    """Let another event have come under that sequence."""
    table = (tables.DOCS / "receiving.md").read_text().split('TABLE = """')[1].split('"""')[0]
    connection = sqlite3.connect(store)
    with connection:
        connection.execute(table)
        place = ("acme", "apollo", audience, sequence)
        connection.execute("INSERT INTO received VALUES (?, ?, ?, ?, 'another', '{}')", place)
    connection.close()


def test_every_block_is_run():
    """No Python stands on the page that the tests above leave out."""
    page = (tables.DOCS / "receiving.md").read_text()
    marked = page.count("<!-- part: receiver.py -->\n```python\n") + page.count("<!-- part: puller.py -->\n```python\n")
    assert page.count("```python\n") == marked


def test_the_vector_of_a_request():
    """Section 7 of the protocol: secrets, headers, body and signatures belong together."""
    section = (tables.DOCS / "protocol.md").read_text().split("## 7.")[1].split("## 8.")[0]
    table = section.split("<!-- vector: webhook -->")[1].split("\n\n")[0]
    seed, delivery = bytes(range(32)), UUID("019368a0-0000-7000-8000-000000000003")
    for scheme, key in ((Scheme.V1, seed), (Scheme.V1A, seed + ed25519.public_key(seed))):
        secret = Secret(scheme, key)
        headers = sign([secret], delivery, PROBE, 1764547200)
        assert f"| `{for_receiver(secret)}` | `{headers['webhook-signature']}` |" in table
        assert f"`{headers['webhook-id']}`" in section
        assert f"`{headers['webhook-timestamp']}`" in section

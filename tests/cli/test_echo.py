"""`postseal echo` as it is installed: its lines, its refusals, its end."""

import asyncio
import base64
import json
import signal
from pathlib import Path
from uuid import UUID

import pytest
from ran import Cli
from running import DEADLINE_S, started

from postseal.envelope import canonical, dsse, ed25519
from postseal.rules.delivery import Code
from postseal.senders import Mail, Scheme
from postseal.senders.addresses import read_networks
from postseal.senders.http import HttpSender
from postseal.senders.webhook import for_receiver, make_secret

SEED = bytes(range(32))
SHARED, PAIR = make_secret(Scheme.V1), make_secret(Scheme.V1A)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The tenant's keys in a file."""
    x = base64.urlsafe_b64encode(ed25519.public_key(SEED)).rstrip(b"=").decode()
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"kty": "OKP", "crv": "Ed25519", "x": x}]}))
    return file


def envelope() -> bytes:
    """What the control plane has sealed for `erp`."""
    payload = {
        "protocol": "controlplane/v1",
        "schemaVersion": 1,
        "route": {"tenant": "acme", "project": "apollo", "producer": "controlplane", "audience": "erp"},
        "eventId": str(UUID(int=1)),
        "idempotencyKey": "delivery:1",
        "sequence": 1,
        "issuedAtMs": 1767225600000,
        "data": {"kind": "heartbeat", "bootId": str(UUID(int=1)), "uptimeMs": 5, "queueDepth": 0},
    }
    sealed = dsse.seal(canonical.encode(payload), SEED)
    return dsse.wrap(sealed.payload, sealed.keyid, sealed.signature)


def send(url: str, *times: int) -> list[Code | None]:
    """Send it so often, and what each attempt became."""

    async def flow() -> list[Code | None]:
        allowed = read_networks(["127.0.0.0/8"])
        async with HttpSender(allowed=allowed, allow_http=True) as sender:
            mails = [
                Mail(UUID(int=7), "acme", "apollo", "erp", url, envelope(), (SHARED, PAIR), attempt)
                for attempt in times
            ]
            return [(await sender.send(mail)).code for mail in mails]

    return asyncio.run(flow())


def test_it_says_what_came(keys: Path) -> None:
    """A JSON document for the address and one a request; the first attempt fails where told; SIGTERM ends it with 0."""
    arguments = ["--public-key", for_receiver(PAIR), "--keys", str(keys), "--fail-first", "1", "--json"]
    with started("echo", "--port", "0", *arguments) as (process, out, err):
        url = json.loads(out.next())["url"]
        assert send(url, 1, 2, 3) == [Code.STATUS_5XX, None, None]
        failed, new, again = (json.loads(out.next()) for _ in range(3))
        assert (failed["status"], failed["delivery"]) == (500, str(UUID(int=7)))
        assert (new["status"], new["audience"], new["sequence"], new["duplicate"]) == (204, "erp", 1, False)
        assert (again["status"], again["duplicate"]) == (204, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert (out.rest(), err.rest()) == ([], [])


def test_it_tells_people(keys: Path, tmp_path: Path) -> None:
    """A line each, which says that both signatures hold; the secret may stand in a file, and nobody sees it."""
    secret = tmp_path / "secret"
    secret.write_text(for_receiver(SHARED) + "\n")
    with started("echo", "--secret", str(secret), "--keys", str(keys)) as (process, out, err):
        url = out.next().split()[-1]
        assert send(url, 1) == [None]
        line = out.next()
        assert line.split()[:4] == ["204", str(UUID(int=7)), "acme/apollo/erp", "1"]
        assert line.endswith("both signatures hold\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert (out.rest(), err.rest()) == ([], [])


def test_the_secret_of_the_environment(keys: Path) -> None:
    """ECHO_SECRET serves where no file is named; another secret than the sender's verifies nothing."""
    other = for_receiver(make_secret(Scheme.V1))
    with started("echo", "--keys", str(keys), ECHO_SECRET=other) as (_, out, _):
        assert send(out.next().split()[-1], 1) == [Code.STATUS_4XX]
        assert out.next().startswith("401  -  no signature holds")


def test_slips_are_told_at_the_start(cli: Cli, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to verify with, a secret or keys that are none: one line, and the secret is not in it."""
    monkeypatch.delenv("ECHO_SECRET", raising=False)
    assert cli("echo", "--keys", keys).code == 2
    assert cli("echo").code == 2
    bad = tmp_path / "bad"
    bad.write_bytes(b"\xffword")
    why = cli("echo", "--keys", keys, "--secret", bad).why
    assert "whsec_" in why
    assert "word" not in why
    assert "Ed25519" in cli("echo", "--keys", keys, "--public-key", "whpk_AAAA").why
    assert "cannot read" in cli("echo", "--keys", tmp_path / "missing", "--public-key", for_receiver(PAIR)).why
    assert "no JWK Set" in cli("echo", "--keys", bad, "--public-key", for_receiver(PAIR)).why


def test_a_port_that_is_taken(cli: Cli, keys: Path) -> None:
    """One line says so."""
    with started("echo", "--keys", str(keys), "--public-key", for_receiver(PAIR)) as (_, out, _):
        port = out.next().rstrip("/\n").rpartition(":")[2]
        assert "in use" in cli("echo", "--port", port, "--keys", keys, "--public-key", for_receiver(PAIR)).why

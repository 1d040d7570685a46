"""`postseal key`, run for real: the keys of devices and of tenants by the same words."""

import asyncio
import json
from pathlib import Path

import pytest
from ran import Cli

from fleet import Device, as_owner, enrol
from outgoing import new_destination
from postseal.envelope import base64url, ed25519
from postseal.postgres.access import Access
from postseal.service import running_service
from postseal.settings import Settings

DAY_MS = 86_400_000


@pytest.fixture
def commands(on_database: Cli, access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line where tenant acme has a project and its signing keys a folder."""
    monkeypatch.setenv("POSTSEAL_SIGNING_KEYS_DIR", str(tmp_path / "signing"))
    new_destination(access)
    return on_database


@pytest.fixture
def device(commands: Cli, access: Access) -> Device:
    """A device that has sent one envelope."""
    device = enrol(access, "d1")

    async def flow() -> None:
        async with running_service(Settings(), access) as service:
            await service.inbox.receive(device.inbound(device.envelope(1)))

    asyncio.run(flow())
    return device


def new_key() -> tuple[str, str]:
    """The public key and the id of a key that begins with a hyphen, as one in 64 does."""
    while True:
        public_key = ed25519.public_key(ed25519.generate())
        if (text := base64url.encode(public_key)).startswith("-"):
            return text, ed25519.thumbprint(public_key)


def test_a_device_rotates(commands: Cli, access: Access, device: Device) -> None:
    """Register adds a key, rotate replaces the active ones; list tells who is taken until when."""
    (added, added_id), (new, new_id) = new_key(), new_key()
    registered = commands("key", "register", "acme", "d1", "--public-key", added, "--json").document
    assert registered == {"tenant": "acme", "device": "d1", "keyid": added_id}
    rotated = commands("key", "rotate", "acme", "d1", "--public-key", new, "--overlap-hours", 2, "--json").document
    assert (rotated["device"], rotated["keyid"]) == ("d1", new_id)
    assert rotated["retiring"] == sorted([device.keyid, added_id])
    rows = {row["keyid"]: row for row in commands("key", "list", "acme", "--json").document["keys"]}
    assert {keyid: row["state"] for keyid, row in rows.items()} == {
        device.keyid: "retiring",
        added_id: "retiring",
        new_id: "active",
    }
    assert rows[device.keyid]["acceptUntilMs"] == rotated["acceptUntilMs"]
    assert (rows[device.keyid]["obstacles"], rows[new_id]["obstacles"]) == (
        ["payload", "retiring", "window"],
        ["active"],
    )
    assert rows[new_id]["lastAcceptedAtMs"] is None
    assert rows[device.keyid]["freeAtMs"] - rows[device.keyid]["lastAcceptedAtMs"] == pytest.approx(
        90 * DAY_MS, abs=600_000
    )
    header, *_ = commands("key", "list", "acme").text.splitlines()
    assert header.split()[:7] == ["keyid", "device", "state", "age", "lastAcceptedAt", "removable", "obstacles"]


def test_a_removal(commands: Cli, access: Access, device: Device) -> None:
    """--dry-run says what holds a key and changes nothing; then it goes, and its tombstone is listed."""
    dry = ("key", "remove", "acme", device.keyid, "--dry-run")
    text = commands(*dry).text
    assert text.startswith(f"key {device.keyid} is held, as things stand for good:\n  it is active")
    assert commands("key", "revoke", "acme", device.keyid).text == f"key {device.keyid} is revoked\n"
    found = commands(*dry, "--json").document
    assert [(obstacle["kind"], obstacle["place"]) for obstacle in found["obstacles"]] == [
        ("window", None),
        ("payload", "apollo"),
    ]
    assert found["freeAtMs"] == max(obstacle["untilMs"] for obstacle in found["obstacles"])
    assert "is held, until 2" in commands(*dry).text
    why = commands("key", "remove", "acme", device.keyid).why
    assert "cannot be removed yet: its last envelope is too recent until 2" in why
    assert "; payloads in project apollo that it signed are kept until 2" in why
    with as_owner(access) as owner:
        past = "last_at = now() - interval '91 days', kept_until = now() - interval '1 day'"
        owner.execute(f"UPDATE key_uses SET {past}".encode())  # noqa: S608 - a constant
    assert commands(*dry).text == f"nothing holds key {device.keyid}: it can be removed now\n"
    assert commands("key", "list", "acme").text.splitlines()[1].split()[-4] == "now"
    removed = commands("key", "remove", "acme", device.keyid, "--json").document
    assert removed == {"tenant": "acme", "keyid": device.keyid, "state": "removed"}
    [row] = commands("key", "list", "acme", "--json").document["keys"]
    assert (row["state"], row["obstacles"], row["freeAtMs"]) == ("removed", [], None)
    assert commands("key", "remove", "acme", device.keyid).why == "postseal: the key is removed already\n"


def test_the_window_is_a_setting(
    commands: Cli, access: Access, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter one lets a key go earlier."""
    commands("key", "retire", "acme", device.keyid)
    with as_owner(access) as owner:
        owner.execute("UPDATE key_uses SET last_at = now() - interval '2 days', kept_until = now() - interval '1 day'")
    assert "too recent" in commands("key", "remove", "acme", device.keyid).why
    monkeypatch.setenv("POSTSEAL_KEY_REMOVAL_DAYS", "1")
    assert commands("key", "remove", "acme", device.keyid).text == f"key {device.keyid} is removed\n"


def test_a_tenants_signing_key(commands: Cli, access: Access, tmp_path: Path) -> None:
    """Rotated without naming a device; retire, revoke and remove find it by its id; the private halves are in files."""
    assert "has no active signing key" in commands("key", "rotate", "acme").why
    assert not (tmp_path / "signing").exists()
    first = commands("key", "create", "acme", "--json").document["keyid"]
    rotated = commands("key", "rotate", "acme", "--json").document
    assert (rotated["retiring"], Path(rotated["keyFile"]).stem) == (first, rotated["keyid"])
    files = {file.stem for file in (tmp_path / "signing" / "acme").iterdir()}
    assert files == {first, rotated["keyid"]}
    rows = commands("key", "list", "acme", "--signing", "--json").document["keys"]
    assert [(row["keyid"], row["state"]) for row in rows] == [(first, "retiring"), (rotated["keyid"], "active")]
    assert commands("key", "list", "acme", "--json").document["keys"] == []
    assert commands("key", "retire", "acme", first).text == f"key {first} is verify-only\n"
    assert "too recent" in commands("key", "remove", "acme", first, "--dry-run").text
    assert "rotate it first" in commands("key", "retire", "acme", rotated["keyid"]).why
    assert commands("key", "revoke", "acme", first).text == f"key {first} is revoked\n"
    with as_owner(access) as owner:
        owner.execute("UPDATE signing_keys SET changed_at = now() - interval '91 days' WHERE state = 'revoked'")
    assert commands("key", "remove", "acme", first).text == f"key {first} is removed\n"
    header, *_ = commands("key", "list", "acme", "--signing").text.splitlines()
    assert header.split() == ["keyid", "state", "age", "removable", "obstacles", "registeredAt"]
    assert "PRIVATE" not in json.dumps(rotated)


@pytest.mark.parametrize(
    "words",
    [
        ["rotate", "acme", "d1"],
        ["rotate", "acme", "--public-key", "A" * 43],
        ["rotate", "acme", "d1", "--public-key", "no base64url"],
        ["register", "acme", "d1"],
        ["register", "acme", "d1", "--public-key", "=" * 43],
        ["rotate", "acme", "--overlap-hours", "-1"],
        ["list", "acme", "--signing", "--device", "d1"],
    ],
)
def test_wrong_usage(commands: Cli, words: list[str]) -> None:
    """Exit code 2, and nothing is done."""
    ran = commands("key", *words)
    assert (ran.code, ran.out) == (2, "")
    assert commands("key", "list", "acme", "--signing", "--json").document["keys"] == []


def test_a_public_key_that_is_none(commands: Cli, device: Device) -> None:
    """The right length and no point: refused in one line."""
    why = commands("key", "rotate", "acme", "d1", "--public-key", base64url.encode(bytes(32))).why
    assert "no canonical Ed25519 public key" in why

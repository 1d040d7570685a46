"""docs/runbooks/compromised-key.md: each of its commands is run, and leaves what the page says."""

import asyncio
import logging
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest
import structlog
import tables
from typer.testing import CliRunner

from fleet import Device, as_owner, enrol, issue
from outgoing import Destination, new_destination, signing_key, wish
from postseal.cli import program
from postseal.envelope import base64url, ed25519
from postseal.postgres.access import Access
from postseal.service import running_service
from postseal.settings import Settings

PAGE = (tables.DOCS / "runbooks" / "compromised-key.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"<!-- run: (signing|device) -->\n```sh\n(.*?)```", PAGE, re.DOTALL)


class Operator:
    """Types the commands of one part of the page."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def run(self, part: str) -> list[str]:
        """What each command of the part printed; none fails."""
        lines = "".join(block for name, block in BLOCKS if name == part).splitlines()
        return [self._typed(shlex.split(Template(line).substitute(self._names))) for line in lines]

    def _typed(self, words: list[str]) -> str:
        if words[0] != "postseal":
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout
        result = CliRunner().invoke(program(words[1:]), words[1:])
        assert result.exit_code == 0, (words, result.output)
        return result.stdout


@pytest.fixture
def deployment(access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Access]:
    """A database for commands in this process, whose logs are as before afterwards."""
    monkeypatch.setenv("POSTSEAL_DATABASE_URL", access.owner)
    monkeypatch.setenv("POSTSEAL_ROLES_FILE", str(access.passfile))
    monkeypatch.setenv("POSTSEAL_SIGNING_KEYS_DIR", str(tmp_path / "signing"))
    handlers, level = logging.root.handlers[:], logging.root.level
    yield access
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def send(access: Access, device: Device, *bodies: bytes) -> list[str]:
    """The outcomes or reasons of envelopes."""

    async def flow() -> list[str]:
        async with running_service(Settings(), access) as service:
            verdicts = [await service.inbox.receive(device.inbound(body)) for body in bodies]
        return [getattr(verdict, "outcome", None) or verdict.reason for verdict in verdicts]

    return asyncio.run(flow())


def seal_one(access: Access, destination: Destination, folder: Path) -> None:
    """Let something wait for the destination."""

    async def flow() -> None:
        settings = Settings(signing_keys_dir=str(folder / "signing"))
        async with running_service(settings, access) as service:
            await service.outbox.enqueue("acme", "apollo", [wish(destination.name)], "owner-1")

    asyncio.run(flow())


def test_a_tenants_signing_key(deployment: Access, tmp_path: Path):
    """Another key signs, the old one is revoked and its file gone, and the mail that it signed is named."""
    destination = new_destination(deployment)
    old = ed25519.thumbprint(ed25519.public_key(signing_key(deployment, tmp_path / "signing")))
    seal_one(deployment, destination, tmp_path)
    names = {"TENANT": "acme", "PROJECT": "apollo", "OLD": old, "SIGNING_KEYS": str(tmp_path / "signing")}
    printed = Operator(names).run("signing")
    with as_owner(deployment) as owner:
        states = dict(owner.execute("SELECT state, keyid FROM signing_keys").fetchall())
    assert states["revoked"] == old
    assert {file.stem for file in (tmp_path / "signing" / "acme").iterdir()} == {states["active"]}
    assert "envelopes for apollo/orders that it signed are kept" in "".join(printed)
    assert "signing-key.revoke" in printed[-1]
    seal_one(deployment, destination, tmp_path)
    assert [row.keyid for row in destination.rows()] == [old, states["active"]]


def test_a_devices_key(deployment: Access):
    """It brings nothing new, the new one does, the holes are closed, and the page says what still holds the old one."""
    device, seed = enrol(deployment), ed25519.generate()
    assert send(deployment, device, device.envelope(1), device.envelope(4)) == ["accepted", "gap"]
    stolen = issue(deployment, "acme", device.name, ["apollo"])
    names = {
        "TENANT": "acme",
        "PROJECT": "apollo",
        "DEVICE": device.name,
        "OLD": device.keyid,
        "CREDENTIAL_ID": str(stolen.credential_id),
        "PUBLIC_KEY": base64url.encode(ed25519.public_key(seed)),
        "SEQUENCE": "3",
    }
    printed = Operator(names).run("device")
    assert device.keyid in printed[0]
    assert "its last envelope is too recent" in printed[-1]
    assert "missing" not in printed[-1]
    bodies = device.envelope(5), device.envelope(5, seed=seed)
    assert send(deployment, device, *bodies) == ["key_revoked", "accepted"]


def test_every_block_is_run():
    """No command stands in a block of the page that the tests leave out."""
    assert PAGE.count("```sh") == len(BLOCKS)

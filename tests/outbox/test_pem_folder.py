"""Signing keys as files: used only while they are one account's alone and what their name says; never shown."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from postseal.envelope import ed25519
from postseal.rules.delivery import SealCode
from postseal.signing import SigningFailed
from postseal.signing.pem_folder import REMEMBERED_FOR_S, PemFolder, path_of, write_key

pytestmark = pytest.mark.anyio

MESSAGE = b"what is signed"


@pytest.fixture
def seed() -> bytes:
    """A private key."""
    return ed25519.generate()


@pytest.fixture
def keyid(seed: bytes) -> str:
    """Its id."""
    return ed25519.thumbprint(ed25519.public_key(seed))


@pytest.fixture
def file(folder: Path, seed: bytes) -> Path:
    """Its file."""
    return write_key(folder, "acme", seed)


async def failure(keys: PemFolder, keyid: str, tenant: str = "acme") -> SigningFailed:
    """Why nothing is signed."""
    with pytest.raises(SigningFailed) as raised:
        await keys.sign(tenant, keyid, MESSAGE)
    return raised.value


async def test_a_key_signs(folder: Path, file: Path, seed: bytes, keyid: str):
    """What it signs holds under its public half; its file and folders are the owner's alone."""
    signature = await PemFolder(folder).sign("acme", keyid, MESSAGE)
    assert ed25519.verify(ed25519.public_key(seed), MESSAGE, signature)
    assert file == folder / "acme" / f"{keyid}.pem"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file.parent, folder)] == [0o700, 0o700]


def test_a_file_is_never_overwritten(folder: Path, file: Path, seed: bytes):
    """The second time it is there."""
    with pytest.raises(FileExistsError):
        write_key(folder, "acme", seed)
    assert ed25519.seed_from_pem(file.read_bytes()) == seed


async def test_another_tenants_key_is_not_there(folder: Path, file: Path, keyid: str):
    """Each tenant has its own folder, and no name leads out of it."""
    keys = PemFolder(folder)
    for tenant in ("beta", "..", "../acme", "acme/../acme", "", "/"):
        assert (await failure(keys, keyid, tenant)).code is SealCode.SIGNING_KEY_MISSING
    for name in ("", "..", f"../acme/{keyid}", "A" * 43):
        assert (await failure(keys, name)).code is SealCode.SIGNING_KEY_MISSING


def group_reads(file: Path) -> None:
    """Let the group read it."""
    file.chmod(0o640)


def world_reads(file: Path) -> None:
    """Let anybody read it."""
    file.chmod(0o604)


def link(file: Path) -> None:
    """Put a link in its place."""
    file.rename(file.with_suffix(".kept"))
    file.symlink_to(file.with_suffix(".kept"))


def pipe(file: Path) -> None:
    """Put a pipe in its place, at whose other end nobody writes."""
    file.unlink()
    os.mkfifo(file, 0o600)


def make_folder(file: Path) -> None:
    """Put a folder in its place."""
    file.unlink()
    file.mkdir(0o700)


def other_key(file: Path) -> None:
    """Put another key under its name."""
    file.write_bytes(ed25519.seed_to_pem(ed25519.generate()))


def no_key(file: Path) -> None:
    """Put something else in it."""
    file.write_bytes(b"-----BEGIN PRIVATE KEY-----\nnothing\n-----END PRIVATE KEY-----\n")


@pytest.mark.parametrize("spoil", [group_reads, world_reads, link, pipe, make_folder, other_key, no_key])
async def test_a_file_that_is_not_used(
    folder: Path, file: Path, keyid: str, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
):
    """It signs nothing, at once, and neither the error nor the log shows what it holds."""
    spoil(file)
    secret = file.read_text().splitlines()[1] if spoil in (group_reads, world_reads, link, other_key) else "nothing\n"
    failed = await failure(PemFolder(folder), keyid)
    assert failed.code is SealCode.SIGNING_FAILED
    printed = capsys.readouterr()
    assert secret not in str(failed) + repr(failed) + printed.out + printed.err


async def test_another_owners_file_is_not_used(folder: Path, file: Path, keyid: str, monkeypatch: pytest.MonkeyPatch):
    """Whoever owns a file can change it."""
    owner = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    failed = await failure(PemFolder(folder), keyid)
    assert failed.code is SealCode.SIGNING_FAILED
    assert f"user id {owner}" in str(failed)


async def test_it_is_remembered_for_a_short_time(folder: Path, file: Path, keyid: str):
    """A file that is taken away signs for a few seconds more, one that comes signs at once."""
    now_s = 0.0
    keys = PemFolder(folder, clock=lambda: now_s)
    await keys.sign("acme", keyid, MESSAGE)
    kept = file.rename(file.with_suffix(".kept"))
    await keys.sign("acme", keyid, MESSAGE)
    now_s = REMEMBERED_FOR_S
    assert (await failure(keys, keyid)).code is SealCode.SIGNING_KEY_MISSING
    kept.rename(path_of(folder, "acme", keyid))
    await keys.sign("acme", keyid, MESSAGE)


async def test_nothing_of_a_key_is_shown(folder: Path, file: Path, seed: bytes, keyid: str):
    """Not even where it is remembered."""
    keys = PemFolder(folder)
    await keys.sign("acme", keyid, MESSAGE)
    assert seed.hex() not in repr(keys)
    assert str(seed) not in repr(keys)
    assert file.read_text().splitlines()[1] not in repr(keys)

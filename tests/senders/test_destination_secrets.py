"""Destinations' secrets at rest, and the key file under which they lie."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from postseal.errors import StartupError
from postseal.senders import Scheme, Secret
from postseal.senders.secrets import DeploymentKey, SecretUnusable, load_deployment_key
from postseal.senders.webhook import make_secret

KEY = DeploymentKey(bytes(range(32)))
SHARED = make_secret(Scheme.V1)


@pytest.mark.parametrize("secret", [SHARED, make_secret(Scheme.V1A), Secret(Scheme.V1, bytes(64))])
def test_a_secret_comes_back(secret: Secret) -> None:
    """What was encrypted for a destination opens for it; the key's bytes do not stand in it, and no two are alike."""
    encrypted = KEY.encrypt("acme", 7, secret)
    assert KEY.open("acme", 7, secret.scheme, encrypted) == secret
    assert secret.key not in encrypted
    assert KEY.encrypt("acme", 7, secret) != encrypted


def test_a_secret_opens_in_its_own_row_alone() -> None:
    """Under another tenant, stream, scheme or key, or with any byte changed or missing, it is unusable."""
    encrypted = KEY.encrypt("acme", 7, SHARED)
    moved = [
        (KEY, "acme2", 7, "v1", encrypted),
        (KEY, "acme", 8, "v1", encrypted),
        (KEY, "acme", 7, "v1a", encrypted),
        (KEY, "acme", 7, "v2", encrypted),
        (DeploymentKey(bytes(32)), "acme", 7, "v1", encrypted),
        (KEY, "acme", 7, "v1", b""),
        *((KEY, "acme", 7, "v1", encrypted[:place]) for place in range(len(encrypted))),
        *(
            (KEY, "acme", 7, "v1", encrypted[:place] + bytes([encrypted[place] ^ 1]) + encrypted[place + 1 :])
            for place in range(len(encrypted))
        ),
    ]
    for key, tenant, stream, scheme, text in moved:
        with pytest.raises(SecretUnusable, match=r"\Aa destination's secret does not open: [^\n]*\Z"):
            key.open(tenant, stream, scheme, text)


def test_what_opens_is_opened() -> None:
    """After a new key file the secrets made since sign, and those from before are left out; where none opens: none."""
    lost, other = DeploymentKey(bytes(32)), make_secret(Scheme.V1A)
    old = ("v1", lost.encrypt("acme", 7, SHARED))
    new = [(secret.scheme.value, KEY.encrypt("acme", 7, secret)) for secret in (other, SHARED)]
    assert KEY.open_all("acme", 7, [new[0], old, new[1]]) == [other, SHARED]
    assert KEY.open_all("acme", 7, []) == []
    with pytest.raises(SecretUnusable):
        KEY.open_all("acme", 7, [old])


def test_the_key_is_shown_nowhere() -> None:
    """Its repr has nothing of it."""
    assert repr(KEY) == "DeploymentKey(…)"


def test_a_missing_key_is_made_only_where_told_to(tmp_path: Path) -> None:
    """It is then 32 random bytes for this account alone, and the same one is read from there on."""
    file = tmp_path / "home" / "deployment.key"
    with pytest.raises(StartupError, match=r"there is no folder .*home for the deployment key file"):
        load_deployment_key(file, make=True)
    file.parent.mkdir()
    with pytest.raises(StartupError, match="there is no deployment key file"):
        load_deployment_key(file, make=False)
    encrypted = load_deployment_key(file, make=True).encrypt("acme", 7, SHARED)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_bytes()) == 32
    assert list(file.parent.iterdir()) == [file]
    for make in (False, True):
        assert load_deployment_key(file, make=make).open("acme", 7, "v1", encrypted) == SHARED
    assert load_deployment_key(tmp_path / "other.key", make=True)
    assert (tmp_path / "other.key").read_bytes() != file.read_bytes()


def test_whoever_makes_it_at_once_has_the_same_key(tmp_path: Path) -> None:
    """Of many that find it missing one makes it; none goes on with a key that is nowhere."""
    file = tmp_path / "deployment.key"
    with ThreadPoolExecutor(16) as threads:
        keys = list(threads.map(lambda _: load_deployment_key(file, make=True), range(64)))
    assert list(tmp_path.iterdir()) == [file]
    encrypted = keys[0].encrypt("acme", 7, SHARED)
    assert all(key.open("acme", 7, "v1", encrypted) == SHARED for key in keys)


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """Whatever bit of group or others is set."""
    file = tmp_path / "deployment.key"
    file.write_bytes(bytes(32))
    for mode in (0o640, 0o604, 0o620, 0o602, 0o610, 0o601):
        file.chmod(mode)
        with pytest.raises(
            StartupError, match=r"\Athe deployment key file [^\n]* is not used: others may read it[^\n]*\Z"
        ):
            load_deployment_key(file, make=True)
    file.chmod(0o400)
    load_deployment_key(file, make=True)


def test_a_key_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Of another length, a link, a pipe, a folder, or in a folder that is none: one line names the file."""
    short, long, link, pipe, folder = (tmp_path / name for name in ("short", "long", "link", "pipe", "folder"))
    short.write_bytes(bytes(31))
    long.write_bytes(bytes(33))
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(32))
    link.symlink_to(whole)
    os.mkfifo(pipe)
    folder.mkdir()
    for file in (short, long, whole, pipe):
        file.chmod(0o600)
    for file in (short, long, link, pipe, folder, whole / "below"):
        with pytest.raises(StartupError) as raised:
            load_deployment_key(file, make=False)
        assert str(file) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_key_file_of_another_account_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose file it is can read it, and change it."""
    file = tmp_path / "deployment.key"
    load_deployment_key(file, make=True)
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StartupError, match=f"belongs to user id {owner}"):
        load_deployment_key(file, make=True)

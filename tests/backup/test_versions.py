"""Archives of older versions of PostgreSQL, those that are installed, and what may be restored where."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from places import Target, contents, definitions, new_target

from fleet import enrol
from own_server import own_server
from postseal.admin.actor import Actor
from postseal.archive import read_manifest
from postseal.backup import back_up
from postseal.errors import ArchiveError, StartupError
from postseal.postgres.access import Access
from postseal.postgres.binaries import CLIENT_PROGRAMS, FOLDER_VARIABLE, SYSTEM_ROOT, find_client_programs
from postseal.restore import restore

NEWEST = 18
INSTALLED = {int(program.parts[-3]): program.parent for program in SYSTEM_ROOT.glob("*/bin/postgres")}
OLDER = {major: folder for major, folder in INSTALLED.items() if major < NEWEST}


@pytest.mark.soak
def test_an_older_version_is_installed_where_it_counts():
    """The tests below run on it, and prove nothing where there is none."""
    assert OLDER


@contextmanager
def server_of(major: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Access]:
    """A server of an older version, beside programs of all versions."""
    with monkeypatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(OLDER[major]))
        with own_server() as server:
            with psycopg.connect(server.access.owner) as owner:
                assert owner.info.server_version // 10_000 == major
            patch.delenv(FOLDER_VARIABLE)
            yield server.access


@pytest.mark.soak
@pytest.mark.parametrize("major", OLDER)
def test_of_an_older_version(
    monkeypatch: pytest.MonkeyPatch,
    major: int,
    *,
    target: Target,
    archive: Path,
    actor: Actor,
    access: Access,
    tmp_path: Path,
):
    """Its archive is written by programs of its own version, and restored there as on a newer server.

    An archive of a newer server is refused by it, and so are programs that cannot speak with it.
    """
    with server_of(major, monkeypatch) as old:
        enrol(old)
        manifest = back_up(old, archive, jobs=2)
        assert manifest.server_version.startswith(f"{major}.")
        assert manifest.programs_major == major

        with new_target(old) as again:
            restore(again.access, archive, actor, jobs=2)
            assert definitions(again.access) == definitions(old)
            assert contents(again.access)["devices"] == contents(old)["devices"]

        restore(target.access, archive, actor, jobs=2)
        assert definitions(target.access) == definitions(access)
        assert contents(target.access)["devices"] == contents(old)["devices"]

        newer = tmp_path / "newer"
        back_up(access, newer, jobs=1)
        assert read_manifest(newer).programs_major == NEWEST
        with new_target(old) as refused:
            with pytest.raises(ArchiveError, match=f"server has version {major}: restore it into version {NEWEST} or"):
                restore(refused.access, newer, actor, jobs=1)
            with monkeypatch.context() as patch:
                patch.setenv(FOLDER_VARIABLE, str(find_client_programs(NEWEST).bin))
                with pytest.raises(ArchiveError, match=f"does not restore into a server of version {major}: install"):
                    restore(refused.access, archive, actor, jobs=1)
                assert back_up(old, tmp_path / "by-newer", jobs=1).programs_major == NEWEST
            assert refused.is_untouched()


def test_programs_that_are_too_old(monkeypatch: pytest.MonkeyPatch, access: Access, archive: Path, tmp_path: Path):
    """An older pg_dump does not know what a newer server has: it is not used, and one line says what to install."""
    for name in CLIENT_PROGRAMS:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) 15.9'\n")
        program.chmod(0o755)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(StartupError, match=r"of PostgreSQL \d+ or newer are needed and only those of 15\.9 are here"):
        back_up(access, archive, jobs=1)
    assert not archive.exists()

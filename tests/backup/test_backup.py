"""An archive is whole, of one snapshot, private, and never in another one's place."""

import fcntl
import gzip
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from places import Target, contents
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleet import as_owner, enrol, locked_stream
from outgoing import new_destination
from postseal import backup
from postseal.archive import DUMP, read_manifest, require_whole
from postseal.backup import back_up
from postseal.errors import ArchiveError, StartupError
from postseal.postgres import snapshot
from postseal.postgres.access import Access
from postseal.postgres.binaries import FOLDER_VARIABLE, find_binaries
from postseal.postgres.home import try_lock
from postseal.postgres.migrate import migrations, read_passwords
from postseal.postgres.programs import running


def test_what_an_archive_says(access: Access, archive: Path):
    """Versions, rows and the audit's end are those of the database; each file has its digest."""
    enrol(access)
    new_destination(access)
    manifest = back_up(access, archive, jobs=2)
    assert read_manifest(archive) == manifest
    require_whole(archive, manifest)
    assert manifest.rows == {table: len(rows) for table, rows in contents(access).items()}
    assert manifest.rows["devices"] == 1
    assert manifest.schema_version == migrations()[-1].version
    assert manifest.role_prefix == access.prefix
    with as_owner(access) as owner:
        head = owner.execute("SELECT coalesce(max(id), 0) FROM audit_events").fetchone()
    assert head == (manifest.audit_head.id,)
    assert "dump/toc.dat" in manifest.files


def test_only_its_owner_may_read_it(access: Access, archive: Path):
    """Folders are 0700 and files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        back_up(access, archive, jobs=2)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in archive.rglob("*") if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in (archive, *archive.rglob("*")) if path.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})


def test_no_password_is_in_it(access: Access, archive: Path):
    """The roles file is no part of it, nor is any verifier."""
    back_up(access, archive, jobs=1)
    whole = b"".join(
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in archive.rglob("*")
        if path.is_file()
    )
    assert b"postseal_ingest" in whole
    assert b"SCRAM-SHA-256" not in whole
    for password in read_passwords(access.passfile).values():
        assert password.encode() not in whole


def test_nothing_is_overwritten(access: Access, archive: Path):
    """Neither an archive, nor an empty folder, nor what somebody has where it would be written first."""
    archive.mkdir()
    with pytest.raises(ArchiveError, match="is there already"):
        back_up(access, archive, jobs=1)
    archive.rmdir()
    mine = archive.with_name("archive.unfinished") / "mine"
    mine.parent.mkdir()
    mine.touch()
    with pytest.raises(ArchiveError, match=r"holds mine, which is no backup's"):
        back_up(access, archive, jobs=1)
    assert mine.exists()
    assert not archive.exists()


def test_what_fails_leaves_nothing(access: Access, archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without programs that suit there is one line, and no folder."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(StartupError, match="lacks pg_restore and pg_dump"):
        back_up(access, archive, jobs=1)
    assert list(archive.parent.iterdir()) == []


def test_a_database_without_a_schema(target: Target, archive: Path):
    """There is nothing to back up, and one line says so."""
    with pytest.raises(ArchiveError, match="nothing to back up"):
        back_up(target.access, archive, jobs=1)
    assert list(archive.parent.iterdir()) == []


def test_a_schema_of_a_later_release(access: Access, archive: Path):
    """What is not known here may not be all that there is: it is not backed up."""
    with as_owner(access) as owner:
        owner.execute("INSERT INTO schema_migrations (version, name) VALUES (9999, 'future')")
    with pytest.raises(StartupError, match="upgrade postseal"):
        back_up(access, archive, jobs=1)
    assert list(archive.parent.iterdir()) == []


def test_a_transaction_holds_nothing_up(access: Access, archive: Path):
    """A backup waits for no transaction of the service, and sees none that is not committed."""
    device = enrol(access)
    with locked_stream(access, device) as busy:
        busy.execute("INSERT INTO tenants VALUES ('uncommitted')")
        assert back_up(access, archive, jobs=2).rows["tenants"] == 1


def test_a_table_that_a_migration_holds(access: Access, archive: Path, monkeypatch: pytest.MonkeyPatch):
    """Behind one that hangs a backup gives up in time, with one line, and leaves nothing."""
    monkeypatch.setattr(snapshot, "LOCK_WAIT_MS", 200)
    monkeypatch.setattr(backup, "LOCK_WAIT_MS", 200)
    with as_owner(access) as owner, owner.transaction():
        owner.execute("LOCK TABLE queue")
        with pytest.raises((ArchiveError, psycopg.errors.LockNotAvailable), match=r"\A.*lock timeout"):
            back_up(access, archive, jobs=1)
    assert list(archive.parent.iterdir()) == []


@contextmanager
def reader(access: Access, *rights: str) -> Iterator[Access]:
    """The way to a test's database of a login that has been given these rights."""
    name, password = f"reader_{uuid4().hex[:12]}", uuid4().hex
    with psycopg.connect(access.owner, autocommit=True) as owner:
        role = sql.Identifier(name)
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(password)))
        try:
            for right in rights:
                owner.execute(sql.SQL(right).format(role))
            yield replace(access, owner=make_conninfo(access.owner, user=name, password=password))
        finally:
            owner.execute(sql.SQL("DROP ROLE {}").format(role))


def test_a_login_that_may_only_read(access: Access, archive: Path):
    """It takes the same archive as the owner, its password stands in no list of processes, and it can write nothing."""
    enrol(access)
    with reader(access, "ALTER ROLE {} BYPASSRLS", "GRANT pg_read_all_data TO {}") as login:
        manifest = back_up(login, archive, jobs=2)
        with as_owner(login) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM tenants")
    assert manifest.rows == {table: len(rows) for table, rows in contents(access).items()}


@pytest.mark.parametrize("right", ["ALTER ROLE {} BYPASSRLS", "GRANT pg_read_all_data TO {}"])
def test_a_login_that_may_not_read_all(access: Access, archive: Path, right: str):
    """Rows that it does not see are never left out in silence: it is refused, and leaves nothing."""
    with reader(access, right) as login, pytest.raises((ArchiveError, psycopg.errors.InsufficientPrivilege)):
        back_up(login, archive, jobs=1)
    assert list(archive.parent.iterdir()) == []


def test_one_backup_at_a_time(access: Access, archive: Path):
    """A second one of the same name is refused while the first one writes."""
    folder = archive.with_name(archive.name + backup.UNFINISHED)
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ArchiveError, match="another backup is writing"):
            back_up(access, archive, jobs=1)
    finally:
        os.close(lock)
    (folder / DUMP).mkdir()
    (folder / DUMP / "half").touch()
    back_up(access, archive, jobs=1)
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_a_lock_on_a_folder_that_was_renamed_is_none(access: Access, archive: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever opened what another backup has just given its name leaves alone what stands there by now."""

    def rename_first(lock: int, operation: int) -> bool:
        unfinished = archive.with_name("archive.unfinished")
        unfinished.rename(archive.with_name("another"))
        unfinished.mkdir()
        return try_lock(lock, operation)

    monkeypatch.setattr(backup, "try_lock", rename_first)
    with pytest.raises(ArchiveError, match="another backup is writing"):
        backup.back_up(access, archive, jobs=1)
    assert not archive.exists()


def test_no_other_secret_stands_on_a_command_line(access: Access):
    """A key's passphrase has no way to pg_dump but there: it is refused, and not repeated."""
    conninfo = make_conninfo(access.owner, sslpassword="hunter2")
    with (
        pytest.raises(ArchiveError, match="sslpassword would be seen on the command line of pg_dump") as refused,
        running(find_binaries(None), "pg_dump", [], conninfo),
    ):
        pass
    assert "hunter2" not in str(refused.value)

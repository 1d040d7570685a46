"""Migrations: forward only, one at a time, again without harm, and never against a newer schema."""

import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleet import as_owner, enrol
from own_server import own_server
from postseal.errors import StartupError
from postseal.postgres import migrate as module
from postseal.postgres.access import Access
from postseal.postgres.binaries import FOLDER_VARIABLE, SYSTEM_ROOT
from postseal.postgres.database import Part
from postseal.postgres.migrate import (
    Migration,
    migrate,
    migrations,
    read_passwords,
    require_current_schema,
    schema_version,
)

LATEST = migrations()[-1].version
COMMAND_S = 60


@pytest.fixture
def empty(cluster: Access, tmp_path: Path) -> Iterator[Access]:
    """A database without a schema, and roles of its own; both are dropped at the end."""
    name, prefix = f"empty_{uuid4().hex}", f"t{uuid4().hex[:12]}"
    with psycopg.connect(cluster.owner, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield replace(
                cluster,
                owner=make_conninfo(cluster.owner, dbname=name),
                passfile=tmp_path / "roles.pgpass",
                prefix=prefix,
            )
        finally:
            owner.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            for (role,) in owner.execute(
                "SELECT rolname FROM pg_roles WHERE starts_with(rolname, %s)", [f"{prefix}_"]
            ).fetchall():
                owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@contextmanager
def another(monkeypatch: pytest.MonkeyPatch, text: str) -> Generator[None]:
    """Let this release have one more migration."""
    more = [*migrations(), Migration(LATEST + 1, "9999_more.sql", text)]
    with monkeypatch.context() as patch:
        patch.setattr(module, "migrations", lambda: more)
        yield


def version(access: Access) -> int:
    """The version of its schema."""
    with as_owner(access) as owner:
        return schema_version(owner)


def test_an_empty_database_becomes_a_working_one(empty: Access):
    """All migrations are applied in order, and each part can log in."""
    assert version(empty) == 0
    assert [m.version for m in empty.migrate()] == list(range(1, LATEST + 1))
    assert version(empty) == LATEST
    empty.check()
    for part in Part:
        with psycopg.connect(empty.of(part)) as connection:
            assert connection.execute("SELECT current_user").fetchone() == (f"{empty.prefix}_{part}",)


def written(access: Access) -> list[object]:
    """What is another after each time that it was written: the password file, and the grants on the database."""
    found = access.passfile.stat()
    with as_owner(access) as owner:
        row = owner.execute("SELECT xmin::text FROM pg_database WHERE datname = current_database()").fetchone()
    return [found.st_ino, found.st_mtime_ns, row]


def test_migrating_again_changes_nothing(empty: Access):
    """Neither the schema nor a password; it does not even write them, for which a full disk has no room."""
    empty.migrate()
    before = written(empty)
    assert empty.migrate() == []
    assert written(empty) == before
    empty.check()


def test_devices_that_were_enrolled_before_can_pull(empty: Access, monkeypatch: pytest.MonkeyPatch):
    """The outbound half gives each a destination in each of its projects, but for those that are retired."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "migrations", lambda: migrations()[:1])
        empty.migrate()
    enrol(empty, "device-01")
    retired = enrol(empty, "device-02")
    with as_owner(empty) as owner:
        owner.execute("UPDATE streams SET retired = true WHERE stream = %s", [retired.stream])
    empty.migrate()
    with as_owner(empty) as owner:
        made = owner.execute(
            "SELECT project, destination, mode, settled"
            " FROM destinations JOIN destination_health USING (tenant, stream)"
        ).fetchall()
    assert made == [("apollo", "device-01", "pull", 0)]


def test_uses_of_keys_are_known_from_what_was_retained(empty: Access, monkeypatch: pytest.MonkeyPatch):
    """Each key's last envelope in each stream, and the last expiry of what is kept of it."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "migrations", lambda: migrations()[:2])
        empty.migrate()
    device, other = enrol(empty, "device-01"), enrol(empty, "device-02")
    with as_owner(empty) as owner:
        for stream, sequence, keyid, day, kept in [
            (device.stream, 1, "a", 1, None),
            (device.stream, 2, "a", 3, 93),
            (device.stream, 3, "a", 2, 95),
            (device.stream, 4, "b", 4, None),
            (other.stream, 1, "a", 9, 99),
        ]:
            owner.execute(
                "INSERT INTO identities VALUES ('acme', %s, %s, gen_random_uuid(), gen_random_uuid(), '', %s,"
                " date '2026-01-01' + %s)",
                [stream, sequence, keyid, day],
            )
            if kept is not None:
                owner.execute(
                    "INSERT INTO payloads VALUES ('acme', %s, %s, date '2026-01-01' + %s, '', '')",
                    [stream, sequence, kept],
                )
    empty.migrate()
    with as_owner(empty) as owner:
        uses = owner.execute(
            "SELECT stream, keyid, last_at::date - date '2026-01-01', kept_until::date - date '2026-01-01'"
            " FROM key_uses ORDER BY 1, 2"
        ).fetchall()
    assert uses == [(device.stream, "a", 3, 95), (device.stream, "b", 4, 4), (other.stream, "a", 9, 99)]


def test_two_at_once_apply_each_migration_once(empty: Access):
    """The second waits for the first and then finds nothing to do."""
    together = threading.Barrier(2)

    def one(_: int) -> list[Migration]:
        together.wait()
        return empty.migrate()

    with ThreadPoolExecutor(2) as pool:
        applied = list(pool.map(one, range(2)))
    assert sorted(len(each) for each in applied) == [0, LATEST]
    empty.check()


def test_the_password_file_is_for_its_owner_alone(empty: Access):
    """0600, one strong password a role, and nothing is left beside it."""
    empty.migrate()
    assert stat.S_IMODE(empty.passfile.stat().st_mode) == 0o600
    passwords = read_passwords(empty.passfile)
    assert passwords.keys() == {f"{empty.prefix}_{part}" for part in Part}
    assert len(set(passwords.values())) == len(Part)
    assert all(len(password) >= 43 for password in passwords.values())
    assert [file.name for file in empty.passfile.parent.iterdir()] == [empty.passfile.name]


def test_roles_that_may_be_in_use_elsewhere_are_left_alone(empty: Access):
    """Without their passwords migrate refuses and says what to do; with a copy of the file it goes on."""
    empty.migrate()
    elsewhere = replace(empty, passfile=empty.passfile.with_name("elsewhere.pgpass"))
    with pytest.raises(StartupError, match=r"copy the roles file [^\n]*role_prefix[^\n]* --new-passwords"):
        elsewhere.migrate()
    assert not elsewhere.passfile.exists()
    empty.check()
    shutil.copy(empty.passfile, elsewhere.passfile)
    assert elsewhere.migrate() == []
    elsewhere.check()
    empty.check()


def test_new_passwords_end_the_old_ones(empty: Access):
    """All of the service's roles get one; what the file holds of other roles stays."""
    empty.migrate()
    old = replace(empty, passfile=empty.passfile.with_name("old.pgpass"))
    shutil.copy(empty.passfile, old.passfile)
    with empty.passfile.open("a") as file:
        file.write("*:*:*:another_admin:made-up\n")
    assert empty.migrate(new_passwords=True) == []
    empty.check()
    with pytest.raises(StartupError, match="password authentication failed"):
        old.check()
    passwords, before = read_passwords(empty.passfile), read_passwords(old.passfile)
    assert passwords.pop("another_admin") == "made-up"
    assert passwords.keys() == before.keys()
    assert not set(passwords.values()) & set(before.values())


def test_a_lost_password_file_is_made_anew(empty: Access):
    """With new passwords, since nobody knows the old ones."""
    empty.migrate()
    empty.passfile.unlink()
    with pytest.raises(StartupError, match="postseal migrate"):
        empty.check()
    empty.migrate(new_passwords=True)
    empty.check()


@pytest.mark.parametrize(
    ("place", "why"), [("none/roles.pgpass", "write .*: No such file or directory"), ("", "read .*: Is a directory")]
)
def test_a_password_file_that_cannot_be_used_leaves_no_roles(empty: Access, tmp_path: Path, place: str, why: str):
    """One line tells why, and the next migration has nothing to mend."""
    with pytest.raises(StartupError, match=rf"\Acannot {why}\Z"):
        replace(empty, passfile=tmp_path / place).migrate()
    assert len(empty.migrate()) == LATEST
    empty.check()


def migrated(access: Access, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, run where the roles file of `access` is all that there may be."""
    environment = {
        "POSTSEAL_DATABASE_URL": access.owner,
        "POSTSEAL_ROLE_PREFIX": access.prefix,
        "POSTSEAL_ROLES_FILE": str(access.passfile),
        "POSTSEAL_DATA_DIR": str(access.passfile.parent),
    }
    return subprocess.run(
        [Path(sys.executable).with_name("postseal"), "migrate", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def test_a_second_machine_has_to_say_that_it_takes_over(empty: Access, tmp_path: Path):
    """The command is refused in one line and makes no deployment key of its own; with --new-passwords it goes on."""
    empty.migrate()
    second = replace(empty, passfile=tmp_path / "second" / "roles.pgpass")
    refused = migrated(second)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert list(second.passfile.parent.iterdir()) == []
    assert migrated(second, "--new-passwords").returncode == 0
    assert {file.name for file in second.passfile.parent.iterdir()} == {"roles.pgpass", "deployment.key"}
    second.check()
    with pytest.raises(StartupError, match="password authentication failed"):
        empty.check()


def test_a_newer_schema_is_refused(access: Access):
    """By migrate and at start-up, with what to do."""
    with as_owner(access) as owner:
        owner.execute("INSERT INTO schema_migrations (version, name) VALUES (%s, 'future')", [LATEST + 1])
        with pytest.raises(StartupError, match="upgrade postseal"):
            migrate(owner, prefix=access.prefix, passfile=access.passfile)
        with pytest.raises(StartupError, match="upgrade postseal"):
            require_current_schema(owner)


def test_an_older_schema_is_refused_until_it_is_migrated(access: Access, monkeypatch: pytest.MonkeyPatch):
    """A release does not run on a schema that it does not know; what is stored stays."""
    enrol(access)
    with as_owner(access) as owner, another(monkeypatch, "CREATE TABLE more (n int)"):
        with pytest.raises(StartupError, match="run `postseal migrate`"):
            require_current_schema(owner)
        assert [m.version for m in access.migrate()] == [LATEST + 1]
        require_current_schema(owner)
        assert owner.execute("SELECT count(*) FROM devices").fetchone() == (1,)


def test_a_migration_that_fails_leaves_nothing(access: Access, monkeypatch: pytest.MonkeyPatch):
    """It is one transaction, and the next one is not kept waiting."""
    with another(monkeypatch, "CREATE TABLE more (n int); SELECT 1 / 0"):
        with pytest.raises(psycopg.errors.DivisionByZero):
            access.migrate()
        assert version(access) == LATEST
        with as_owner(access) as owner:
            assert owner.execute("SELECT to_regclass('more')").fetchone() == (None,)
    assert access.migrate() == []


def test_a_migration_does_not_wait_for_ever_for_a_table(access: Access, monkeypatch: pytest.MonkeyPatch):
    """Behind its lock the whole service would stand; it gives up."""
    monkeypatch.setattr(module, "LOCK_TIMEOUT_MS", 200)
    with as_owner(access) as busy, busy.transaction():
        busy.execute("SELECT FROM streams")
        more = another(monkeypatch, "ALTER TABLE streams ADD COLUMN more int")
        with more, pytest.raises(psycopg.errors.LockNotAvailable):
            access.migrate()
    assert version(access) == LATEST


def test_a_migration_does_not_wait_for_ever_for_another(access: Access, monkeypatch: pytest.MonkeyPatch):
    """One that hangs is reported in one line."""
    monkeypatch.setattr(module, "TURN_TIMEOUT_MS", 200)
    with as_owner(access) as hanging:
        hanging.execute("SELECT pg_advisory_lock(%s)", [module.ADVISORY_LOCK])
        with pytest.raises(StartupError, match="does not end"):
            access.migrate()
    assert access.migrate() == []


def test_no_password_is_shown_to_the_server():
    """The roles' verifiers are made here, so that no statement carries a password.

    On a server of its own: of the one that all tests share, the view forgets what others push out.
    """
    with own_server() as server:
        with as_owner(server.access) as owner:
            owner.execute("CREATE EXTENSION pg_stat_statements SCHEMA public")
            seen = owner.execute("SELECT query FROM public.pg_stat_statements").fetchall()
        statements = "\n".join(query for (query,) in seen)
        assert statements.count("ALTER ROLE") >= len(Part)
        for password in read_passwords(server.access.passfile).values():
            assert password not in statements


def test_every_migration_is_numbered_without_a_gap():
    """In files named NNNN_words.sql."""
    assert [m.version for m in migrations()] == list(range(1, LATEST + 1))
    assert all(re.fullmatch(r"\d{4}_[a-z0-9_]+\.sql", m.name) for m in migrations())


def test_the_systems_own_postgresql_will_do(monkeypatch: pytest.MonkeyPatch):
    """Every major version that is installed beside the wheel's, if any, runs the same migrations."""
    for program in SYSTEM_ROOT.glob("*/bin/postgres"):
        monkeypatch.setenv(FOLDER_VARIABLE, str(program.parent))
        with own_server() as server:
            server.access.check()
            with as_owner(server.access) as owner:
                assert owner.info.server_version // 10_000 == int(program.parts[-3])
            enrol(server.access)
            assert server.access.migrate() == []

"""Migrations: forward only, one at a time, again without harm, and never against a newer schema."""

import re
import stat
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


def test_migrating_again_changes_nothing(empty: Access):
    """Neither the schema nor a password."""
    empty.migrate()
    passwords = read_passwords(empty.passfile)
    assert empty.migrate() == []
    assert read_passwords(empty.passfile) == passwords
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


def test_a_lost_password_file_is_made_anew(empty: Access):
    """The roles get new passwords, since nobody knows the old ones."""
    empty.migrate()
    empty.passfile.unlink()
    with pytest.raises(StartupError, match="postseal migrate"):
        empty.check()
    empty.migrate()
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


def test_no_password_is_shown_to_the_server(empty: Access):
    """The roles' verifiers are made here, so that no statement carries a password."""
    empty.migrate()
    with as_owner(empty) as owner:
        owner.execute("CREATE EXTENSION pg_stat_statements SCHEMA public")
        seen = owner.execute(
            "SELECT query FROM public.pg_stat_statements JOIN pg_database ON oid = dbid "
            "WHERE datname = current_database()"
        ).fetchall()
    statements = "\n".join(query for (query,) in seen)
    assert statements.count("ALTER ROLE") >= len(Part)
    for password in read_passwords(empty.passfile).values():
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

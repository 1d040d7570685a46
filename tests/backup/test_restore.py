"""A restore gives all of an archive or leaves the target as it was, and refuses by name what is not as it should be."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psycopg
import pytest
from places import Target, contents, definitions, events
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleet import as_owner, enrol
from outgoing import new_destination
from postseal import restore as module
from postseal.admin.actor import Actor
from postseal.archive import MANIFEST, read_manifest, stored_file, write_manifest
from postseal.backup import back_up
from postseal.errors import ArchiveError, StartupError
from postseal.postgres import scratch
from postseal.postgres.access import Access
from postseal.postgres.migrate import migrations
from postseal.postgres.scratch import place_of_restore
from postseal.restore import restore

LATEST = migrations()[-1].version


@pytest.fixture(scope="module")
def taken(shared_access: Access, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of a small deployment, which tests do not change."""
    enrol(shared_access)
    new_destination(shared_access)
    with as_owner(shared_access) as owner:
        owner.execute("INSERT INTO enqueue_logins VALUES ('no_such_login', 'acme', '{apollo}')")
    archive = tmp_path_factory.mktemp("archives") / "taken"
    back_up(shared_access, archive, jobs=2)
    return archive


@pytest.fixture
def copied(taken: Path, archive: Path) -> Path:
    """A copy of it, to be spoilt."""
    shutil.copytree(taken, archive)
    return archive


def test_all_of_it_comes_back(shared_access: Access, taken: Path, target: Target, actor: Actor):
    """Rows, definitions, owners and grants are those of what was backed up; one act tells of the restore."""
    restored = restore(target.access, taken, actor, jobs=2)
    assert definitions(target.access) == definitions(shared_access)
    before, after = contents(shared_access), contents(target.access)
    acts = set(after["platform_audit_events"]) - set(before["platform_audit_events"])
    assert len(acts) == 1
    after["platform_audit_events"] = before["platform_audit_events"]
    assert after == before
    manifest = restored.manifest
    assert events(target.access, "database.restore") == [
        {
            "takenAtMs": manifest.taken_at_ms,
            "postsealVersion": manifest.postseal_version,
            "auditHead": msgspec.to_builtins(manifest.audit_head),
        }
    ]
    assert (restored.database, restored.missing_logins) == (target.name, ["no_such_login"])
    assert target.databases() == {target.name}
    target.access.check()
    assert target.access.migrate() == []


def test_into_a_database_that_was_migrated_and_not_used(taken: Path, target: Target, actor: Actor):
    """Such as an embedded one, which is migrated whenever it is opened; its extensions stay."""
    target.access.migrate()
    with as_owner(target.access) as owner:
        owner.execute("CREATE EXTENSION pg_stat_statements SCHEMA public")
    restore(target.access, taken, actor, jobs=1)
    with as_owner(target.access) as owner:
        assert owner.execute("SELECT device FROM devices").fetchall() == [("device-01",)]
        assert owner.execute("SELECT count(*) FROM pg_extension WHERE extname = 'pg_stat_statements'").fetchone() == (
            1,
        )


def test_roles_are_made_where_there_are_none(taken: Path, target: Target, actor: Actor, tmp_path: Path):
    """On a new server they get new passwords, or those of the roles file that was brought along."""
    unknown = replace(target.access, passfile=tmp_path / "roles.pgpass")
    with pytest.raises(StartupError, match="copy the roles file"):
        restore(unknown, taken, actor, jobs=1)
    assert target.is_untouched()
    shutil.copy(target.access.passfile, unknown.passfile)
    restore(unknown, taken, actor, jobs=1)
    unknown.check()


def test_who_may_connect_stays_as_it_was(taken: Path, target: Target, actor: Actor):
    """A database from which everybody was shut out is not opened by a restore, nor is it closed to whom it was open."""
    grants = (
        "SELECT g.grantee::regrole::text, g.privilege_type, g.is_grantable FROM pg_database, aclexplode(datacl) AS g"
        " WHERE datname = current_database() ORDER BY 1, 2"
    )
    target.access.migrate()
    with psycopg.connect(target.access.owner) as owner:
        database = sql.Identifier(target.name)
        owner.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(database))
        owner.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO postseal_ingest WITH GRANT OPTION").format(database))
        before = owner.execute(grants).fetchall()
    restore(target.access, taken, actor, jobs=1)
    with psycopg.connect(target.access.owner) as owner:
        assert owner.execute(grants).fetchall() == before
    assert ("postseal_ingest", "CONNECT", True) in before
    assert "-" not in {grantee for grantee, *_ in before}


FULL = {
    "a tenant": ("INSERT INTO postseal.tenants VALUES ('acme')", "rows in tenants"),
    "a table of somebody's": ("CREATE TABLE public.orders ()", "the table public.orders"),
    "a view that is kept": ("CREATE MATERIALIZED VIEW public.seen AS SELECT 1", "the table public.seen"),
}


@pytest.mark.parametrize("what", FULL)
def test_a_database_that_is_not_empty(taken: Path, target: Target, actor: Actor, what: str):
    """It is refused with what is in it, and stays."""
    statement, named = FULL[what]
    target.access.migrate()
    with as_owner(target.access) as owner:
        owner.execute(statement.encode())
    before = contents(target.access)
    with pytest.raises(ArchiveError, match=f"is not empty, it holds {named}:"):
        restore(target.access, taken, actor, jobs=1)
    assert contents(target.access) == before
    assert target.databases() == {target.name}


def test_a_database_that_is_in_use(taken: Path, target: Target, actor: Actor):
    """Somebody who is connected could write at any moment."""
    with psycopg.connect(target.access.owner), pytest.raises(ArchiveError, match="stop the service"):
        restore(target.access, taken, actor, jobs=1)
    assert target.is_untouched()


def test_what_came_in_meanwhile_stays(taken: Path, target: Target, actor: Actor, monkeypatch: pytest.MonkeyPatch):
    """A row that is committed after the target was found empty is there afterwards, and the restore is refused."""
    target.access.migrate()
    replace_target = module.replace_target

    def late(place: Any) -> None:
        with as_owner(target.access) as owner:
            owner.execute("INSERT INTO tenants VALUES ('late')")
        replace_target(place)

    monkeypatch.setattr(module, "replace_target", late)
    with pytest.raises(ArchiveError, match="rows in tenants came into the database"):
        restore(target.access, taken, actor, jobs=1)
    with as_owner(target.access) as owner:
        assert owner.execute("SELECT tenant FROM tenants").fetchall() == [("late",)]
    assert target.databases() == {target.name}


def test_one_restore_at_a_time(taken: Path, target: Target, actor: Actor, monkeypatch: pytest.MonkeyPatch):
    """A second one into the same database is refused while the first one runs."""
    monkeypatch.setattr(scratch, "TURN_TIMEOUT_MS", 200)
    with place_of_restore(target.access), pytest.raises(ArchiveError, match="another restore"):
        restore(target.access, taken, actor, jobs=1)
    assert target.is_untouched()


def cut(file: str) -> Callable[[Path], None]:
    """Half of a file is gone."""

    def spoil(archive: Path) -> None:
        whole = (archive / file).read_bytes()
        (archive / file).write_bytes(whole[: len(whole) // 2])

    return spoil


def edited(file: str) -> Callable[[Path], None]:
    """One bit in the middle of a file is another one."""

    def spoil(archive: Path) -> None:
        whole = bytearray((archive / file).read_bytes())
        whole[len(whole) // 2] ^= 1
        (archive / file).write_bytes(whole)

    return spoil


def changed(**members: Any) -> Callable[[Path], None]:
    """The manifest is a valid one that says something else."""

    def spoil(archive: Path) -> None:
        manifest = msgspec.structs.replace(read_manifest(archive), **members)
        (archive / MANIFEST).unlink()
        write_manifest(archive, manifest)

    return spoil


def by_hand(archive: Path) -> None:
    """A count in the manifest is changed with an editor."""
    file = archive / MANIFEST
    file.write_text(file.read_text().replace('"devices": 1', '"devices": 2'))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no archive, or only a part of one: it has no manifest.json"),
    "unfinished": (lambda archive: (archive / MANIFEST).unlink(), "it has no manifest.json"),
    "manifest cut": (cut(MANIFEST), "manifest.json cannot be read: it is cut"),
    "manifest edited": (by_hand, "manifest.json was edited or damaged"),
    "contents cut": (cut("dump/toc.dat"), "dump/toc.dat was edited, cut or damaged"),
    "contents edited": (edited("dump/toc.dat"), "dump/toc.dat was edited, cut or damaged"),
    "a file is missing": (lambda archive: (archive / "dump/toc.dat").unlink(), "dump/toc.dat is missing"),
    "a file more": (lambda archive: (archive / "dump/more.dat").touch(), "knows nothing of dump/more.dat"),
    "a link": (lambda archive: (archive / "dump/link").symlink_to("/"), "is no regular file"),
    "older": (changed(schema_version=LATEST - 1), f"schema version {LATEST - 1}, older than this release's {LATEST}"),
    "newer": (changed(schema_version=LATEST + 1), f"schema version {LATEST + 1}, newer than this release's {LATEST}"),
    "other roles": (changed(role_prefix="others"), "prefix others: set role_prefix"),
    "another server": (changed(programs_version="99.1"), "written by pg_dump 99.1 and the server has version"),
    "other rows": (changed(rows={"devices": 2}), "rows of attempts were restored, the manifest says none"),
}


def test_an_archive_that_is_not_as_it_was(taken: Path, target: Target, actor: Actor, tmp_path: Path):
    """It is refused by what is wrong with it, and the target stays as it was."""
    for how, (spoil, why) in SPOILT.items():
        copied = tmp_path / how
        shutil.copytree(taken, copied)
        spoil(copied)
        with pytest.raises(ArchiveError, match=why):
            restore(target.access, copied, actor, jobs=1)
        assert target.is_untouched()


def test_an_archive_whose_dump_does_not_load(copied: Path, target: Target, actor: Actor):
    """Where pg_restore fails after it has begun, nothing of it stays."""
    manifest = read_manifest(copied)
    name = max(manifest.files, key=lambda file: manifest.files[file].size_bytes if file.endswith(".gz") else 0)
    (copied / name).write_bytes(b"no gzip")
    files = manifest.files | {name: stored_file(copied / name)}
    changed(files=files)(copied)
    with pytest.raises(ArchiveError, match="pg_restore failed: "):
        restore(target.access, copied, actor, jobs=2)
    assert target.is_untouched()


def test_what_does_not_hold_is_not_restored(access: Access, target: Target, archive: Path, actor: Actor):
    """An archive of a database whose cursor says more than its identities is whole, and is refused with the breach."""
    enrol(access)
    with as_owner(access) as owner:
        owner.execute("UPDATE streams SET highest = 5")
    back_up(access, archive, jobs=1)
    with pytest.raises(ArchiveError, match=r"\Awhat was restored has [1-9]\d* breaches, first: .*device-01"):
        restore(target.access, archive, actor, jobs=1)
    assert target.is_untouched()


@pytest.fixture
def deployer(cluster: Access, tmp_path: Path) -> Iterator[Access]:
    """A deployment of somebody who may make roles and databases, and is no superuser; its way to an empty database."""
    name, password = f"t{uuid4().hex[:12]}", uuid4().hex
    with psycopg.connect(cluster.owner, autocommit=True) as owner:
        owner.execute(
            sql.SQL("CREATE ROLE {} LOGIN CREATEROLE CREATEDB PASSWORD {}").format(
                sql.Identifier(name), sql.Literal(password)
            )
        )
        try:
            for database in (name, f"{name}_new"):
                owner.execute(
                    sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(database), sql.Identifier(name))
                )
            conninfo = make_conninfo(cluster.owner, user=name, password=password, dbname=name)
            yield Access(conninfo, tmp_path / "roles" / "roles.pgpass", name)
        finally:
            for database in (name, f"{name}_new"):
                owner.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database)))
            roles = owner.execute("SELECT rolname FROM pg_roles WHERE starts_with(rolname, %s)", [name]).fetchall()
            for (role,) in sorted(roles, reverse=True):
                owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_by_an_owner_who_is_no_superuser(deployer: Access, archive: Path, actor: Actor):
    """Whoever may make roles and databases can back up and restore; all belongs to the owning role as before."""
    deployer.passfile.parent.mkdir()
    deployer.migrate()
    enrol(deployer)
    back_up(deployer, archive, jobs=2)
    new = replace(deployer, owner=make_conninfo(deployer.owner, dbname=f"{deployer.prefix}_new"))
    restore(new, archive, actor, jobs=2)
    assert definitions(new) == definitions(deployer)
    assert contents(new)["devices"] == contents(deployer)["devices"]
    new.check()
    assert new.migrate() == []

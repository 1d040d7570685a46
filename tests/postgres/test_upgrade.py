"""A migration runs beside the release before it: what that one takes in meanwhile is kept, and it goes on."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from faults import Load
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleet import as_owner, enrol
from postseal.postgres import migrate as module
from postseal.postgres.access import Access
from postseal.postgres.migrate import Migration, migrations, schema_version
from postseal.service import running_service
from postseal.settings import Settings
from sender import require_each_once, sending
from until import until

ROOT = Path(__file__).parents[2]
FOLDER = "src/postseal/postgres/migrations"
STARTED_S = 60
MOST_COMMITS = 10
"""Before a migration so many are tried: a commit in the middle of a change may not start."""
COMMITTED = [migration for migration in migrations() if migration.version > 1]

# What takes something away from the release before, or rewrites a table under its lock.
UNSAFE = re.compile(
    r"\b(DROP\s+(TABLE|COLUMN|FUNCTION|SCHEMA|POLICY)|RENAME\s|TRUNCATE|REVOKE\s.*\sFROM\s+\{prefix\}"
    r"|ALTER\s+COLUMN\s+\w+\s+(SET\s+DATA\s+)?TYPE|SET\s+NOT\s+NULL|VACUUM|CLUSTER)\b",
    re.IGNORECASE,
)


@pytest.fixture
def anyio_backend() -> str:
    """Psycopg needs asyncio."""
    return "asyncio"


@pytest.mark.parametrize("migration", migrations(), ids=lambda migration: migration.name)
def test_a_migration_takes_nothing_away(migration: Migration):
    """The release before goes on with the schema after it: it only adds; what is in the way is a later release's."""
    statements = re.sub(r"--.*", "", migration.text)
    assert [found[0] for found in UNSAFE.finditer(statements)] == []


EVERY_HOT_TABLE = "".join(
    f"ALTER TABLE {table} ADD COLUMN more int;" for table in ("streams", "identities", "payloads", "audit_events")
)


@pytest.mark.anyio
async def test_a_migration_under_load(access: Access, monkeypatch: pytest.MonkeyPatch):
    """All hot tables are changed in one transaction; the service that runs meanwhile loses nothing, and goes on."""
    latest = migrations()[-1].version
    async with running_service(Settings(), access) as service:
        load = Load(service, access)
        sending_on = asyncio.create_task(load.run())
        try:
            await load.more_acknowledged()
            with monkeypatch.context() as patch:
                more = [*migrations(), Migration(latest + 1, f"{latest + 1:04}_more.sql", EVERY_HOT_TABLE)]
                patch.setattr(module, "migrations", lambda: more)
                await asyncio.to_thread(access.migrate)
            await load.more_acknowledged()
        finally:
            sending_on.cancel()
            await asyncio.gather(sending_on, return_exceptions=True)
        load.require_all_stored()
    with as_owner(access) as owner:
        assert schema_version(owner) == latest + 1


def git(*arguments: str) -> bytes:
    """What git says of this repository."""
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout


def release_before(migration: Migration, folder: Path) -> Path:
    """Put the last source that did not have a migration yet, and whose `serve` starts, into a folder."""
    added = git("log", "--diff-filter=A", "--format=%H", "--", f"{FOLDER}/{migration.name}").decode().split()
    assert added, f"{migration.name} is not committed, or the history is cut: git fetch --unshallow"
    for commit in git("rev-list", f"--max-count={MOST_COMMITS}", f"{added[-1]}^").decode().split():
        place = folder / commit
        place.mkdir()
        subprocess.run(["tar", "-x", "-C", place], input=git("archive", commit, "src"), check=True)
        found = subprocess.run(
            [sys.executable, "-c", "import postseal.cli.serve"],
            env=os.environ | {"PYTHONPATH": str(place / "src")},
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if found.returncode == 0:
            return place / "src"
    raise AssertionError(f"no source before {migration.name} starts")


@contextmanager
def new_database(cluster: Access) -> Iterator[Access]:
    """A database without a schema, dropped at the end."""
    name = f"older_{uuid4().hex}"
    with psycopg.connect(cluster.owner, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield replace(cluster, owner=make_conninfo(cluster.owner, dbname=name))
        finally:
            owner.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def program(source: Path, access: Access, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `postseal` of some source on a database; killed at the end, if it still runs."""
    environment = {
        "PYTHONPATH": str(source),
        "POSTSEAL_DATABASE_URL": access.owner,
        "POSTSEAL_ROLES_FILE": str(access.passfile),
        "POSTSEAL_DATA_DIR": str(access.passfile.parent / "upgrade"),
    }
    script = (
        "import postseal.cli, sys; assert postseal.cli.__file__.startswith(sys.path[1]), sys.path; postseal.cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(source: Path, access: Access, *arguments: str) -> dict[str, list[str]]:
    """What a command that ended well printed."""
    with program(source, access, *arguments, "--json") as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait(STARTED_S) == 0
    return json.loads(printed)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("migration", COMMITTED, ids=lambda migration: migration.name)
def test_the_release_before_serves_on(cluster: Access, tmp_path: Path, migration: Migration):
    """A server of that release is under load while this release migrates its database: nothing is lost or refused."""
    source, ours = release_before(migration, tmp_path), ROOT / "src"
    with new_database(cluster) as access:
        said(source, access, "migrate")
        devices = [enrol(access, f"device-{n}") for n in range(4)]
        planned = said(ours, access, "migrate", "--plan")["pending"]
        assert planned[0] == migration.name
        with program(source, access, "serve", "--port", "0", "--json") as server:
            assert server.stdout is not None
            port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
            with sending(devices, port) as senders:
                assert said(ours, access, "migrate")["applied"] == planned
                migrated_at = [len(sender.acknowledged) for sender in senders]
                for sender, before in zip(senders, migrated_at, strict=True):
                    until(lambda sender=sender, before=before: len(sender.acknowledged) > before + 20)
            server.terminate()
            assert server.wait(STARTED_S) == 0
        require_each_once(access, senders)
        assert said(ours, access, "migrate", "--plan")["pending"] == []
        access.check()

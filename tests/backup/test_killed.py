"""`kill -9` of `backup` and `restore`: an archive is whole or not there, a target restored or as it was."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from places import Target

from fleet import as_owner, enrol
from postseal.admin.actor import Actor
from postseal.archive import read_manifest, require_whole
from postseal.backup import UNFINISHED, back_up
from postseal.postgres.access import Access
from postseal.restore import restore
from until import until

POSTSEAL = Path(sys.executable).with_name("postseal")
ENDED_S = 60
ROWS = 10_000


@contextmanager
def started(access: Access, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command on a database; killed at the end with what it started, if it still runs."""
    environment = {"POSTSEAL_DATABASE_URL": access.owner, "POSTSEAL_ROLES_FILE": str(access.passfile)}
    with subprocess.Popen([POSTSEAL, *map(str, arguments)], env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def filled(access: Access) -> Access:
    """A database whose dump takes a while."""
    enrol(access)
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO audit_events (tenant, account, action, outcome, correlation_id)"
            " SELECT 'acme', 'a', 'test', 'done', gen_random_uuid() FROM generate_series(1, %s)",
            [ROWS],
        )
    return access


def test_a_restore_that_is_killed(filled: Access, target: Target, archive: Path, actor: Actor):
    """The target is as it was; the next run clears away what is left, though its pg_restore may still run."""
    back_up(filled, archive, jobs=1)
    with started(target.access, "restore", "--from", archive) as process:
        until(lambda: target.scratch in target.databases())
        process.kill()
        assert process.wait(ENDED_S) == -signal.SIGKILL
    assert target.databases() == {target.name, target.scratch}
    with psycopg.connect(target.access.owner) as owner:
        assert owner.execute("SELECT to_regnamespace('postseal')").fetchone() == (None,)
    restore(target.access, archive, actor, jobs=1)
    assert target.databases() == {target.name}
    with as_owner(target.access) as owner:
        assert owner.execute("SELECT count(*) FROM audit_events").fetchone() == (ROWS,)


@pytest.mark.soak
def test_a_restore_that_is_terminated(filled: Access, target: Target, archive: Path):
    """SIGTERM ends it with 143, and it clears away by itself."""
    back_up(filled, archive, jobs=1)
    with started(target.access, "restore", "--from", archive) as process:
        until(lambda: target.scratch in target.databases())
        process.terminate()
        assert process.wait(ENDED_S) == 128 + signal.SIGTERM
    assert target.is_untouched()


def test_a_backup_that_is_killed(filled: Access, archive: Path):
    """There is no archive of that name; the next backup clears away what is left."""
    unfinished = archive.with_name(archive.name + UNFINISHED)
    with started(filled, "backup", "--to", archive) as process:
        until(unfinished.exists)
        process.kill()
        assert process.wait(ENDED_S) == -signal.SIGKILL
    assert not archive.exists()

    # Its pg_dump may write on for a moment.
    def succeeds() -> bool:
        with started(filled, "backup", "--to", archive) as process:
            return process.wait(ENDED_S) == 0

    until(succeeds)
    require_whole(archive, read_manifest(archive))
    assert not unfinished.exists()


@pytest.mark.soak
def test_a_backup_that_is_terminated(filled: Access, archive: Path):
    """SIGTERM ends it with 143, and it leaves nothing."""
    unfinished = archive.with_name(archive.name + UNFINISHED)
    with started(filled, "backup", "--to", archive) as process:
        until(unfinished.exists)
        process.terminate()
        assert process.wait(ENDED_S) == 128 + signal.SIGTERM
    assert list(archive.parent.iterdir()) == []

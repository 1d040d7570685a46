"""A server that dies, freezes or cannot write comes back without a restart of the process that uses it."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from faults import WAIT_SECONDS, Load, Log, build_sync_shim, hasten, kill_postmaster, survives
from holders import own_folder, query

from postseal.errors import StartupError
from postseal.postgres.disk import Disk
from postseal.postgres.embedded import EmbeddedServer, start_or_join
from postseal.postgres.home import Home, server_lives
from postseal.postgres.postmaster import living_pid
from postseal.postgres.watchdog import Restarts, Watchdog, watching
from until import until

RESTARTING = "embedded_database_restarting"
BACK = "embedded_database_answers_again"


@pytest.fixture
def anyio_backend() -> str:
    """Psycopg needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """One folder for the homes of this module."""
    with own_folder() as folder:
        yield folder


@pytest.fixture
def home(place: Path) -> Iterator[Path]:
    """One home that these tests use one after another; none may leave its server running."""
    home = place / "home"
    yield home
    assert not server_lives(Home(home))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A log to look at, and a watchdog with little patience."""
    hasten(monkeypatch)
    return Log()


def watched(server: EmbeddedServer, log: Log) -> Watchdog:
    """A watchdog that looks only when it is told to."""
    home = Home(server.home)
    return Watchdog(home, Disk(home, min_free_bytes=0, ballast_bytes=0, log=log.logger), log.logger)


def look_until(dog: Watchdog, log: Log, event: str) -> None:
    """Let it look until it logged `event`."""
    give_up = time.monotonic() + WAIT_SECONDS
    while event not in log.events():
        assert time.monotonic() < give_up, log.events()
        dog.check()


@pytest.mark.anyio
async def test_killed_postmaster_under_load(home: Path, log: Log):
    """Kill -9, twice: `unavailable` meanwhile, then work again; nothing that was acknowledged is lost."""

    async def killed_twice(load: Load) -> None:
        for times in (1, 2):
            kill_postmaster(home)
            await log.wait_for(BACK, times)
            await load.more_acknowledged()

    await survives(home, log, killed_twice)
    assert [event for event in log.events() if event == RESTARTING] == [RESTARTING] * 2


@pytest.mark.anyio
async def test_frozen_server_under_load(home: Path, log: Log):
    """A postmaster that lives and answers nobody is ended by force, as it hears nothing else, and replaced."""

    async def frozen(load: Load) -> None:
        kill_postmaster(home, signal.SIGSTOP)
        await log.wait_for(BACK)

    await survives(home, log, frozen)


@pytest.mark.anyio
async def test_failing_fsync_under_load(place: Path, home: Path, log: Log, monkeypatch: pytest.MonkeyPatch):
    """PostgreSQL panics and stays in recovery for ever; once the disk works again, so does the service."""
    library, flag = build_sync_shim(place)
    monkeypatch.setenv("LD_PRELOAD", str(library))

    async def failing(load: Load) -> None:
        flag.touch()
        await load.more_unavailable()
        await log.wait_for("embedded_database_does_not_answer")
        await log.wait_for(RESTARTING, 2)  # it is tried in vain while the fault lasts
        flag.unlink()
        await log.wait_for(BACK)

    try:
        await survives(home, log, failing)
    finally:
        flag.unlink(missing_ok=True)
    assert "PANIC:  could not f" in Home(home).log_file.read_text()


@pytest.fixture
def stuck(place: Path, home: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    """A server whose recovery panicked, on a disk that works again."""
    library, flag = build_sync_shim(place)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    server = start_or_join(home, log=log.logger)
    end_of_log = Home(home).log_file.stat().st_size
    try:
        flag.touch()
        with pytest.raises(psycopg.OperationalError):
            query(server, "SELECT pg_logical_emit_message(true, 'test', 'x')")
        # The session's own, and the recovery's.
        until(lambda: Home(home).log_file.read_bytes()[end_of_log:].count(b"PANIC:") == 2)
        flag.unlink()
        yield server
    finally:
        flag.unlink(missing_ok=True)
        server.release()


def test_watch_that_begins_beside_a_stuck_server(home: Path, stuck: EmbeddedServer, log: Log):
    """Who takes the watch over learns from the log that the recovery is over."""
    dog = watched(stuck, log)
    try:
        look_until(dog, log, BACK)
    finally:
        dog.close()
        assert stuck.release() is True


def test_start_beside_a_stuck_server(home: Path, stuck: EmbeddedServer, log: Log):
    """A process that comes to a server whose recovery panicked replaces it, and need not wait for a recovery's time."""
    server = start_or_join(home, log=log.logger)
    try:
        assert query(server, "SELECT 1") == [(1,)]
        assert "embedded_database_is_stuck" in log.events()
    finally:
        assert [stuck.release(), server.release()] == [False, True]


def test_only_one_of_several_watches(home: Path, log: Log):
    """Of two watchdogs one acts; the other takes over when the first is gone."""
    server = start_or_join(home, log=log.logger)
    first, second = watched(server, log), watched(server, log)
    try:
        first.check()
        kill_postmaster(home)
        for _ in range(20):
            second.check()
        assert RESTARTING not in log.events()
        first.close()
        look_until(second, log, BACK)
        assert log.events().count(RESTARTING) == 1
    finally:
        second.close()
        assert server.release() is True


def test_recovery_at_work_is_left_alone(home: Path, log: Log):
    """A server that recovers from a crash of one session's is neither stopped nor replaced."""
    server = start_or_join(home, log=log.logger)
    dog = watched(server, log)
    try:
        dog.check()
        with psycopg.connect(server.dsn, autocommit=True) as client:
            pid = client.info.backend_pid
            before = living_pid(Home(home))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(psycopg.OperationalError):
                client.execute("SELECT 1")
        look_until(dog, log, BACK)
        assert living_pid(Home(home)) == before
        assert RESTARTING not in log.events()
    finally:
        dog.close()
        assert server.release() is True


def test_lost_data_are_not_replaced_by_an_empty_database(place: Path, log: Log):
    """Where the data folder is gone, as with a lost mount, the watchdog says so and starts nothing."""
    server = start_or_join(place / "lost", log=log.logger)
    home = Home(server.home)
    dog = watched(server, log)
    try:
        dog.check()
        kill_postmaster(home.root)
        home.data.rename(place / "taken")
        with pytest.raises(StartupError, match="is gone"):
            look_until(dog, log, RESTARTING)
        assert not home.data.exists()
    finally:
        dog.close()
        server.release()


def test_restarts_come_ever_more_slowly_and_are_bounded():
    """The pause doubles up to its bound; after ten restarts in ten minutes the first must be forgotten first."""
    restarts = Restarts()
    assert restarts.next_at() == 0.0
    times: list[float] = []
    for _ in range(12):
        times.append(restarts.next_at() or 1000.0)
        restarts.note(times[-1])
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[:9] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert times[10] == times[0] + 600
    assert times[11] == times[1] + 600
    restarts.note(times[-1] + 10_000)
    assert restarts.pause_seconds() == 1.0


def test_watch_ends_with_its_block(home: Path, log: Log):
    """After the block nobody brings the server back, so that its last holder can stop it for good."""
    server = start_or_join(home, log=log.logger)
    with ExitStack() as held:
        held.callback(server.release)
        disk = Disk(Home(home), min_free_bytes=0, ballast_bytes=0, log=log.logger)
        with watching(server, disk, log=log.logger):
            kill_postmaster(home)
            asyncio.run(log.wait_for(BACK))
        assert "embedded-database-watch" not in {thread.name for thread in threading.enumerate()}
    assert not server_lives(Home(home))

"""Several processes and several homes: one server a home, for as long as anybody holds it, and nobody else is hurt."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults import short_steps
from holders import WAIT_SECONDS, next_line, own_folder, process_on, query, start

from postseal.postgres import postmaster
from postseal.postgres.account import account_for
from postseal.postgres.home import Home, server_lives
from postseal.postgres.postmaster import living_pid, recorded_pid, stop_postmaster
from until import until


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


def test_processes_that_come_at_once(place: Path):
    """Three processes on a home that is not there yet: one makes it, all hold it, the last one stops it."""
    home = place / "at-once"
    with ExitStack() as started:
        processes = [started.enter_context(process_on(home)) for _ in range(3)]
        assert [next_line(process) for process in processes] == ["holding"] * 3
        log = Home(home).log_file.read_text()
        assert log.count("starting PostgreSQL") == 1
        released = [process.communicate(timeout=WAIT_SECONDS)[0].strip() for process in processes]
    assert released == ["False", "False", "True"]
    assert not server_lives(Home(home))


def test_starter_killed_before_the_server_answers(home: Path):
    """Kill -9 of the process that is just starting the server: the next one waits for that server and takes it over."""
    start(home).release()
    with process_on(home) as other:
        until(lambda: server_lives(Home(home)))
        other.kill()
        other.wait(WAIT_SECONDS)
    server = start(home)
    try:
        assert query(server, "SELECT current_database()") == [("postseal",)]
    finally:
        assert server.release() is True


def test_starter_killed_while_others_hold(home: Path):
    """The server outlives the process that started it as long as another holds it, and that one stops it."""
    with process_on(home) as starter:
        assert next_line(starter) == "holding"
        with process_on(home) as other:
            assert next_line(other) == "holding"
            pid = living_pid(Home(home))
            starter.kill()
            starter.wait(WAIT_SECONDS)
            third = start(home)
            assert query(third, "SELECT 1") == [(1,)]
            assert third.release() is False
            assert living_pid(Home(home)) == pid
            assert other.communicate(timeout=WAIT_SECONDS)[0].strip() == "True"


def test_two_homes_at_once(place: Path):
    """Two homes have two servers; what happens to one does not touch the other."""
    first, second = start(place / "first"), start(place / "second")
    try:
        query(first, "CREATE TABLE of_first ()")
        assert query(second, "SELECT to_regclass('of_first')") == [(None,)]
        assert first.release() is True
        assert query(second, "SELECT 1") == [(1,)]
    finally:
        first.release()
        assert second.release() is True


def test_frozen_postmaster_is_stopped(home: Path, monkeypatch: pytest.MonkeyPatch):
    """The last release ends a postmaster that reacts to nothing but a kill, and its children with it."""
    monkeypatch.setattr(postmaster, "STUCK_STEPS_SECONDS", short_steps())
    server = start(home)
    pid = living_pid(Home(home))
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert server.release() is True
    again = start(home)
    assert again.release() is True


def test_stranger_in_the_pid_file_is_not_stopped(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the recorded number is another program's, stopping signals nobody, and says that the server lives."""
    server = start(home)
    pid_file = Home(home).data / "postmaster.pid"
    right = pid_file.read_text()
    with account_for(Home(home).data).start(["sleep", "60"], output=subprocess.DEVNULL) as stranger:
        try:
            pid_file.write_text(f"{stranger.pid}\n{right.split(chr(10), 1)[1]}")
            assert recorded_pid(Home(home)) == stranger.pid
            assert living_pid(Home(home)) is None
            with monkeypatch.context() as hasty:
                hasty.setattr(postmaster, "STOP_STEPS_SECONDS", ((signal.SIGKILL, 0.3),))
                assert stop_postmaster(Home(home)) is False
            assert stranger.poll() is None
        finally:
            stranger.kill()
            pid_file.write_text(right)
            assert server.release() is True

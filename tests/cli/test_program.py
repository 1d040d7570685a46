"""The program as it is installed: its help, its processes, and its signals."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psycopg
import pytest
from ran import Cli
from test_commands import send

from fleet import enrol
from postseal.cli import NOUNS, VERBS
from postseal.postgres.access import Access
from postseal.postgres.home import Home

POSTSEAL = Path(sys.executable).with_name("postseal")
DEADLINE_S = 60


class Lines:
    """The lines of a stream as they come."""

    def __init__(self, stream: IO[str]) -> None:
        self._queue: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=[stream])
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._queue.put(line)

    def next(self) -> str:
        """The next line, waited for."""
        return self._queue.get(timeout=DEADLINE_S)

    def rest(self) -> list[str]:
        """What is left once the stream has ended."""
        self._reader.join(DEADLINE_S)
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Lines, Lines]]:
    """A running `postseal` with the lines of its stdout and stderr; killed at the end if it still runs."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [POSTSEAL, *arguments], env=os.environ | environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield process, Lines(process.stdout), Lines(process.stderr)
        finally:
            process.kill()


def ran(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A `postseal` that has ended."""
    return subprocess.run(
        [POSTSEAL, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_list_of_commands_imports_none_of_them() -> None:
    """--help answers without the database's libraries, and without rich."""
    script = """
import sys
from postseal.cli import main
sys.argv = ["postseal", "--help"]
try:
    main()
finally:
    heavy = {"psycopg", "structlog", "msgspec", "uvicorn", "rich", "asyncio"} & sys.modules.keys()
    print("imported:", *sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "imported:"


def test_help_names_every_command(cli: Cli) -> None:
    """The program's help lists nouns and verbs with what they are for; so do those of the nouns."""
    text = cli("--help").text
    for name, purpose in (VERBS | NOUNS).items():
        assert f"  {name} " in text
        assert purpose in text
    assert cli().code == 2


COMMANDS = {
    "serve": ["--host", "--port", "--processes"],
    "migrate": ["--plan"],
    "demo": ["--once"],
    "tenant create": ["TENANT"],
    "tenant list": [],
    "project create": ["TENANT", "PROJECT"],
    "project list": ["TENANT"],
    "device invite": ["TENANT", "DEVICE", "--project", "--account", "--add-key"],
    "device enroll": ["TENANT", "DEVICE", "--project", "--account", "--add-key", "--generate", "--key-out"],
    "device list": ["TENANT"],
    "device retire": ["TENANT", "DEVICE"],
    "credential create": ["TENANT", "--role", "--project", "--account"],
    "credential list": ["TENANT"],
    "credential revoke": ["TENANT", "ID"],
    "key list": ["TENANT", "--device"],
    "key retire": ["TENANT", "KEYID"],
    "key revoke": ["TENANT", "KEYID"],
    "stream list": ["TENANT", "--project"],
    "stream show": ["TENANT", "PROJECT", "PRODUCER"],
    "stream raise-floor": ["TENANT", "PROJECT", "PRODUCER", "SEQUENCE", "--reason", "--force"],
    "audit list": ["TENANT", "--project", "--outcome", "--reason", "--since", "--before", "--after", "--limit"],
    "inbox tail": ["TENANT", "PROJECT", "--producer", "--after", "--follow"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_what_a_command_takes(cli: Cli, command: str) -> None:
    """Its own arguments and options, and those that every command has."""
    words = cli(*command.split(), "--help").text.split()
    for word in [*COMMANDS[command], "--json", "--data-dir", "--database-url", "--config", "--help"]:
        assert word in words


def test_version(cli: Cli) -> None:
    """The version of the installed package."""
    assert cli("--version").text.count(".") == 2


def test_a_service_is_joined_and_ends_cleanly(run_folder: Path) -> None:
    """Serve names its folder first and tells its address; commands on the folder join it; SIGTERM ends it with 0."""
    home = run_folder / f"serve-{os.getpid()}"
    environment = {"POSTSEAL_DATA_DIR": str(home), "POSTSEAL_BALLAST_MB": "0"}
    with started("serve", "--port", "0", "--json", **environment) as (service, out, err):
        first = json.loads(err.next())
        assert (first["event"], first["data_folder"], first["embedded"]) == ("starting", str(home), True)
        address = json.loads(out.next())["url"]
        assert address.startswith("http://127.0.0.1:")

        assert ran("tenant", "create", "acme", "--json", **environment).stdout == '{"tenant":"acme"}\n'
        second = ran("serve", "--port", address.rpartition(":")[2], **environment)
        assert second.returncode == 1
        assert "Traceback" not in second.stderr
        assert "cannot listen on 127.0.0.1 port" in second.stderr.splitlines()[-1]

        service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 0
        assert out.rest() == []
        assert json.loads(err.rest()[-1])["event"] == "stopped"
    assert not answers(home)


def test_a_command_that_is_terminated_stops_its_database(run_folder: Path) -> None:
    """SIGTERM ends a command with 143; a database that it alone held does not outlive it."""
    home = run_folder / f"tail-{os.getpid()}"
    environment = {"POSTSEAL_DATA_DIR": str(home), "POSTSEAL_BALLAST_MB": "0"}
    assert ran("tenant", "create", "acme", **environment).returncode == 0
    assert ran("project", "create", "acme", "apollo", **environment).returncode == 0
    assert not answers(home)
    with started("inbox", "tail", "acme", "apollo", "--follow", **environment) as (tail, out, err):
        give_up = time.monotonic() + DEADLINE_S
        while not answers(home):
            assert time.monotonic() < give_up
            time.sleep(0.05)
        tail.send_signal(signal.SIGTERM)
        assert tail.wait(DEADLINE_S) == 143
        assert (out.rest(), err.rest()) == ([], [])
    assert not answers(home)


def answers(home: Path) -> bool:
    """Whether the database of a folder runs."""
    try:
        psycopg.connect(Home(home).dsn).close()
    except psycopg.OperationalError:
        return False
    return True


def test_the_inbox_is_followed_until_interrupted(access: Access) -> None:
    """What arrives is shown once, a line each; Ctrl-C ends it quietly with 130."""
    device = enrol(access, "d1")
    environment = {"POSTSEAL_DATABASE_URL": access.owner, "POSTSEAL_ROLES_FILE": str(access.passfile)}
    send(access, device, 1)
    with started("inbox", "tail", "acme", "apollo", "--follow", "--json", **environment) as (tail, out, err):
        assert json.loads(out.next())["sequence"] == 1
        send(access, device, 2, 3)
        send(access, enrol(access, "d2"), 1)
        lines = [json.loads(out.next()) for _ in range(3)]
        assert {(line["producer"], line["sequence"]) for line in lines} == {("d1", 2), ("d1", 3), ("d2", 1)}
        tail.send_signal(signal.SIGINT)
        assert tail.wait(DEADLINE_S) == 130
        assert (out.rest(), err.rest()) == ([], [])

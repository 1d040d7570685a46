"""The program as it is installed: its help, its processes, and its signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from ran import Cli
from running import DEADLINE_S, POSTSEAL, on, started
from test_commands import send

from fleet import enrol
from postseal.cli import NOUNS, VERBS
from postseal.postgres.access import Access
from postseal.postgres.home import Home


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


def test_only_the_command_itself_is_imported() -> None:
    """A word that is a command elsewhere may be a name."""
    script = """
import sys
from postseal.cli import program
program(["tenant", "create", "demo"])
print("postseal.cli.tenant" in sys.modules, "postseal.cli.demo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout == "True False\n"


def test_help_names_every_command(cli: Cli) -> None:
    """The program's help lists nouns and verbs with what they are for."""
    text = cli("--help").text
    for name, purpose in (VERBS | NOUNS).items():
        assert f"  {name} " in text
        assert purpose in text
    assert cli().code == 2


@pytest.mark.parametrize("noun", NOUNS)
def test_a_noun_tells_what_its_verbs_do(cli: Cli, noun: str) -> None:
    """In a line each, to its end."""
    lines = cli(noun, "--help").text.rstrip().partition("Commands:\n")[2].splitlines()
    assert lines
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


COMMANDS = {
    "serve": ["--host", "--port", "--processes", "--no-worker", "--no-sweep"],
    "sweep": ["--once", "--dry-run"],
    "retention show": ["TENANT"],
    "retention set": ["TENANT", "--project", "--days", "--default"],
    "hold place": ["TENANT", "HOLD", "--reason"],
    "hold release": ["TENANT", "HOLD", "--reason"],
    "hold list": ["TENANT"],
    "migrate": ["--plan", "--new-passwords"],
    "backup": ["--to", "--jobs"],
    "restore": ["--from", "--jobs"],
    "verify": ["--signatures"],
    "recover": ["--since", "--dry-run"],
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
    "destination create": ["TENANT", "PROJECT", "DESTINATION", "--mode", "--url", "--scheme", "--max-pending"],
    "destination change": ["TENANT", "PROJECT", "DESTINATION", "--url", "--max-pending"],
    "destination rotate-secret": ["TENANT", "PROJECT", "DESTINATION", "--scheme", "--overlap-hours"],
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
        assert (first["event"], first["data_folder"], first["embedded"]) == ("starting", str(home.resolve()), True)
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
    send(access, device, 1)
    with started("inbox", "tail", "acme", "apollo", "--follow", "--json", **on(access)) as (tail, out, err):
        assert json.loads(out.next())["sequence"] == 1
        send(access, device, 2, 3)
        send(access, enrol(access, "d2"), 1)
        lines = [json.loads(out.next()) for _ in range(3)]
        assert {(line["producer"], line["sequence"]) for line in lines} == {("d1", 2), ("d1", 3), ("d2", 1)}
        tail.send_signal(signal.SIGINT)
        assert tail.wait(DEADLINE_S) == 130
        assert (out.rest(), err.rest()) == ([], [])

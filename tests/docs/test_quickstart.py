"""The commands of README and quickstart run as they stand there."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tables

QUICKSTART = (tables.DOCS / "quickstart.md").read_text()
BLOCKS = dict(re.findall(r"<!-- run: ([a-z]+) -->\n```sh\n(.*?)```", QUICKSTART, re.DOTALL))
BIN = Path(sys.executable).parent
LISTENING = "postseal listens on "
STARTED_S = 60
DONE_S = 120

TYPED = (
    *("names", "address", "invite", "enrol", "send", "again", "reorder", "look"),
    *("port", "receiver", "push", "repeat", "pull", "settle"),
)

TRIED = [
    *(("1", "status_5xx"), ("2", "status_5xx"), ("3", "delivered")),
    *(("1", "connect_failed"), ("2", "connect_failed"), ("3", "delivered")),
]


def environment(home: Path) -> dict[str, str]:
    """What a user's shell has, with a home of this test's, and a free port."""
    return {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(home),
        "POSTSEAL_DATA_DIR": str(home / "database"),
        "POSTSEAL_PORT": "0",
    }


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that the database's account can enter, which it cannot in pytest's own as root."""
    folder = Path(tempfile.mkdtemp(prefix="postseal-docs-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def address(home: Path) -> Iterator[str]:
    """The address of a service that was started as the quickstart says."""
    *settings, program, verb = BLOCKS["serve"].split()
    assert program == ".venv/bin/postseal"
    command = [BIN / "postseal", verb]
    chosen = environment(home) | dict(setting.split("=") for setting in settings)
    with (
        (home / "log").open("w+") as log,
        subprocess.Popen(command, env=chosen, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith(LISTENING), (home / "log").read_text()
            yield line.removeprefix(LISTENING).strip()
        finally:
            server.terminate()
            server.wait(timeout=STARTED_S)


def documents(text: str) -> list[dict[str, Any]]:
    """The JSON objects of the lines that are one."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture
def said(home: Path, address: str) -> dict[str, str]:
    """What each block said, typed as it stands. The receiver, which one of them leaves in the background, ends too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    blocks = BLOCKS | {"address": f"export POSTSEAL_URL={address}\n", "port": f"export ECHO_PORT={port}\n"}
    script = "set -e\ntrap 'kill ${ECHO_PROCESS:-} 2> /dev/null || true' EXIT\n"
    script += "".join(f"{blocks[name]}\necho '== {name}'\n" for name in TYPED)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["sh", "-c", script],
        cwd=tables.ROOT,
        env=environment(home),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            out, err = shell.communicate(timeout=DONE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, out + err
    return dict(zip(TYPED, re.split(r"^== [a-z]+$", out, flags=re.MULTILINE), strict=False))


@pytest.mark.timeout(STARTED_S + DONE_S)
def test_quickstart(home: Path, said: dict[str, str]):
    """It ends with four acknowledgements, a stream at 3, the audit and the inbox; mail is pushed, and pulled."""
    [enrolled] = documents(said["enrol"])
    assert (enrolled["tenant"], enrolled["device"], enrolled["projects"]) == ("acme", "device-01", ["apollo"])
    answers = [answer for name in ("send", "again", "reorder") for answer in documents(said[name])]
    assert [answer["outcome"] for answer in answers] == ["accepted", "duplicate", "gap", "reordered"]
    assert answers[-1]["contiguousThrough"] == 3
    assert re.search(r"^contiguousThrough +3$", said["look"], re.MULTILINE)
    assert len(re.findall(r"^device-01 .* heartbeat$", said["look"], re.MULTILINE)) == 3
    for word in ("tenant.create", "device.enrol", "accepted", "duplicate", "gap", "reordered"):
        assert word in said["look"]
    assert str(enrolled["credential"]) not in (home / "log").read_text() + said["look"]
    assert "destination ledger took the test" in said["receiver"]
    assert re.search(
        r"^204 .* acme/apollo/ledger  1  proposal-decision  both signatures hold$", said["push"], re.MULTILINE
    )
    assert [re.findall(r"^new +(\w+)$", said[name], re.MULTILINE) for name in ("push", "repeat")] == [["yes"], ["no"]]
    [claimed] = documents(said["pull"])
    [settled] = documents(said["settle"])
    assert [item["project"] for item in claimed["items"]] == ["apollo"]
    assert settled == {"items": [{"project": "apollo", "sequence": 1, "fenced": False}]}
    assert re.search(r"^device-01 +pull +enabled +0 ", said["settle"], re.MULTILINE)


@pytest.mark.soak
@pytest.mark.timeout(STARTED_S + DONE_S)
def test_demo(home: Path):
    """`make demo ARGS=--once` of the README: what that target runs shows both ways, and ends with exit code 0."""
    assert "\n\t@$(BIN)/postseal demo $(ARGS)\n" in (tables.ROOT / "Makefile").read_text()
    done = subprocess.run(
        [BIN / "postseal", "demo", "--once"],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=DONE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"-> (.*?)  +contiguous ", done.stdout) == ["accepted", "duplicate", "gap", "reordered"]
    assert len(re.findall(r"(?:both signatures|envelope signature) verified +-> delivered\n", done.stdout)) == 4
    assert re.findall(r"attempt (\d) .*-> (\w+)", done.stdout) == TRIED


def test_every_block_of_the_quickstart_is_run():
    """No block stands there that the test above leaves out, but the one that makes the environment."""
    assert set(BLOCKS) == {"install", "serve", *TYPED}
    assert QUICKSTART.count("```sh") == len(BLOCKS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/quickstart.md"])
def test_make_targets_exist(page: str):
    """Each `make` command of a page has its target."""
    makefile = (tables.ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", (tables.ROOT / page).read_text(), re.MULTILINE)) <= targets

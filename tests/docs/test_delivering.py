"""docs/delivering.md: its walk is typed as it stands there, and prints what stands there."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import tables
from programs import ENDED_S, of_deployment, serving

from postseal.postgres.access import Access
from postseal.rules.delivery import Code, SealCode

PAGE = (tables.DOCS / "delivering.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"<!-- (run|beside) -->\n```console\n(.*?)```", PAGE, re.DOTALL)
END = "== end"
# What is another one each time: ids, keys, and secrets. Those of the page stand for those of the run.
NAMES = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{64}|whpk_[A-Za-z0-9+/=]+|(?<![\w-])[\w-]{43}(?![\w-])"
)
TIMES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ|\b\d+\.\d{2,3}\b")
FOLDER = re.compile(r"\S*(?=/signing/)")


class Typed:
    """A shell in which one command after another is typed."""

    def __init__(self, shell: subprocess.Popen[str], ports: dict[str, str]) -> None:
        assert shell.stdin is not None
        assert shell.stdout is not None
        self._in: IO[str] = shell.stdin
        self._out: IO[str] = shell.stdout
        self._ours = ports

    def run(self, command: str, expected: str) -> tuple[str, str]:
        """What the page says that a command prints, and what it prints; both without what is another one each time."""
        self._type(f"{{ {self._as_here(command)}\n}} </dev/null; echo '{END}'")
        printed = "".join(iter(self._out.readline, f"{END}\n"))
        self._ours |= dict(zip(NAMES.findall(expected), NAMES.findall(printed), strict=False))
        return plain(self._as_here(expected)), plain(printed)

    def begin(self, command: str, expected: str, log: Path) -> None:
        """Let a command run beside the others, once it has printed what the page says."""
        self._type(f"{self._as_here(command)} >{log} 2>&1 </dev/null &")
        give_up_s = time.monotonic() + ENDED_S
        while not log.exists() or self._as_here(expected) not in log.read_text():
            assert time.monotonic() < give_up_s
            time.sleep(0.02)

    def _type(self, line: str) -> None:
        self._in.write(f"{line}\n")
        self._in.flush()

    def _as_here(self, text: str) -> str:
        for theirs, ours in self._ours.items():
            text = text.replace(theirs, ours)
        return text


def plain(text: str) -> str:
    """Without times and the folder of the keys, and with columns of any width."""
    return re.sub(r"[ \t]+", " ", FOLDER.sub("", TIMES.sub("TIME", text))).strip()


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, with what it prints."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def free_port() -> str:
    """One that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.fixture
def typed(access: Access, tmp_path: Path) -> Iterator[Typed]:
    """A shell beside a service that leaves delivering to others."""
    deployment = of_deployment(access, tmp_path)
    with serving(deployment, tmp_path) as url:
        shell = subprocess.Popen(
            ["sh"],
            env=deployment | {"HOME": str(tmp_path)},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        try:
            yield Typed(shell, {"http://127.0.0.1:8080": url, "9000": free_port()})
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            shell.communicate(timeout=ENDED_S)


@pytest.mark.timeout(240)
def test_the_walk(typed: Typed, tmp_path: Path):
    """Each command prints what stands below it, but for ids, times and the widths of columns."""
    printed: list[tuple[str, str]] = []
    for kind, block in BLOCKS:
        for command, expected in commands(block):
            if kind == "beside":
                typed.begin(command, expected, tmp_path / "beside.log")
            else:
                printed.append(typed.run(command, expected))
    assert [ours for _, ours in printed] == [theirs for theirs, _ in printed]
    assert "both signatures hold" in (tmp_path / "beside.log").read_text()


def test_every_code_is_told():
    """The tables of the page name each code, and no other."""
    told = "".join(
        line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `") and line[2:8] != "`code`"
    )
    codes = set(re.findall(r"`([a-z0-9_]+)`", told)) - set(re.findall(r"`(postseal_[a-z_]+)", told))
    assert codes == {*Code, *SealCode}


def test_every_block_is_run():
    """No command with its output stands there that the walk leaves out."""
    assert PAGE.count("```console") == len(BLOCKS)

"""A shell in which the console blocks of a page are typed, and what they print beside what stands there."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from programs import ENDED_S

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


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The marked blocks of a page: whether it is run, or runs beside the others, and its lines."""
    return re.findall(r"<!-- (run|beside) -->\n```console\n(.*?)```", page, re.DOTALL)


def free_port() -> str:
    """One that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@contextmanager
def shell(ours: dict[str, str], environment: Mapping[str, str], folder: Path) -> Iterator[Typed]:
    """One in `folder`, ended at the end with all that was begun in it; `ours` is what stands for words of the page."""
    process = subprocess.Popen(
        ["sh"],
        env=environment | {"HOME": str(folder)},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        yield Typed(process, ours)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=ENDED_S)

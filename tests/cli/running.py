"""A `postseal` that runs: its lines, its signals, its children."""

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from family import stat_of
from postseal.postgres.access import Access

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

    def until(self, text: str) -> str:
        """The next line that contains `text`, waited for."""
        while text not in (line := self.next()):
            pass
        return line

    def rest(self) -> list[str]:
        """What is left once the stream has ended."""
        self._reader.join(DEADLINE_S)
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Lines, Lines]]:
    """A running `postseal`, in a process group of its own, with the lines of its stdout and stderr.

    It is killed at the end if it still runs.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [POSTSEAL, *arguments], env=os.environ | environment, stdout=pipe, stderr=pipe, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield process, Lines(process.stdout), Lines(process.stderr)
        finally:
            process.kill()


def on(access: Access) -> dict[str, str]:
    """The environment of a service on a test's database."""
    return {"POSTSEAL_DATABASE_URL": access.owner, "POSTSEAL_ROLES_FILE": str(access.passfile)}


def is_open(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the children that live."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if lives(int(pid))]


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    fields = stat_of(pid)
    return bool(fields) and fields[0] not in "ZX"

"""Several processes behind one port: a parent that serves nothing, and children that do.

1. each child gets a channel, and its settings over a pipe that its parent keeps open
2. once all of them answer, the parent accepts connections and deals them in turn (`dealing.py`)
3. a child that ends by itself is left out of the deal, and started again; while none lives, connections wait in the
   backlog of the port
4. the first SIGTERM or SIGINT closes the port, the channels and the pipes; a child whose pipe ends answers what was
   dealt to it and is in flight, and ends. So it ends too when its parent was killed, and it makes no difference whether
   a signal reached it as well
5. the second one kills the children

The children write their metrics into one folder, each under its own number, so that a scrape of one shows all.
"""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from structlog.typing import FilteringBoundLogger

from postseal.ending import ENDED_AT_ONCE, answering
from postseal.errors import StartupError
from postseal.metrics import FOLDER_VARIABLE, mark_dead
from postseal.settings import Settings
from postseal.web.dealing import Dealer

RESTART_DELAY_S = 1.0
"""A child that cannot live is not started more often than this."""
FOLDER_PREFIX = "postseal-metrics-"
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - a fresh folder is made in it, as in any other for temporary files
"""Preferred for the metrics: a file on a disk can make its writer wait, and end it where the disk is full."""


def _remove_left_behind(parent: Path) -> None:
    """Remove the metrics folders of parents that were killed: their number stands in the name."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*-*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if number.isdecimal() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    number: int
    process: Process
    channel: socket.socket

    async def answers(self) -> bool:
        """Wait until it says that it serves; False if it ended before that."""
        assert self.process.stdout is not None  # noqa: S101 - it was asked for
        return bool(await self.process.stdout.readline())

    def tell(self, settings: bytes) -> None:
        # A child that has died already is noticed when it is waited for; asyncio swallows the broken pipe.
        self._pipe().write(settings)

    def let_end(self) -> None:
        self.channel.close()
        self._pipe().close()

    def _pipe(self) -> asyncio.StreamWriter:
        assert self.process.stdin is not None  # noqa: S101 - it was asked for
        return self.process.stdin


class Family:
    """The children of one `serve`: `count` of them behind `listener`."""

    def __init__(self, settings: Settings, listener: socket.socket, count: int, log: FilteringBoundLogger) -> None:
        self._settings = msgspec.json.encode(settings) + b"\n"
        self._count = count
        self._dealer = Dealer(listener, log)
        self._log = log
        self._living: set[_Child] = set()
        self._stopping = asyncio.Event()
        self._killed = False
        self._metrics = ""

    def run(self, ready: Callable[[], None]) -> None:
        """Keep `count` children until SIGTERM or SIGINT, and until all have ended after it.

        `ready` is called once every child answers. Raises StartupError if a first child cannot start, and
        SystemExit(ENDED_AT_ONCE) if a second signal killed the children.
        """
        in_memory = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
        _remove_left_behind(Path(in_memory or tempfile.gettempdir()))
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=in_memory) as self._metrics:
            asyncio.run(self._run(ready))
        if self._killed:
            sys.exit(ENDED_AT_ONCE)

    async def _run(self, ready: Callable[[], None]) -> None:
        with answering(self._on_signal):
            try:
                await self._raise_children(ready)
            finally:
                self._stop()
                await asyncio.gather(*(child.process.wait() for child in self._living))

    async def _raise_children(self, ready: Callable[[], None]) -> None:
        """Start all, and keep them until they have ended."""
        children = await asyncio.gather(*map(self._start, range(self._count)))
        if all([await child.answers() for child in children]):
            for child in children:
                self._dealer.deal_to(child.channel)
            ready()
        elif not self._stopping.is_set():
            raise StartupError("a process of the service could not start: see the lines before")
        await asyncio.gather(*map(self._keep, children))

    async def _start(self, number: int) -> _Child:
        channel, end = socket.socketpair()
        channel.settimeout(0)
        with end:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "postseal.web.process", str(number), str(end.fileno())),
                pass_fds=[end.fileno()],
                env={**os.environ, FOLDER_VARIABLE: self._metrics},
                stdin=PIPE,
                stdout=PIPE,
                # A Ctrl-C of the terminal reaches the parent alone: it would break a child that is just starting.
                start_new_session=True,
            )
        child = _Child(number, process, channel)
        self._living.add(child)
        child.tell(self._settings)
        if self._stopping.is_set():
            child.let_end()
        return child

    async def _keep(self, child: _Child) -> None:
        """Keep a child under a number until the family stops, and until the last one has ended."""
        while True:
            status = await child.process.wait()
            self._living.remove(child)
            self._dealer.leave_out(child.channel)
            child.let_end()
            if self._stopping.is_set():
                return
            self._log.error("a process of the service ended and is started again", status=status)
            mark_dead(child.number, self._metrics)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RESTART_DELAY_S)
                return
            child = await self._start(child.number)
            if await child.answers():
                self._dealer.deal_to(child.channel)

    def _on_signal(self, _number: int) -> None:
        if self._stopping.is_set():
            self._killed = True
            for child in self._living:
                with suppress(ProcessLookupError):  # it has ended in this moment
                    child.process.kill()
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        # Nobody shall connect to a port that nobody serves any more.
        self._dealer.close()
        for child in self._living:
            child.let_end()

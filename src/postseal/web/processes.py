"""Several processes behind one port: a parent that serves nothing, and children that do.

1. the parent binds one socket a child, all to the same address, and the kernel spreads connections over them
2. each child gets its socket, and its settings over a pipe that its parent keeps open
3. a child that ends by itself is started again on its socket, where connections have waited meanwhile
4. the first SIGTERM or SIGINT closes the port and the pipes; a child whose pipe ends answers what is in flight and
   ends. So it ends too when its parent was killed, and it makes no difference whether a signal reached it as well
5. the second one kills the children

The children write their metrics into one folder, each under its socket's number, so that a scrape of one shows all.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
from structlog.typing import FilteringBoundLogger

from postseal.errors import StartupError
from postseal.metrics import FOLDER_VARIABLE, mark_dead
from postseal.settings import Settings
from postseal.web.process import ENDED_AT_ONCE
from postseal.web.server import BACKLOG, bind, cannot_listen

RESTART_DELAY_S = 1.0
"""A child that cannot live is not started more often than this."""
FOLDER_PREFIX = "postseal-metrics-"
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - a fresh folder is made in it, as in any other for temporary files
"""Preferred for the metrics: a file on a disk can make its writer wait, and end it where the disk is full."""


def bind_each(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets that listen on one address; StartupError if somebody listens there already."""
    # Asked for alone first: a socket that shares its port would join a stranger's without a word.
    with bind(host, port) as alone:
        address, family = alone.getsockname(), alone.family
    with ExitStack() as unless_all:
        listeners = [unless_all.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
        try:
            for listener in listeners:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
        except OSError as error:
            raise cannot_listen(host, port, error) from None
        unless_all.pop_all()
    return listeners


def _remove_left_behind(parent: Path) -> None:
    """Remove the metrics folders of parents that were killed: their number stands in the name."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*-*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if number.isdecimal() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


class Family:
    """The children of one `serve`."""

    def __init__(self, settings: Settings, listeners: list[socket.socket], log: FilteringBoundLogger) -> None:
        self._settings = msgspec.json.encode(settings) + b"\n"
        self._listeners = listeners
        self._log = log
        self._living: set[Process] = set()
        self._stopping = asyncio.Event()
        self._killed = False
        self._metrics = ""

    def run(self, ready: Callable[[str], None]) -> None:
        """Keep one child on each socket until SIGTERM or SIGINT, and until all have ended after it.

        `ready` is told the address once every child answers. Raises StartupError if a first child cannot start, and
        SystemExit(ENDED_AT_ONCE) if a second signal killed the children.
        """
        in_memory = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
        _remove_left_behind(Path(in_memory or tempfile.gettempdir()))
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=in_memory) as self._metrics:
            asyncio.run(self._run(ready))
        if self._killed:
            sys.exit(ENDED_AT_ONCE)

    async def _run(self, ready: Callable[[str], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            children = await asyncio.gather(*map(self._start, self._listeners))
            addresses = [await _address(child) for child in children]
            if all(addresses):
                ready(addresses[0])
            elif not self._stopping.is_set():
                raise StartupError("a process of the service could not start: see the lines before")
            await asyncio.gather(*map(self._keep, self._listeners, children))
        finally:
            self._stop()
            await asyncio.gather(*(child.wait() for child in self._living))

    async def _start(self, listener: socket.socket) -> Process:
        number = listener.fileno()
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "postseal.web.process", str(number)),
            pass_fds=[number],
            env={**os.environ, FOLDER_VARIABLE: self._metrics},
            stdin=PIPE,
            stdout=PIPE,
            # A Ctrl-C of the terminal reaches the parent alone: it would break a child that is just starting.
            start_new_session=True,
        )
        self._living.add(child)
        # A child that has died already is noticed when it is waited for; asyncio swallows the broken pipe.
        _pipe_to(child).write(self._settings)
        if self._stopping.is_set():
            _pipe_to(child).close()
        return child

    async def _keep(self, listener: socket.socket, child: Process) -> None:
        """Keep a child on `listener` until the family stops, and until the last one has ended."""
        number = listener.fileno()
        while True:
            status = await child.wait()
            self._living.remove(child)
            _pipe_to(child).close()
            if self._stopping.is_set():
                return
            self._log.error("a process of the service ended and is started again", status=status)
            mark_dead(number, self._metrics)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RESTART_DELAY_S)
                return
            child = await self._start(listener)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._killed = True
            for child in self._living:
                with suppress(ProcessLookupError):  # it has ended in this moment
                    child.kill()
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        for listener in self._listeners:
            # Nobody shall connect to a port that nobody serves any more.
            listener.close()
        for child in self._living:
            _pipe_to(child).close()


def _pipe_to(child: Process) -> asyncio.StreamWriter:
    assert child.stdin is not None  # noqa: S101 - it was asked for
    return child.stdin


async def _address(child: Process) -> str:
    """What a child says when it answers requests; empty if it ended before that."""
    assert child.stdout is not None  # noqa: S101 - it was asked for
    return (await child.stdout.readline()).decode().strip()

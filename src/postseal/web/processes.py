"""Several processes behind one port: a parent that serves nothing, and children that do.

The parent binds one socket a child, all to the same address, and the kernel spreads connections over them. A child
that ends by itself is started again on its socket, where connections have waited meanwhile. The first signal to stop
is passed on and lets the children finish; the second ends them at once. A child reads from its parent: where that ends
the parent is gone, and the child finishes by itself.

The children write their metrics into one folder, each under its socket's number, so that a scrape of one shows all.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType

import msgspec
from structlog.typing import FilteringBoundLogger

from postseal.errors import StartupError
from postseal.metrics import FOLDER_VARIABLE, mark_dead
from postseal.settings import Settings
from postseal.web.server import BACKLOG, bind, cannot_listen

RESTART_DELAY_S = 1.0
"""A child that cannot live is not started more often than this."""
LOOK_EVERY_S = 0.1
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - a fresh folder is made in it, as in any other for temporary files
"""Preferred for the metrics: a file on a disk can make its writer wait, and end it where the disk is full."""


def bind_each(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets that listen on one address; StartupError if somebody listens there already."""
    # Asked for alone first: a socket that shares its port would join a stranger's without a word.
    with bind(host, port) as alone:
        address, family = alone.getsockname(), alone.family
    listeners = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    return listeners


class Family:
    """The children of one `serve`."""

    def __init__(self, settings: Settings, listeners: list[socket.socket], log: FilteringBoundLogger) -> None:
        self._settings = msgspec.json.encode(settings) + b"\n"
        self._listeners = listeners
        self._log = log
        self._children: dict[socket.socket, subprocess.Popen[bytes]] = {}
        self._signals = 0
        self._metrics = ""

    def run(self, ready: Callable[[str], None]) -> None:
        """Keep one child on each socket until SIGTERM or SIGINT, and until all have ended after it.

        `ready` is told the address once every child answers. Raises StartupError if a first child cannot start.
        """
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        in_memory = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="postseal-metrics-", dir=in_memory) as self._metrics:
            try:
                self._run(ready)
            finally:
                self._end()
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def _run(self, ready: Callable[[str], None]) -> None:
        for listener in self._listeners:
            self._children[listener] = self._start(listener)
        addresses = [self._address(child) for child in self._children.values()]
        if all(addresses):
            ready(addresses[0])
        elif not self._signals:
            raise StartupError("a process of the service could not start: see the lines before")
        while not self._signals:
            time.sleep(LOOK_EVERY_S)
            self._restart_ended()

    def _start(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", "postseal.web.process", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env={**os.environ, FOLDER_VARIABLE: self._metrics},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A Ctrl-C of the terminal reaches the parent alone, which passes it on once.
            start_new_session=True,
        )
        assert child.stdin is not None  # noqa: S101 - it was asked for
        child.stdin.write(self._settings)
        child.stdin.flush()
        return child

    def _address(self, child: subprocess.Popen[bytes]) -> str:
        """What a child says when it answers requests; empty if it ended before that."""
        assert child.stdout is not None  # noqa: S101 - it was asked for
        return child.stdout.readline().decode().strip()

    def _restart_ended(self) -> None:
        for listener, child in self._children.items():
            status = child.poll()
            if status is not None and not self._signals:
                self._log.error("a process of the service ended and is started again", status=status)
                mark_dead(listener.fileno(), self._metrics)
                time.sleep(RESTART_DELAY_S)
                self._children[listener] = self._start(listener)

    def _end(self) -> None:
        if not self._signals:
            self._tell(signal.SIGTERM)
        for child in self._children.values():
            child.wait()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        self._tell(signal.SIGTERM if self._signals == 1 else signal.SIGKILL)

    def _tell(self, number: int) -> None:
        for child in self._children.values():
            child.send_signal(number)

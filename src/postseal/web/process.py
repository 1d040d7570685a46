"""One process that serves: its event loop, its signals, the service in it.

`run` is called by `postseal serve` itself, or by a child of it (`python -m postseal.web.process LISTENER`), which
reads its settings from standard input and stops when that ends, since then its parent is gone.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec
import structlog
import uvloop

from postseal import logs, metrics
from postseal.postgres.access import Access, open_access
from postseal.service import running_service
from postseal.settings import Settings
from postseal.web import server

ENDED_AT_ONCE = 128 + signal.SIGTERM


def run(
    settings: Settings,
    access: Access,
    listener: socket.socket,
    *,
    ready: Callable[[str], None] = lambda _address: None,
    parent: BinaryIO | None = None,
) -> None:
    """Serve on `listener` until SIGTERM or SIGINT, or until `parent` reads as ended.

    The first signal answers what is in flight and commits what is queued; the second ends the process at once.
    """
    uvloop.run(_serve(settings, access, listener, ready, parent))


async def _serve(
    settings: Settings,
    access: Access,
    listener: socket.socket,
    ready: Callable[[str], None],
    parent: BinaryIO | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(ENDED_AT_ONCE)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if parent is not None:
        loop.add_reader(parent.fileno(), stop.set)
    async with running_service(settings, access) as service:
        await server.serve(service, listener, stop=stop, ready=ready)


def main() -> None:
    """A child: settings come first on standard input, which its parent then keeps open."""
    number = int(sys.argv[1])
    metrics.share_as(number)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    logs.configure(settings.log_level)
    with (
        socket.socket(fileno=number) as listener,
        open_access(settings, log=structlog.get_logger()) as access,
    ):
        run(settings, access, listener, ready=_announce_to_parent, parent=sys.stdin.buffer)


def _announce_to_parent(address: str) -> None:
    print(address, flush=True)


if __name__ == "__main__":
    main()

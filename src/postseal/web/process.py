"""One process that serves: its event loop, its signals, the service in it.

`run` is called by `postseal serve` itself, or by a child of it (`python -m postseal.web.process NUMBER CHANNEL`), which
reads its settings from standard input, takes its connections from the channel, and stops when standard input ends: its
parent stops, or is gone.
"""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import BinaryIO

import msgspec
import structlog
import uvloop

from postseal import logs, metrics
from postseal.ending import Ending, ending_asked_by_signals, signals_held
from postseal.errors import StartupError
from postseal.open_files import allow_open_files
from postseal.postgres.access import Access, open_access
from postseal.retention import running_sweep
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.web import server
from postseal.web.dealing import Channel
from postseal.worker_service import running_worker

END_S = 30.0
"""How long an end may take, whatever hangs: longer than what is in flight (server.GRACE_S) and an exchange with a
database that does not answer take together. Nothing that was acknowledged needs what is cut."""
YOUNG_OBJECTS = 50_000
"""How many more objects than before there are when the collector of reference cycles looks at the young ones. Python's
own 700 are there after a request or two, and an envelope leaves no cycle behind."""


def run(
    settings: Settings,
    access: Access,
    source: server.Source,
    *,
    ready: Callable[[], None] = lambda: None,
    parent: BinaryIO | None = None,
) -> None:
    """Serve what comes from `source`, deliver and sweep, until SIGTERM or SIGINT, or until `parent` reads as ended.

    Then what is in flight is answered and what is queued is committed. Without a parent, which does that itself, a
    second signal ends the process at once; `end_s` after the first one, it is ended in any case.
    """
    allow_open_files(server.files(settings))
    uvloop.run(_serve(settings, access, source, ready, parent))


def end_s(settings: Settings) -> float:
    """How many seconds an end may take in all: END_S, and the grace of a worker's pushes."""
    return END_S + (settings.stop_grace_s if settings.worker else 0.0)


async def _serve(
    settings: Settings,
    access: Access,
    source: server.Source,
    ready: Callable[[], None],
    parent: BinaryIO | None,
) -> None:
    with ending_asked_by_signals(end_s(settings), insist=parent is None) as ending:
        if parent is not None:
            _end_with(parent.fileno(), ending)
        async with _running(settings, access) as service:
            gc.freeze()  # what lives from here to the end need not be looked at again
            gc.set_threshold(YOUNG_OBJECTS)
            await server.serve(service, source, stop=ending.asked, ready=ready)


def _end_with(pipe: int, ending: Ending) -> None:
    loop = asyncio.get_running_loop()

    def parent_ended() -> None:
        loop.remove_reader(pipe)  # it would be called again and again
        ending.ask()

    loop.add_reader(pipe, parent_ended)


@asynccontextmanager
async def _running(settings: Settings, access: Access) -> AsyncGenerator[Service]:
    """The service and, where the settings want them, a sweep, and a worker, which hears of what is sealed here."""
    async with AsyncExitStack() as held:
        sweeper = await held.enter_async_context(running_sweep(settings, access)) if settings.sweep else None
        delivery = await held.enter_async_context(running_worker(settings, access)) if settings.worker else None
        sealed = delivery.worker.wake if delivery else _nobody
        service = await held.enter_async_context(running_service(settings, access, sealed=sealed))
        if sweeper:
            service.sampler.watch_sweep(sweeper)
        if delivery:
            service.sampler.watch(delivery.worker, delivery.database)
        yield service


def _nobody() -> None:
    """Wake nobody."""


def main() -> None:
    """A child: settings come first on standard input, which its parent then keeps open.

    Roles, schema and durability are not checked again: the parent has done so, and a child that takes another's place
    while the database is away shall answer `unavailable` rather than end.
    """
    number, channel = map(int, sys.argv[1:])
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the parent was gone before it could say anything
    metrics.share_as(number)
    settings = msgspec.json.decode(line, type=Settings)
    logs.configure(settings.log_level)
    log = structlog.get_logger()
    try:
        with signals_held(), socket.socket(fileno=channel) as end, open_access(settings, log=log) as access:
            end.set_inheritable(False)
            run(settings, access, Channel(end), ready=_announce_to_parent, parent=sys.stdin.buffer)
    except StartupError as error:
        sys.exit(f"postseal: {error}")


def _announce_to_parent() -> None:
    with suppress(BrokenPipeError):  # it is gone, which standard input tells too
        os.write(sys.stdout.fileno(), b"ready\n")


if __name__ == "__main__":
    main()

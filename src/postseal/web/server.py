"""Listening: a source of connections, uvicorn's protocol behind it, and an end that answers what is in flight.

The source is a listener, bound apart from everything else so that a taken port is told first; or the channel over which
a parent deals what it accepts. Whoever runs this listens for signals, chooses the event loop (uvloop) and enters the
service.
"""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate

from uvicorn.config import Config
from uvicorn.server import ServerState

from postseal.errors import StartupError
from postseal.service import Service
from postseal.settings import Settings
from postseal.web.app import App
from postseal.web.connection import IDLE_S, BoundedHttp, Bounds
from postseal.web.dealing import Channel
from postseal.worker_service import worker_files

Source = socket.socket | Channel
"""Where connections come from. It is closed when serving ends."""
BACKLOG = 1024
MAX_CONNECTIONS = 4000
SPARE_DESCRIPTORS = 128
"""What is left of the limit on open files for the database, logs and accepting."""
GRACE_S = 10.0
"""How long the requests in flight may take once the end has come."""
CUT_S = 1.0
"""How long those that were cut off then may take to notice."""
LOOK_EVERY_S = 0.02


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. StartupError if it cannot be had, or somebody listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        # Python's own text repeats the address; a name that cannot be resolved has no number of the system's.
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise StartupError(f"cannot listen on {host} port {port}: {why}") from None


def files(settings: Settings) -> int:
    """How many files a process that serves may have open, its worker's among them."""
    return MAX_CONNECTIONS + SPARE_DESCRIPTORS + _worker_files(settings)


def address_of(listener: socket.socket) -> str:
    """The URL at which a socket of ours is reached."""
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    service: Service,
    source: Source,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until `stop` is set, or this is cancelled; `ready` is called once requests are answered."""
    async with listening(service, source):
        ready()
        await stop.wait()


@asynccontextmanager
async def listening(service: Service, source: Source) -> AsyncGenerator[None]:
    """Answer requests that come from `source`; at the end, take no more and answer what is in flight."""
    app = App(service)
    config = Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
    )
    config.load()
    state = ServerState()
    bounds = Bounds(service.settings.receive_deadline_s, _max_connections(service.settings))
    dating = asyncio.create_task(_keep_date(state))
    try:
        async with _taking(source, lambda: BoundedHttp(config, state, {}, bounds, app.refusals)):
            yield
    finally:
        service.waiting.end()
        service.pulling.end()
        await _finish(state)
        dating.cancel()


@asynccontextmanager
async def _taking(source: Source, make_protocol: Callable[[], asyncio.Protocol]) -> AsyncGenerator[None]:
    """Make a protocol for each connection that comes; at the end, for those that were dealt to us already."""
    if isinstance(source, Channel):
        source.open(make_protocol)
        try:
            yield
        finally:
            await source.close()
    else:
        server = await asyncio.get_running_loop().create_server(make_protocol, sock=source)
        try:
            yield
        finally:
            server.close()


async def _finish(state: ServerState) -> None:
    """Let requests in flight be answered, and cut off what is left after the grace."""
    for connection in list(state.connections):
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn keeps two sets and no event
                await asyncio.sleep(LOOK_EVERY_S)
    for connection in list(state.connections):
        connection.transport.abort()
    if state.tasks:
        # Whoever reads a request is told that it is gone, and ends by itself.
        await asyncio.wait(state.tasks, timeout=CUT_S)
    for task in list(state.tasks):
        task.cancel()
    if state.tasks:
        await asyncio.wait(state.tasks)


async def _keep_date(state: ServerState) -> None:
    """RFC 9110 wants a Date from whoever has a clock."""
    while True:
        state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        await asyncio.sleep(1)


def _max_connections(settings: Settings) -> int:
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    share = MAX_CONNECTIONS / (MAX_CONNECTIONS + _worker_files(settings))
    return max(1, min(MAX_CONNECTIONS, int((open_files - SPARE_DESCRIPTORS) * share)))


def _worker_files(settings: Settings) -> int:
    return worker_files(settings) if settings.worker else 0

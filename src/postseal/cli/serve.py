"""`postseal serve`: run the service until it is stopped.

1. take the port, so that one that is taken is told before anything is started
2. reach the database: an embedded one is started or joined and brought up to date, any other must be so already
3. check roles, schema and durability
4. run the service and listen
5. on SIGTERM or SIGINT: answer what has come in, then release the database
"""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import uvloop
from typer import Option, Typer, echo

from postseal import logs
from postseal.cli.command import Session, command
from postseal.cli.output import print_json
from postseal.postgres.access import Access, open_access
from postseal.postgres.home import default_home
from postseal.service import running_service
from postseal.settings import Settings
from postseal.web import server

MAX_PORT = 65_535

app = Typer()


@command(app, "serve")
def serve(
    session: Session,
    *,
    host: Annotated[str | None, Option(metavar="ADDRESS", help="Where to listen.")] = None,
    port: Annotated[int | None, Option(min=0, max=MAX_PORT, help="Port to listen on; 0 takes a free one.")] = None,
    processes: Annotated[int, Option(min=1, max=1, help="Processes that share the work; one so far.")] = 1,
) -> None:
    """Run the service until it is stopped."""
    settings = session.settings
    settings = msgspec.structs.replace(
        settings,
        host=settings.host if host is None else host,
        port=settings.port if port is None else port,
    )
    logs.configure(settings.log_level)
    log = structlog.get_logger()
    folder = Path(settings.data_dir) if settings.data_dir else default_home()
    log.info("starting", data_folder=str(folder), embedded=settings.database_url is None, processes=processes)
    with (
        server.bind(settings.host, settings.port) as listener,
        open_access(settings, log=log) as access,
    ):
        access.check()
        uvloop.run(_run(settings, access, listener, as_json=session.as_json))
    log.info("stopped")


async def _run(settings: Settings, access: Access, listener: socket.socket, *, as_json: bool) -> None:
    def announce(url: str) -> None:
        if as_json:
            print_json({"url": url})
        else:
            echo(f"postseal listens on {url}")

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running_service(settings, access) as service:
        await server.serve(service, listener, stop=stop, ready=announce)

"""`postseal serve`: run the service until it is stopped.

1. take the port, so that one that is taken is told before anything is started
2. reach the database: an embedded one is started or joined and brought up to date, any other must be so already
3. check roles, schema and durability
4. run the service, its worker and its sweep, and listen, here or in several processes
5. on SIGTERM or SIGINT: answer what has come in, then release the database
"""

from contextlib import ExitStack
from typing import Annotated

import msgspec
import structlog
from typer import Option, Typer, echo

from postseal import logs
from postseal.cli.command import Session, command
from postseal.cli.output import print_json
from postseal.errors import StartupError
from postseal.postgres.home import home_of
from postseal.postgres.postmaster import MAX_CONNECTIONS
from postseal.service import connections_a_process
from postseal.settings import MAX_PORT, Settings
from postseal.web import process
from postseal.web.processes import Family
from postseal.web.server import address_of, bind

MAX_PROCESSES = 64
SPARE_CONNECTIONS = 20
"""For commands beside the service, and what PostgreSQL keeps for its superuser."""

app = Typer()


@command(app, "serve")
def serve(
    session: Session,
    *,
    host: Annotated[str | None, Option(metavar="ADDRESS", help="Where to listen.")] = None,
    port: Annotated[int | None, Option(min=0, max=MAX_PORT, help="Port to listen on; 0 takes a free one.")] = None,
    processes: Annotated[int, Option(min=1, max=MAX_PROCESSES, help="Processes that share the work.")] = 1,
    no_worker: Annotated[bool, Option("--no-worker", help="Leave delivering to `postseal worker`.")] = False,
    no_sweep: Annotated[
        bool, Option("--no-sweep", help="Leave deleting what has expired to `postseal sweep`.")
    ] = False,
) -> None:
    """Run the service until it is stopped."""
    settings = session.settings
    settings = msgspec.structs.replace(
        settings,
        host=settings.host if host is None else host,
        port=settings.port if port is None else port,
        worker=settings.worker and not no_worker,
        sweep=settings.sweep and not no_sweep,
    )
    _require_connections(settings, processes)
    logs.configure(settings.log_level)
    log = structlog.get_logger()
    folder = home_of(settings)
    log.info("starting", data_folder=str(folder), embedded=settings.database_url is None, processes=processes)

    with ExitStack() as held:
        listener = held.enter_context(bind(settings.host, settings.port))
        url = address_of(listener)

        def announce() -> None:
            if session.as_json:
                print_json({"url": url})
            else:
                echo(f"postseal listens on {url}")

        access = held.enter_context(session.access())
        access.check()
        if processes == 1:
            process.run(settings, access, listener, ready=announce)
        else:
            Family(settings, listener, processes, log).run(announce)
    log.info("stopped")


def _require_connections(settings: Settings, processes: int) -> None:
    """Raise StartupError if the processes could want more connections than the embedded database takes.

    Another database's number says little: a pooler may stand before it.
    """
    most = (MAX_CONNECTIONS - SPARE_CONNECTIONS) // connections_a_process(settings)
    if settings.database_url is None and processes > most:
        raise StartupError(
            f"the embedded database has connections for {most} processes with commit_lanes {settings.commit_lanes}: "
            "lower --processes or commit_lanes, or use a database of your own"
        )

"""What every command has in common: its options, its way to the database, and how it fails.

@command(app, "list")
def list_tenants(session: Session) -> None:
    rows = session.transact(tenants.list_all)
"""

import os
import pwd
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import structlog
from typer import Option, Typer

from postseal import logs
from postseal.admin.actor import Actor
from postseal.cli.failures import one_line_errors
from postseal.ending import run_until_asked, signals_held
from postseal.postgres.access import Access, open_access
from postseal.postgres.database import Connection, Database, Part
from postseal.settings import Settings, load_settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """One command's run."""

    settings: Settings
    as_json: bool

    @property
    def actor(self) -> Actor:
        """Whoever runs the command, as the operating system knows them."""
        uid = os.geteuid()
        try:
            return Actor(f"os:{pwd.getpwuid(uid).pw_name}")
        except KeyError:
            return Actor(f"os:{uid}")

    @contextmanager
    def access(self, *, migrates: bool = True) -> Generator[Access]:
        """The way to the database, released at the end, also where a signal ends the command."""
        log = structlog.get_logger()
        with signals_held(), open_access(self.settings, log=log, migrates=migrates) as access:
            yield access

    def transact(self, act: Callable[[Connection], Awaitable[T]]) -> T:
        """The result of one administrator's act, committed for certain."""
        return self.run(Part.ADMIN, lambda database: database.transact(act))

    def run(self, part: Part, flow: Callable[[Database], Awaitable[T]]) -> T:
        """The result of `flow`, which works on the database as one part of the service."""

        async def flow_on(conninfo: str) -> T:
            async with Database(conninfo, prepare=self.settings.prepared_statements, size=1) as database:
                return await flow(database)

        with self.access() as access:
            access.check()
            return run_until_asked(flow_on(access.of(part)))


def open_session(
    *,
    as_json: Annotated[bool, Option("--json", help="Print JSON on stdout, for programs.")] = False,
    data_dir: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Home of the embedded database; a service that runs there is joined."),
    ] = None,
    database_url: Annotated[
        str | None,
        Option(metavar="URL", help="PostgreSQL to use instead. Better in POSTSEAL_DATABASE_URL if secret."),
    ] = None,
    config: Annotated[Path | None, Option(metavar="FILE", help="Settings in a TOML file.")] = None,
) -> Session:
    """The session of a command, from the options that every command has, the environment and the settings file."""
    overrides = {"data_dir": data_dir, "database_url": database_url}
    return Session(load_settings(os.environ, config, overrides), as_json)


def command(
    app: Typer, name: str, *, takes_keyid: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to `app` as the command `name`.

    Its first parameter is the Session; Typer reads its options and arguments from the others. One key id in 64 begins
    with a hyphen: where one is taken, what is no option of the command is an argument.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        common = signature(open_session).parameters
        _, *own = signature(function).parameters.values()

        def run(**given: Any) -> None:
            with one_line_errors():
                logs.configure("error")
                session = open_session(**{option: given.pop(option) for option in common})
                function(session, **given)

        run.__doc__ = function.__doc__
        run.__signature__ = Signature([*own, *common.values()])  # pyright: ignore[reportFunctionMemberAccess] - inspect.signature reads it
        app.command(name, context_settings={"ignore_unknown_options": takes_keyid})(run)
        return function

    return add

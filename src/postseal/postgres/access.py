"""How each part of the service reaches the database: embedded or by URL, as the owner or as a part's role."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from structlog.typing import FilteringBoundLogger

from postseal.errors import StartupError
from postseal.postgres.database import Part, conninfo_for
from postseal.postgres.disk import MIB, Disk
from postseal.postgres.durability import check_durability
from postseal.postgres.embedded import start_or_join
from postseal.postgres.home import Home, home_of
from postseal.postgres.migrate import Migration, migrate, read_passwords, require_current_schema
from postseal.postgres.watchdog import watching
from postseal.settings import Settings

COMMITTING_PARTS = (Part.ADMIN, Part.INGEST, Part.DELIVERY)
"""Whose commits are answers here."""


@dataclass(frozen=True, slots=True)
class Access:
    """Connection strings, none of which holds a generated password: libpq reads those from `passfile`."""

    owner: str = field(repr=False)
    passfile: Path
    prefix: str
    disk: Disk | None = None
    """The disk of an embedded database; any other's is not ours to watch."""

    def accepting(self) -> bool:
        """Whether the database has room for more envelopes, as far as is known here."""
        return self.disk is None or self.disk.accepting()

    def of(self, part: Part) -> str:
        """The connection string of one part's role."""
        return conninfo_for(self.owner, user=f"{self.prefix}_{part}", passfile=str(self.passfile))

    def migrate(self, *, new_passwords: bool = False) -> list[Migration]:
        """Bring the database up to date as its owner; returns what was applied. Raises what `migrate` raises."""
        with connect_at_startup(self.owner) as connection:
            return migrate(
                connection,
                prefix=self.prefix,
                passfile=self.passfile,
                new_passwords=new_passwords,
                ours_alone=self.disk is not None,
            )

    def check(self) -> None:
        """Raise StartupError unless the roles, the schema and the server's durability are as they must be.

        Durability is checked as each role that commits: a role can have settings of its own.
        """
        if f"{self.prefix}_{Part.INGEST}" not in read_passwords(self.passfile):
            raise StartupError(f"{self.passfile} has no passwords of the service's roles: run `postseal migrate`")
        with connect_at_startup(self.of(Part.ADMIN)) as connection:
            require_current_schema(connection)
        for part in COMMITTING_PARTS:
            with connect_at_startup(self.of(part)) as connection:
                check_durability(connection)


@contextmanager
def open_access(settings: Settings, *, log: FilteringBoundLogger, migrates: bool = True) -> Generator[Access]:
    """Reach the database of `settings`. An embedded one is joined or started, migrated, watched, and released.

    Whoever `migrates` not takes its schema as it is. Raises StartupError.
    """
    home = home_of(settings)
    if settings.database_url is not None:
        passfile = Path(settings.roles_file) if settings.roles_file else home / "roles.pgpass"
        yield Access(conninfo_for(settings.database_url), passfile, settings.role_prefix)
        return
    server = start_or_join(home, log=log)
    try:
        disk = Disk(
            Home(server.home),
            min_free_bytes=settings.min_free_disk_mb * MIB,
            ballast_bytes=settings.ballast_mb * MIB,
            log=log,
        )
        access = Access(conninfo_for(server.dsn), home / "roles.pgpass", settings.role_prefix, disk)
        if migrates:
            access.migrate()
        with watching(server, disk, log=log):
            yield access
    finally:
        server.release()


@contextmanager
def connect_at_startup(conninfo: str) -> Generator[psycopg.Connection]:
    """A connection whose failure is one clear line without a secret."""
    try:
        connection = psycopg.connect(conninfo, autocommit=True)
    except psycopg.OperationalError as error:
        raise StartupError(f"cannot reach the database: {first_line(error)}") from None
    with connection:
        yield connection


def first_line(error: Exception) -> str:
    """What libpq says, without its hints and the list of addresses that it tried. It never repeats a password."""
    return str(error).partition("\n")[0] or type(error).__name__

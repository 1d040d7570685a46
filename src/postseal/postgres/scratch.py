"""A scratch database, in which a restore is made and proved before it takes its target's place.

Their names belong to the target's: a second run finds what a first one left.

    postseal_restoring_<target>   is being restored; never read by anybody, dropped by the next run
    postseal_replaced_<target>    was the target; it was empty, and is dropped once that has been looked at again

Databases are renamed in one transaction, so that at every moment the target's name is that of a whole database.
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postseal.errors import ArchiveError
from postseal.postgres.access import Access, connect_at_startup
from postseal.postgres.migrate import let_migrate
from postseal.postgres.snapshot import act_as_owner, tables

MAINTENANCE = "postgres"
"""The database from which others are made, renamed and dropped; every cluster has it."""
NAME_DIGITS = 16
"""Of the SHA-256 of the target's name, which may be as long as a name can be."""
KEY_DIGITS = 7
"""Of these as many as a lock's number holds."""
TURN_TIMEOUT_MS = 5_000
"""A restore that was killed has its lock until the server notices."""
ADVISORY_SPACE = 0x72657374  # "rest": one restore of a target at a time


def name_beside(target: str, what: str) -> str:
    """The name of a database that belongs to a target's."""
    return f"postseal_{what}_{hashlib.sha256(target.encode()).hexdigest()[:NAME_DIGITS]}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a restore happens; `maintenance` is a connection to no database that is touched."""

    maintenance: psycopg.Connection[Any]
    access: Access
    target: str

    @property
    def scratch(self) -> str:
        """The name of the database that is restored into."""
        return name_beside(self.target, "restoring")

    @property
    def replaced(self) -> str:
        """The name of what was the target."""
        return name_beside(self.target, "replaced")

    def conninfo(self, database: str) -> str:
        """The owner's way to a database of the same server."""
        return make_conninfo(self.access.owner, dbname=database)


@contextmanager
def place_of_restore(access: Access) -> Generator[Place]:
    """Be the only one that restores into the database of `access`. Raises ArchiveError and StartupError."""
    with connect_at_startup(access.owner) as connection:
        target = connection.info.dbname
    if target == MAINTENANCE:
        raise ArchiveError(f"nothing is restored into the database {MAINTENANCE} itself: name another one")
    with connect_at_startup(make_conninfo(access.owner, dbname=MAINTENANCE)) as maintenance:
        place = Place(maintenance, access, target)
        _take_turn(place)
        yield place


def _take_turn(place: Place) -> None:
    # The session keeps the lock, the transaction is there for the time-out alone.
    key = int(place.scratch[-KEY_DIGITS:], 16)
    try:
        with place.maintenance.transaction():
            place.maintenance.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(TURN_TIMEOUT_MS))
            place.maintenance.execute("SELECT pg_advisory_lock(%s, %s)", [ADVISORY_SPACE, key])
    except errors.LockNotAvailable:
        raise ArchiveError(f"another restore into the database {place.target} is under way: let it end") from None


def clear_left_over(place: Place) -> None:
    """Drop what a run that was killed left. ArchiveError if what was the target then holds something."""
    _drop(place, place.scratch)
    if place.maintenance.execute("SELECT 1 FROM pg_database WHERE datname = %s", [place.replaced]).fetchone():
        holds = what_it_holds(place, place.replaced)
        if holds is not None:
            raise ArchiveError(
                f"the database {place.replaced} holds {holds}: it was {place.target} before a restore that was cut "
                "off; take out of it what is needed, and drop it"
            )
        _drop(place, place.replaced)


OTHERS_TABLE: LiteralString = """
SELECT format('the table %I.%I', nspname, relname) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE relkind IN ('r', 'p', 'm', 'f') AND nspname <> 'information_schema'
  AND nspname <> 'postseal' AND NOT starts_with(nspname, 'pg_')
  AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = c.oid AND deptype = 'e')
ORDER BY 1 LIMIT 1
"""
HAS_ROWS = sql.SQL("SELECT EXISTS (SELECT FROM postseal.{})")
WITHOUT_DATA = {"schema_migrations"}


def what_it_holds(place: Place, database: str) -> str | None:
    """What stands in the way of replacing a database: a table with rows, or one that is not postseal's."""
    with connect_at_startup(place.conninfo(database)) as connection:
        act_as_owner(connection, place.access.prefix)
        others = connection.execute(OTHERS_TABLE).fetchone()
        if others is not None:
            return others[0]
        for table in tables(connection):
            if table not in WITHOUT_DATA:
                row = connection.execute(HAS_ROWS.format(sql.Identifier(table))).fetchone()
                if row == (True,):
                    return f"rows in {table}"
    return None


OWNER: LiteralString = "SELECT rolname FROM pg_database JOIN pg_roles r ON r.oid = datdba WHERE datname = %s"


@contextmanager
def scratch_database(place: Place) -> Generator[str]:
    """Make the scratch database, as the target is but without the schema `postseal`.

    Yields a connection string that leads there as the owning role. It is dropped at the end unless it has another name
    by then. Raises ArchiveError.
    """
    row = place.maintenance.execute(OWNER, [place.target]).fetchone()
    assert row is not None  # noqa: S101 - we were connected to it
    names = [sql.Identifier(name) for name in (place.scratch, place.target, row[0])]
    try:
        # Of the target, so that its encoding, its locale and its extensions are kept.
        place.maintenance.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(*names))
    except errors.ObjectInUse:
        raise _in_use(place) from None
    try:
        _grant_as_on_target(place)
        with connect_at_startup(place.conninfo(place.scratch)) as connection:
            let_migrate(connection, place.access.prefix)
            connection.execute("DROP SCHEMA IF EXISTS postseal CASCADE")
        yield _as_owning_role(place)
    finally:
        _drop(place, place.scratch)


GRANTS: LiteralString = """
SELECT g.privilege_type, r.rolname, g.is_grantable
FROM pg_database, aclexplode(datacl) AS g LEFT JOIN pg_roles r ON r.oid = g.grantee WHERE datname = %s
"""
ON_DATABASES: dict[str, sql.SQL] = {name: sql.SQL(name) for name in ("CONNECT", "CREATE", "TEMPORARY")}
"""What can be granted on a database."""


def _grant_as_on_target(place: Place) -> None:
    """Let nobody into the scratch database, or do there, what they may not on the target: a copy lacks its grants."""
    row = place.maintenance.execute("SELECT 1 FROM pg_database WHERE datname = %s AND datacl IS NULL", [place.target])
    if row.fetchone():
        return
    scratch = sql.Identifier(place.scratch)
    place.maintenance.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(scratch))
    for privilege, role, grantable in place.maintenance.execute(GRANTS, [place.target]).fetchall():
        whom = sql.SQL("PUBLIC") if role is None else sql.Identifier(role)
        statement = sql.SQL("GRANT {} ON DATABASE {} TO {}").format(ON_DATABASES[privilege], scratch, whom)
        place.maintenance.execute(statement + sql.SQL(" WITH GRANT OPTION" if grantable else ""))


def _as_owning_role(place: Place) -> str:
    options = conninfo_to_dict(place.access.owner).get("options") or ""
    return make_conninfo(
        place.conninfo(place.scratch), options=f"{options} -c role={place.access.prefix}_owner".lstrip()
    )


def analyze(connection: psycopg.Connection[Any]) -> None:
    """Let the planner know what the tables hold."""
    for table in tables(connection):
        connection.execute(sql.SQL("ANALYZE postseal.{}").format(sql.Identifier(table)))


MISSING_LOGINS: LiteralString = """
SELECT DISTINCT login FROM postseal.enqueue_logins
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = login) ORDER BY login
"""


def missing_logins(connection: psycopg.Connection[Any]) -> list[str]:
    """The logins of applications that may leave intents, and that this server does not have."""
    return [login for (login,) in connection.execute(MISSING_LOGINS)]


def replace_target(place: Place) -> None:
    """Put the scratch database in the target's place, which has been empty. Raises ArchiveError.

    Somebody may have written to the target after it was looked at; so it is looked at again where nobody finds it any
    more, and put back if it holds something.
    """
    try:
        _rename(place, (place.target, place.replaced), (place.scratch, place.target))
    except errors.ObjectInUse:
        raise _in_use(place) from None
    holds = what_it_holds(place, place.replaced)
    if holds is None:
        _drop(place, place.replaced)
        return
    try:
        _rename(place, (place.target, place.scratch), (place.replaced, place.target))
    except errors.ObjectInUse:
        raise ArchiveError(f"{holds} came into {place.target} meanwhile, and is in {place.replaced} now") from None
    raise ArchiveError(f"{holds} came into the database {place.target} meanwhile: it is left as it is")


def _rename(place: Place, *names: tuple[str, str]) -> None:
    with place.maintenance.transaction():
        for old, new in names:
            statement = sql.SQL("ALTER DATABASE {} RENAME TO {}")
            place.maintenance.execute(statement.format(sql.Identifier(old), sql.Identifier(new)))


def _drop(place: Place, database: str) -> None:
    # With force: a pg_restore that outlived its parent may still be connected.
    place.maintenance.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database)))


def _in_use(place: Place) -> ArchiveError:
    return ArchiveError(f"somebody is connected to the database {place.target}: stop the service, and restore again")

"""Migrations: numbered SQL files, forward only, each in a transaction of its own under an advisory lock.

The owner's connection makes the roles (cluster-wide, hence the settable prefix), the schema `postseal`, and what the
files say. Login roles get generated passwords, which are kept in a password file (libpq's own form, 0600) and nowhere
else.
"""

import re
import secrets
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from postseal.errors import StartupError
from postseal.postgres.database import Part
from postseal.private_files import replace_private

LOCK_TIMEOUT_MS = 5_000
"""A migration that waits longer for a table's lock gives up, so that the running service is not stopped behind it."""
ADVISORY_LOCK = 0x706F7374  # "post": one migration of a database at a time
TURN_TIMEOUT_MS = 60_000
"""How long a migration waits for another one of the same database."""

_NUMBERED = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_PASSWORD_LINE = re.compile(r"\*:\*:\*:([a-z_][a-z0-9_]*):([A-Za-z0-9_-]+)")


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file."""

    version: int
    name: str
    text: str


def migrations() -> list[Migration]:
    """All migrations of this release, in order."""
    files = resources.files("postseal.postgres").joinpath("migrations").iterdir()
    numbered = [(number, file) for file in files if (number := _NUMBERED.fullmatch(file.name))]
    found = [Migration(int(number[1]), file.name, file.read_text("utf-8")) for number, file in numbered]
    return sorted(found, key=lambda migration: migration.version)


def pending(connection: psycopg.Connection[Any]) -> list[Migration]:
    """The migrations that this database has not had. Raises StartupError if its schema is newer than this release."""
    current, known = schema_version(connection), migrations()
    if current > known[-1].version:
        raise StartupError(
            f"the database's schema has version {current}, newer than {known[-1].version}: upgrade postseal"
        )
    return [migration for migration in known if migration.version > current]


def schema_version(connection: psycopg.Connection[Any]) -> int:
    """The version of the last migration that this database had; 0 for none."""
    exists = connection.execute("SELECT to_regclass('postseal.schema_migrations') IS NOT NULL").fetchone()
    if exists is None or not exists[0]:
        return 0
    row = connection.execute("SELECT coalesce(max(version), 0) FROM postseal.schema_migrations").fetchone()
    return row[0] if row else 0


def require_current_schema(connection: psycopg.Connection[Any]) -> None:
    """Raise StartupError unless the schema is exactly this release's."""
    if pending(connection):
        raise StartupError("the database's schema is older than this release: run `postseal migrate`")


def migrate(
    connection: psycopg.Connection[Any],
    *,
    prefix: str,
    passfile: Path,
    new_passwords: bool = False,
    ours_alone: bool = False,
) -> list[Migration]:
    """Bring a database up to date; returns what was applied. `connection` is the owner's, in autocommit mode.

    Roles get passwords when they are made, and all of them new ones with `new_passwords`. One that is there already and
    has no password in the file may be in use elsewhere, and is left alone (StartupError), unless the cluster is
    `ours_alone`. Where nothing is to be done nothing is written, neither to the database nor to the file.
    """
    _take_turn(connection)
    try:
        todo = pending(connection)
        make_roles(connection, prefix, passfile, new_passwords=new_passwords, ours_alone=ours_alone)
        if todo:
            let_migrate(connection, prefix)
        for migration in todo:
            _apply(connection, migration, prefix)
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", [ADVISORY_LOCK])
    return todo


def _take_turn(connection: psycopg.Connection[Any]) -> None:
    # The session keeps the lock, the transaction is there for the time-out alone.
    try:
        with connection.transaction():
            connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(TURN_TIMEOUT_MS))
            connection.execute("SELECT pg_advisory_lock(%s)", [ADVISORY_LOCK])
    except psycopg.errors.LockNotAvailable:
        raise StartupError("another migration of this database does not end: look for its session") from None


def _apply(connection: psycopg.Connection[Any], migration: Migration, prefix: str) -> None:
    owner = sql.Identifier(f"{prefix}_owner")
    with connection.transaction():
        connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(LOCK_TIMEOUT_MS))
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS postseal AUTHORIZATION {}").format(owner))
        connection.execute(sql.SQL("SET LOCAL ROLE {}").format(owner))
        connection.execute("SET LOCAL search_path = postseal")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_migrations (version integer PRIMARY KEY, name text NOT NULL, "
            "applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
        connection.execute(migration.text.replace("{prefix}", prefix).encode())
        connection.execute(
            "INSERT INTO schema_migrations (version, name) VALUES (%s, %s)",
            [migration.version, migration.name],
        )
        for part in Part:
            role = sql.Identifier(f"{prefix}_{part}")
            connection.execute(sql.SQL("GRANT USAGE ON SCHEMA postseal TO {}").format(role))
            connection.execute(sql.SQL("GRANT SELECT ON schema_migrations TO {}").format(role))


def make_roles(
    connection: psycopg.Connection[Any],
    prefix: str,
    passfile: Path,
    *,
    new_passwords: bool = False,
    ours_alone: bool = False,
) -> None:
    """Make the roles of the service where they are missing; what `migrate` says of them holds. Raises StartupError."""
    owner, names = f"{prefix}_owner", [f"{prefix}_{part}" for part in Part]
    rows = connection.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s::text[])", [[owner, *names]])
    there = {name for (name,) in rows}
    passwords = read_passwords(passfile)
    unknown = set(names) - passwords.keys()
    if unknown & there and not (new_passwords or ours_alone):
        raise StartupError(
            f"the role {min(unknown & there)} is there already and {passfile} has no password of it: copy the roles "
            "file to here, or choose another role_prefix, or, if the file is lost, run `postseal migrate "
            "--new-passwords`, which locks out whoever uses the old ones"
        )
    fresh = {name: secrets.token_urlsafe(32) for name in (names if new_passwords else unknown)}
    with connection.transaction():
        if owner not in there:
            _create_role(connection, owner, sql.SQL("NOLOGIN"))
        for name in names:
            if name not in there:
                _create_role(connection, name, sql.SQL("LOGIN"))
            if name in fresh or name not in there:
                _set_password(connection, name, (passwords | fresh)[name])
        if fresh:
            # Before the commit: passwords that are in no file would be lost.
            write_passwords(passfile, passwords | fresh)


def _create_role(connection: psycopg.Connection[Any], name: str, login: sql.SQL) -> None:
    options = sql.SQL(" NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT NOREPLICATION NOBYPASSRLS")
    connection.execute(sql.SQL("CREATE ROLE {} ").format(sql.Identifier(name)) + login + options)


def _set_password(connection: psycopg.Connection[Any], name: str, password: str) -> None:
    # Hashed here: the server's log shows statements.
    verifier = connection.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256")
    statement = sql.SQL("ALTER ROLE {} PASSWORD {}")
    connection.execute(statement.format(sql.Identifier(name), sql.Literal(verifier.decode())))


def let_migrate(connection: psycopg.Connection[Any], prefix: str) -> None:
    """Let this connection's user act as the owning role, and that role make the schema in this database."""
    owner, database = sql.Identifier(f"{prefix}_owner"), sql.Identifier(connection.info.dbname)
    connection.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(owner))
    connection.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(database, owner))


def read_passwords(passfile: Path) -> dict[str, str]:
    """The generated passwords by role; none if there is no such file. Raises StartupError if it cannot be read."""
    try:
        text = passfile.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StartupError(f"cannot read the roles file {passfile}: {error.strerror}") from None
    return {line[1]: line[2] for line in map(_PASSWORD_LINE.fullmatch, text.splitlines()) if line}


def write_passwords(passfile: Path, passwords: dict[str, str]) -> None:
    """Write them for the owner's eyes alone, the whole file or none of it. Raises StartupError if that cannot be."""
    text = "".join(f"*:*:*:{role}:{password}\n" for role, password in sorted(passwords.items()))
    try:
        replace_private(passfile, text.encode())
    except OSError as error:
        raise StartupError(f"cannot write the roles file {passfile}: {error.strerror}") from None

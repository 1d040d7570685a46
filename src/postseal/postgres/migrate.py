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


def migrate(connection: psycopg.Connection[Any], *, prefix: str, passfile: Path) -> list[Migration]:
    """Bring a database up to date; returns what was applied. `connection` is the owner's, in autocommit mode."""
    _take_turn(connection)
    try:
        todo = pending(connection)
        _make_roles(connection, prefix, passfile)
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


def _make_roles(connection: psycopg.Connection[Any], prefix: str, passfile: Path) -> None:
    passwords = read_passwords(passfile)
    owner = sql.Identifier(f"{prefix}_owner")
    _create_role(connection, f"{prefix}_owner", sql.SQL("NOLOGIN"))
    connection.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(owner))
    database = sql.Identifier(connection.info.dbname)
    connection.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(database, owner))
    for part in Part:
        name = f"{prefix}_{part}"
        known = name in passwords
        password = passwords.setdefault(name, secrets.token_urlsafe(32))
        created = _create_role(connection, name, sql.SQL("LOGIN"))
        if created or not known:
            # Hashed here: the server's log shows statements.
            verifier = connection.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256")
            statement = sql.SQL("ALTER ROLE {} PASSWORD {}")
            connection.execute(statement.format(sql.Identifier(name), sql.Literal(verifier.decode())))
    write_passwords(passfile, passwords)


def _create_role(connection: psycopg.Connection[Any], name: str, login: sql.SQL) -> bool:
    exists = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [name]).fetchone()
    if exists:
        return False
    options = sql.SQL(" NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT NOREPLICATION NOBYPASSRLS")
    connection.execute(sql.SQL("CREATE ROLE {} ").format(sql.Identifier(name)) + login + options)
    return True


def read_passwords(passfile: Path) -> dict[str, str]:
    """The generated passwords by role; none if there is no such file."""
    try:
        text = passfile.read_text("utf-8")
    except FileNotFoundError:
        return {}
    return {line[1]: line[2] for line in map(_PASSWORD_LINE.fullmatch, text.splitlines()) if line}


def write_passwords(passfile: Path, passwords: dict[str, str]) -> None:
    """Write them for the owner's eyes alone, the whole file or none of it."""
    text = "".join(f"*:*:*:{role}:{password}\n" for role, password in sorted(passwords.items()))
    replace_private(passfile, text.encode())

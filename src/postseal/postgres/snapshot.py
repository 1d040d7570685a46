"""One snapshot of the whole database, to be dumped and counted while the service writes on."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from postseal.archive import Head
from postseal.ending import end_if_asked
from postseal.errors import ArchiveError
from postseal.postgres.access import connect_at_startup
from postseal.postgres.migrate import pending, schema_version

LOCK_WAIT_MS = 60_000
"""How long a table is waited for that a migration holds."""

# The snapshot lives as long as its transaction, which is idle while the dump goes on. Without row_security whoever may
# not see all rows is refused, and not shown some.
BOUNDS: LiteralString = """
SELECT set_config(name, CASE name WHEN 'lock_timeout' THEN %s WHEN 'row_security' THEN 'off' ELSE '0' END, true)
FROM pg_settings WHERE name IN
    ('lock_timeout', 'row_security', 'statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')
"""
# Debian's version has words behind it.
EXPORT: LiteralString = """
SELECT pg_export_snapshot(), clock_timestamp(), split_part(current_setting('server_version'), ' ', 1)
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The database as it was at `taken_at`, for as long as the block of `exported_snapshot` lasts."""

    connection: psycopg.Connection[Any]
    id: str
    taken_at: datetime
    server_version: str
    schema_version: int
    role: str | None
    """The owner, where the connection's user may act as it; else that user reads for itself."""

    @property
    def server_major(self) -> int:
        """The server's major version."""
        return server_major(self.connection)


@contextmanager
def exported_snapshot(conninfo: str, prefix: str) -> Generator[Snapshot]:
    """Hold a snapshot that other sessions can import.

    Raises StartupError where the database cannot be reached or its schema is newer than this release, and ArchiveError
    where it has none.
    """
    with connect_at_startup(conninfo) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with connection.transaction():
            connection.execute(BOUNDS, [str(LOCK_WAIT_MS)])
            role = act_as_owner(connection, prefix)
            version = schema_version(connection)
            if version == 0:
                raise ArchiveError("the database has no schema of postseal: there is nothing to back up")
            pending(connection)
            found = connection.execute(EXPORT).fetchone()
            assert found is not None  # noqa: S101 - it has one row
            snapshot, taken_at, server_version = found
            yield Snapshot(connection, snapshot, taken_at, server_version, version, role)


def server_major(connection: psycopg.Connection[Any]) -> int:
    """The major version of the server behind a connection."""
    return connection.info.server_version // 10_000


MAY_ACT: LiteralString = "SELECT 1 FROM pg_roles WHERE rolname = %s AND pg_has_role(oid, 'MEMBER')"


def act_as_owner(connection: psycopg.Connection[Any], prefix: str) -> str | None:
    """Act as the owning role where the connection's user may, which row level security does not concern."""
    owner = f"{prefix}_owner"
    if connection.execute(MAY_ACT, [owner]).fetchone() is None:
        return None
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(owner)))
    return owner


TABLES: LiteralString = """
SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = 'postseal' AND relkind IN ('r', 'p') ORDER BY relname
"""


def tables(connection: psycopg.Connection[Any]) -> list[str]:
    """The names of the tables in the schema `postseal`, none where there is no such schema."""
    return [name for (name,) in connection.execute(TABLES)]


def count_rows(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """How many rows each table has. SystemExit if a signal came."""
    counted: dict[str, int] = {}
    for table in tables(connection):
        end_if_asked()
        row = connection.execute(sql.SQL("SELECT count(*) FROM postseal.{}").format(sql.Identifier(table))).fetchone()
        counted[table] = row[0] if row else 0
    return counted


HEAD = sql.SQL("SELECT coalesce(max(id), 0), coalesce(max(xid), '0')::text FROM postseal.{}")


def audit_heads(connection: psycopg.Connection[Any]) -> tuple[Head, Head]:
    """Where the trails of the tenants and of the platform end."""
    return _head(connection, "audit_events"), _head(connection, "platform_audit_events")


def _head(connection: psycopg.Connection[Any], table: str) -> Head:
    found = connection.execute(HEAD.format(sql.Identifier(table))).fetchone()
    assert found is not None  # noqa: S101 - an aggregate has one row
    return Head(found[0], int(found[1]))

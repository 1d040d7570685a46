"""What tests of administrators' acts share: doing an act, and reading its trail."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from fleet import Device, as_owner
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database

T = TypeVar("T")

DEADLINE_S = 10.0

Act = Callable[..., Awaitable[T]]


async def do(database: Database, act: Act[T], *arguments: Any, **options: Any) -> T:
    """The result of an act in a transaction of its own."""

    async def work(connection: Connection) -> T:
        return await act(connection, *arguments, **options)

    return await database.transact(work)


def trail(access: Access, tenant: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Account, action and detail of a tenant's acts, oldest first."""
    with as_owner(access) as owner:
        query = "SELECT account, action, detail FROM audit_events WHERE tenant = %s AND outcome = 'done' ORDER BY id"
        return owner.execute(query, [tenant]).fetchall()


def counts(access: Access) -> dict[str, int]:
    """How many rows each table has that an act may write to."""
    tables = "tenants projects devices invitations credentials keys streams audit_events platform_audit_events"
    count = sql.SQL("SELECT count(*) FROM {}")
    with as_owner(access) as owner:
        return {table: scalar(owner, count.format(sql.Identifier(table))) for table in tables.split()}


def scalar(connection: psycopg.Connection[Any], query: Any, parameters: Any = None) -> Any:
    """The one value of a query."""
    row = connection.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


@contextmanager
def locked_stream(access: Access, device: Device) -> Iterator[psycopg.Connection[Any]]:
    """A connection in whose transaction the device's stream is locked, as a group commit locks it."""
    with as_owner(access) as owner, owner.transaction():
        owner.execute("SELECT 1 FROM streams WHERE stream = %s FOR NO KEY UPDATE", [device.stream])
        yield owner


async def until_blocked(access: Access) -> None:
    """Return once some connection to this database waits for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with as_owner(access) as owner:
        async with asyncio.timeout(DEADLINE_S):
            while not scalar(owner, query):
                await asyncio.sleep(0.01)

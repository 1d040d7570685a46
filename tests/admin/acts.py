"""What tests of administrators' acts share: doing an act, and reading its trail."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from fleet import as_owner
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

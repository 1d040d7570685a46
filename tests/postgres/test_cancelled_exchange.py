"""Whoever is cancelled when the database has just answered leaves the others a connection that is good."""

import asyncio

import pytest

from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database, Part

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Let tests run on asyncio, which psycopg needs."""
    return "asyncio"


async def test_an_answer_that_is_there_is_no_reason_to_cut(shared_access: Access):
    """The only connection of a pool is used on after a caller was cancelled between the answer and its return."""
    answered = asyncio.Event()

    async def ask(connection: Connection) -> int:
        cursor = await connection.execute("SELECT 1")
        row = await cursor.fetchone()
        assert row is not None
        answered.set()
        return row[0]

    async with Database(shared_access.of(Part.DELIVERY), prepare=True, size=1) as database:
        cancelled = asyncio.create_task(database.exchange(ask))
        await answered.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await database.exchange(ask) == 1

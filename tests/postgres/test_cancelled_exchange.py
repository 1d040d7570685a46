"""Whoever is cancelled when the database has just answered leaves the others a connection that is good."""

import asyncio
import gc

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


async def test_whoever_is_cancelled_twice_leaves_no_error_behind(shared_access: Access):
    """The error of an exchange that was cut under nobody is nobody's: the loop has nothing to complain about."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context["message"]))
    asking, cut, last, ended = (asyncio.Event() for _ in range(4))

    async def ask(connection: Connection) -> None:
        asking.set()
        try:
            await connection.execute("SELECT pg_sleep(5)")
        finally:
            cut.set()
            await last.wait()
            asyncio.get_running_loop().call_soon(ended.set)

    async with Database(shared_access.of(Part.DELIVERY), prepare=True, size=1) as database:
        cancelled = asyncio.create_task(database.exchange(ask))
        await asking.wait()
        cancelled.cancel()
        await cut.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        last.set()
        await ended.wait()
    del cancelled
    gc.collect()
    assert complaints == []


async def test_what_was_cut_between_two_statements_is_not_used_again(shared_access: Access):
    """The only connection of a pool looks idle when its caller is cancelled; the next caller gets another one."""
    idle = asyncio.Event()

    async def ask_and_wait(connection: Connection) -> None:
        await connection.execute("SELECT 1")
        idle.set()
        await asyncio.Event().wait()

    async def ask(connection: Connection) -> None:
        await connection.execute("SELECT 1")

    async with Database(shared_access.of(Part.DELIVERY), prepare=True, size=1) as database:
        cancelled = asyncio.create_task(database.exchange(ask_and_wait))
        await idle.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await database.exchange(ask)

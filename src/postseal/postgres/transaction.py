"""Transactions whose result is certain, or is said not to be (protocol section 5, "When a commit counts").

A commit counts only if its command tag is exactly COMMIT, no notice of WARNING or above came with it, and it answered
before its deadline. A `commit()` in a failed transaction returns normally with the tag ROLLBACK; a cancelled wait for
a synchronous standby returns COMMIT with a warning; a frozen server returns nothing for as long as it likes. In each
of these the result is not known, the connection is thrown away, and the caller is told `Unavailable`.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, LiteralString, Self, TypeAlias, TypeVar
from weakref import WeakSet

import psycopg
from psycopg.rows import TupleRow

from postseal.errors import Unavailable

Connection: TypeAlias = psycopg.AsyncConnection[TupleRow]
T = TypeVar("T")

LOCK_TIMEOUT: LiteralString = "2s"
"""A stream's lock is held for one group commit, a few milliseconds; two seconds of waiting mean trouble."""
STATEMENT_TIMEOUT: LiteralString = "5s"
IDLE_IN_TRANSACTION_TIMEOUT: LiteralString = "10s"
"""Frees the locks of a process that froze in the middle of a transaction."""
DATABASE_DEADLINE_S = 10.0
"""How long one exchange with the database may take before its connection is thrown away. Longer than the server's own
timeouts, which give the better error; it is there for a server that answers nothing at all."""
CUT_S = 1.0
"""How long an exchange may take to notice that its connection was cut."""

BEGIN: LiteralString = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
# All of it ends with the transaction, so that it holds behind PgBouncer in transaction mode too.
SET_BOUNDS: LiteralString = f"""
SELECT set_config('search_path', 'postseal', true),
       set_config('lock_timeout', '{LOCK_TIMEOUT}', true),
       set_config('statement_timeout', '{STATEMENT_TIMEOUT}', true),
       set_config('idle_in_transaction_session_timeout', '{IDLE_IN_TRANSACTION_TIMEOUT}', true)
"""

SET_PLANS: LiteralString = """
       set_config('plan_cache_mode', 'force_generic_plan', true),
       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('jit', 'off', true)
"""
# One statement and not two: a group of one envelope pays for each of them alone.
SET_BOUNDS_AND_PLANS: LiteralString = f"{SET_BOUNDS}, {SET_PLANS}"


class CommitWitness:
    """Watches one connection for notices of WARNING or above, which make a COMMIT uncertain."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._warned = False

    def __enter__(self) -> Self:
        self._connection.add_notice_handler(self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.remove_notice_handler(self._notice)

    def _notice(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        # The severity that is never translated: a German server says WARNUNG.
        if diagnostic.severity_nonlocalized not in ("DEBUG", "LOG", "INFO", "NOTICE"):
            self._warned = True

    def require_commit(self, tag: str | None) -> None:
        """Raise Unavailable unless the COMMIT that was answered with `tag` is certain."""
        if tag != "COMMIT":
            raise Unavailable(f"the commit was answered with {tag}")
        if self._warned:
            raise Unavailable("the commit came back with a warning")


async def in_transaction(connection: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
    """The result of `work`, once it has committed for certain.

    Whatever `work` raises leaves after a rollback. A lost connection is psycopg's OperationalError, a commit that is
    not certain is Unavailable: then nothing is known.
    """
    async with _to_its_end(connection) as witness:
        async with connection.pipeline():
            await connection.execute(BEGIN)
            await connection.execute(SET_BOUNDS)
        result = await work(connection)
        cursor = await connection.execute("COMMIT")
        witness.require_commit(cursor.statusmessage)
    return result


@asynccontextmanager
async def _to_its_end(connection: Connection) -> AsyncGenerator[CommitWitness]:
    """After an error the transaction is rolled back; where its commit is not certain, the connection is thrown away."""
    with CommitWitness(connection) as witness:
        try:
            yield witness
        except Unavailable:
            discard(connection)
            await connection.close()
            raise
        except BaseException:
            await roll_back(connection)
            raise


async def roll_back(connection: Connection) -> None:
    """End a failed transaction; a connection that cannot is thrown away."""
    try:
        await connection.execute("ROLLBACK")
    except (psycopg.Error, OSError):
        discard(connection)


async def within_deadline(connection: Connection, exchange: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """The result of `exchange` on `connection`, or Unavailable once `deadline_s` is over.

    On expiry, and when the caller itself is cancelled, the connection is cut under the exchange. Nothing is sent to
    cancel it, because a cancelled COMMIT may have happened all the same.
    """
    task = asyncio.ensure_future(exchange)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        await _cut(connection, task)
        raise
    if not done:
        await _cut(connection, task)
        raise Unavailable(f"the database did not answer within {deadline_s:g} s")
    return task.result()


async def _cut(connection: Connection, task: asyncio.Task[Any]) -> None:
    task.add_done_callback(_drop)
    if not task.done():  # else the connection is good, and goes back to its pool
        discard(connection)
        await asyncio.wait({task}, timeout=CUT_S)


def _drop(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # the OperationalError of the cut itself, which says nothing new


_discarded: WeakSet[Connection] = WeakSet()


def is_discarded(connection: Connection) -> bool:
    """Whether it was cut. psycopg does not see that before the connection is used again."""
    return connection in _discarded


def discard(connection: Connection) -> None:
    """Cut a connection at once, without a word to the server; whoever waits on it gets an OperationalError.

    The socket is shut down and not closed: its number stays taken until psycopg itself lets go of it.
    """
    if connection.closed:
        return
    _discarded.add(connection)
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        try:
            wire.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the server had closed it already

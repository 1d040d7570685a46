"""Hints between processes: notices on one channel, and a shared lock that says whether anybody listens.

A notice that is sent inside a write transaction makes the commits of a whole database wait for one another.
So it has a transaction of its own, which need not reach the disk. A hint may be lost at any
time; whoever waits looks for themselves as well.
"""

import asyncio
from collections.abc import Callable
from typing import LiteralString

import psycopg
import structlog
from structlog.typing import FilteringBoundLogger

from postseal.errors import Unavailable
from postseal.postgres.database import Database
from postseal.postgres.transaction import DATABASE_DEADLINE_S, Connection, discard, within_deadline

LISTENS = 0x68696E74  # "hint": held, shared, by every session that listens
MAX_HINT_BYTES = 7999
"""What PostgreSQL lets a notice carry."""
AGAIN_S = 1.0
"""How long after a listening session was lost the next one is tried."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.hints")

# Where the lock is free nobody listens. Two who tell at once may take each other for a listener, which costs nothing.
TELL: LiteralString = """
SELECT set_config('synchronous_commit', 'off', true),
       CASE WHEN NOT pg_try_advisory_xact_lock(%(listens)s) THEN pg_notify('postseal_hints', %(hint)s)::text END
"""

SHOW_PRESENCE: LiteralString = "SELECT pg_advisory_lock_shared(%s)"
LISTEN: LiteralString = "LISTEN postseal_hints"


async def tell(database: Database, hint: str) -> bool:
    """Send a hint of at most MAX_HINT_BYTES to all who listen; whether anybody seems to."""

    async def send(connection: Connection) -> bool:
        row = await (await connection.execute(TELL, {"listens": LISTENS, "hint": hint})).fetchone()
        return row is not None and row[1] is not None

    return await database.transact(send)


async def listen(database: Database, hear: Callable[[str], None]) -> None:
    """Hear hints on a session of its own, again after it was lost, until cancelled.

    `hear` gets an empty hint, which stands for any, whenever some may have been missed. Where connections keep no
    session, nothing can be heard, and this returns.
    """
    while database.keeps_sessions:
        try:
            await _listen_once(database, hear)
        except (psycopg.Error, OSError, Unavailable) as error:
            _log.info("hints_not_heard", error=type(error).__name__)
        await asyncio.sleep(AGAIN_S)


async def _listen_once(database: Database, hear: Callable[[str], None]) -> None:
    connection = await database.connect_apart()
    try:
        await within_deadline(connection, _subscribe(connection), DATABASE_DEADLINE_S)
        hear("")
        async for notice in connection.notifies():
            hear(notice.payload)
    finally:
        discard(connection)
        await connection.close()


async def _subscribe(connection: Connection) -> None:
    await connection.execute(SHOW_PRESENCE, [LISTENS])
    await connection.execute(LISTEN)

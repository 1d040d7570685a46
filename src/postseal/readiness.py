"""Whether this process makes progress now: that it can commit, not only that it is there.

The probe commits a transaction that writes to the write-ahead log and touches no table, so a server in recovery, a
full disk or a standby that does not answer fails it; and it goes once through the committer's queue, so a queue that
nobody empties fails it too. Asked by many at once, it runs once a second at the most.
"""

import asyncio
from collections.abc import Callable
from typing import LiteralString

import psycopg

from postseal.errors import Unavailable
from postseal.inbound.commit import Committer
from postseal.postgres.database import Connection, Database

PROBE_DEADLINE_S = 3.0
REMEMBERED_FOR_S = 1.0

# A transaction that has only an id would be committed without waiting for the disk.
WRITE_AHEAD: LiteralString = "SELECT pg_logical_emit_message(true, 'postseal', 'ready')"


class Readiness:
    """The last probe's result, made anew once it is a second old."""

    def __init__(
        self, database: Database, committer: Committer, accepting: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._database = database
        self._committer = committer
        self._accepting = accepting
        self._clock = clock
        self._probing = asyncio.Lock()
        self._probed_s: float | None = None
        self._fault: str | None = None

    async def require(self) -> None:
        """Raise Unavailable unless commits work."""
        async with self._probing:
            if self._probed_s is None or self._clock() - self._probed_s >= REMEMBERED_FOR_S:
                self._fault = await self._probe()
                self._probed_s = self._clock()
        if self._fault is not None:
            raise Unavailable(self._fault)

    async def _probe(self) -> str | None:
        if not self._accepting():
            return "the database's disk is almost full"
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                await self._database.transact(_write_ahead)
                await self._committer.probe()
        except Unavailable as error:
            return str(error)
        except TimeoutError:
            return f"no commit within {PROBE_DEADLINE_S:g} s"
        except psycopg.Error as error:
            return f"the database refuses to commit: {error.sqlstate}"
        return None


async def _write_ahead(connection: Connection) -> None:
    await connection.execute(WRITE_AHEAD)

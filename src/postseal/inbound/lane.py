"""A lane: one connection that commits one group after another, and comes back after it was lost.

1. begin, lock the streams, read keys and names (`postgres/ingest.py`)
2. judge each entry in order (`judging.py`, `rules/stream.py`)
3. write identities, payloads, audit events and cursors, and now and then which keys were used (`uses.py`); commit; look
   at the commit

When a group fails: SQLSTATE class 22 or 23, or an exception of our own, is a bug of ours, and the group runs again one
by one, so that one envelope never fails another. Class 40 runs the group once more. Whatever else happens, nothing is
known.
"""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

import psycopg
import structlog
from structlog.typing import FilteringBoundLogger

from postseal.errors import Unavailable
from postseal.inbound.judging import SALT_BYTES, Arrival, Entry, Ledger
from postseal.inbound.uses import NotedUses
from postseal.logs import where
from postseal.metrics import CommitResult, Metrics
from postseal.postgres.ingest import StreamKey, close_group, open_group
from postseal.postgres.key_uses import KeyUse
from postseal.postgres.transaction import (
    DATABASE_DEADLINE_S,
    CommitWitness,
    Connection,
    discard,
    within_deadline,
)
from postseal.rules.stream import Cursor
from postseal.verdicts import Verdict, unavailable

_log: FilteringBoundLogger = structlog.get_logger("postseal.commit")


class Lane:
    """Commits groups on a connection of its own; `moved` hears of the cursors that are committed for certain.

    Enter it; leaving it closes the connection.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        window: int,
        default_retention_s: int,
        metrics: Metrics,
        moved: Callable[[Mapping[StreamKey, Cursor]], None],
    ) -> None:
        self._connect = connect
        self._window = window
        self._default_retention_s = default_retention_s
        self._metrics = metrics
        self._moved = moved
        self._uses = NotedUses()
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def commit(self, entries: Sequence[Entry]) -> list[Verdict]:
        """One verdict an entry, in order, committed for certain. Raises Unavailable, and nothing else."""
        try:
            return await self._transact(entries)
        except Exception as fault:  # noqa: BLE001 - every fault has an answer, and a lane outlives them all
            self._report(fault, len(entries))
            if _is_ours(fault) and len(entries) > 1:
                self._metrics.commits[CommitResult.RERUN].inc()
                return await self._one_by_one(entries)
            if not _is_conflict(fault):
                raise self._unavailable() from None
        self._metrics.commits[CommitResult.RETRIED].inc()
        try:
            return await self._transact(entries)
        except Exception as fault:  # noqa: BLE001 - as above
            self._report(fault, len(entries))
            raise self._unavailable() from None

    async def _one_by_one(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Each entry in a transaction of its own; after a fault that is not ours the rest is not tried."""
        verdicts: list[Verdict] = []
        for number, entry in enumerate(entries):
            try:
                verdicts += await self._transact([entry])
            except Exception as fault:  # noqa: BLE001 - as above
                self._report(fault, 1)
                self._metrics.commits[CommitResult.UNAVAILABLE].inc()
                rest = entries[number : number + 1] if _is_ours(fault) else entries[number:]
                verdicts += [unavailable(each.correlation_id, each.event_identity) for each in rest]
                if not _is_ours(fault):
                    break
        return verdicts

    async def _transact(self, entries: Sequence[Entry]) -> list[Verdict]:
        async with self._borrowed() as connection:
            with self._metrics.commit_seconds.time():
                exchange = self._exchange(connection, entries)
                ledger, uses = await within_deadline(connection, exchange, DATABASE_DEADLINE_S)
        self._metrics.commits[CommitResult.CERTAIN].inc()
        self._uses.noted(uses)
        self._tell(ledger.cursors)
        return ledger.verdicts

    def _tell(self, cursors: Mapping[StreamKey, Cursor]) -> None:
        try:
            self._moved(cursors)
        except Exception as fault:  # noqa: BLE001 - what is committed is answered, whatever becomes of a hint
            _log.error("hint_not_told", error=type(fault).__name__, at=where(fault))

    async def _exchange(self, connection: Connection, entries: Sequence[Entry]) -> tuple[Ledger, list[KeyUse]]:
        with CommitWitness(connection) as witness:
            group = await open_group(connection, [entry.names for entry in entries if isinstance(entry, Arrival)])
            ledger = Ledger.of(
                entries,
                group,
                window=self._window,
                default_retention_s=self._default_retention_s,
                salts=os.urandom(SALT_BYTES * len(entries)),
            )
            uses = self._uses.due(ledger.retained)
            await close_group(
                connection, witness, retained=ledger.retained, audits=ledger.audits, cursors=ledger.cursors, uses=uses
            )
        return ledger, uses

    @asynccontextmanager
    async def _borrowed(self) -> AsyncGenerator[Connection]:
        """The lane's connection, made anew if it was lost; after an error it is thrown away, and its locks with it."""
        if self._connection is None or self._connection.closed:
            self._connection = await self._connect()
        try:
            yield self._connection
        except BaseException:
            await self._throw_away()
            raise

    async def _throw_away(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            discard(connection)
            await connection.close()

    def _unavailable(self) -> Unavailable:
        self._metrics.commits[CommitResult.UNAVAILABLE].inc()
        return Unavailable("nothing is known to be committed")

    def _report(self, fault: Exception, entries: int) -> None:
        # The message is left out: it may quote a row.
        sqlstate = fault.sqlstate if isinstance(fault, psycopg.Error) else None
        at = where(fault) if _is_ours(fault) else None
        _log.warning("group_failed", error=type(fault).__name__, sqlstate=sqlstate, entries=entries, at=at)


def _is_ours(fault: Exception) -> bool:
    """Whether an envelope that we did not foresee is at fault, rather than the database or the way to it."""
    if isinstance(fault, psycopg.Error):
        return (fault.sqlstate or "")[:2] in {"22", "23"}
    return not isinstance(fault, (Unavailable, OSError))


def _is_conflict(fault: Exception) -> bool:
    """Whether two transactions met: a deadlock, or a serialization failure."""
    return isinstance(fault, psycopg.Error) and (fault.sqlstate or "").startswith("40")

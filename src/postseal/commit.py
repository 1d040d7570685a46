"""Group commit: checks 5 and 6 of `receive()` for many envelopes in one transaction.

Verified envelopes and audit-only refusals from all requests go into one queue. A lane (one connection) takes what has
gathered, runs one transaction for all of it, and answers each waiter only when the commit is certain:

1. begin, lock the streams, read keys and names (`postgres/ingest.py`)
2. judge each envelope in order, after the earlier ones of its group (`rules/stream.py`)
3. write identities, payloads, audit events and cursors; commit; look at the commit

When a group fails: SQLSTATE class 22 or 23 is a bug of ours, and it runs again one by one, so that one envelope never
fails another; class 40 runs the group once more; whatever else happens, nothing is known and all are `unavailable`.
An exception of our own is such a bug too: it neither ends the lane nor fails the others of its group.
"""

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import psycopg
import structlog
from msgspec import Struct
from structlog.typing import FilteringBoundLogger

from postseal.errors import Unavailable
from postseal.identity.verified import VerifiedIdentity
from postseal.metrics import CommitResult, Metrics
from postseal.outcomes import Outcome, Reason
from postseal.postgres.ingest import (
    AuditRow,
    Names,
    OpenGroup,
    RetainedRow,
    StreamKey,
    close_group,
    open_group,
)
from postseal.postgres.transaction import (
    DATABASE_DEADLINE_S,
    CommitWitness,
    Connection,
    discard,
    roll_back,
    within_deadline,
)
from postseal.rules.stream import Cursor, KeyState, Matches, judge

GROUP_ENTRIES = 256
"""A group takes no further submission once it has this many entries; larger groups gained nothing when measured."""
GATHER_S = 0.0005
"""How long a group waits for more. Under load the queue fills while the previous group commits, and this adds nothing;
3 ms cost single requests 10 to 15%."""
ATTEMPTS = 2
QUEUE_ENTRIES = 20_000
"""More than this waiting is about a second's work: the next one is told `unavailable` at once."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.commit")


class Arrival(Struct, frozen=True, gc=False):
    """An envelope that passed checks 1 to 4 and is to be judged under its stream's lock."""

    caller: VerifiedIdentity
    project: str
    names: Names
    sequence: int
    event_identity: bytes
    payload: bytes
    signature: bytes
    correlation_id: bytes

    def __repr__(self) -> str:
        return f"Arrival({self.event_identity.hex()})"  # neither payload nor signature may get into a log


class Rejection(Struct, frozen=True, gc=False):
    """A refusal from before check 5; only its audit event is to be committed."""

    caller: VerifiedIdentity
    reason: Reason
    correlation_id: bytes
    project: str | None = None
    event_identity: bytes | None = None
    undecodable: bool = False
    occurrences: int = 1
    detail: str = ""


Entry = Arrival | Rejection


class Receipt(Struct, frozen=True, gc=False):
    """The acknowledgement of an envelope that is retained for certain."""

    outcome: Outcome
    event_identity: bytes
    sequence: int
    contiguous: int
    highest: int
    correlation_id: bytes


class Refusal(Struct, frozen=True, gc=False):
    """Why an envelope was not taken. `contiguous` and `highest` are there for refusals by the stream (advice)."""

    reason: Reason
    correlation_id: bytes
    detail: str = ""
    contiguous: int | None = None
    highest: int | None = None
    event_identity: bytes | None = None
    """For the log line; None where the refusal came before there was one."""


Verdict = Receipt | Refusal


@dataclass(slots=True)
class _Submission:
    entries: Sequence[Entry]
    verdicts: asyncio.Future[list[Verdict]]
    submitted_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Ledger:
    """What one group writes, and what it answers if that commits."""

    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    retained: list[RetainedRow] = field(default_factory=list[RetainedRow])
    audits: list[AuditRow] = field(default_factory=list[AuditRow])
    cursors: dict[StreamKey, Cursor] = field(default_factory=dict[StreamKey, Cursor])


class Committer:
    """Commits entries in groups over `lanes` connections. Enter it to start; leaving it commits what is queued."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        window: int,
        default_retention_s: int,
        metrics: Metrics,
        lanes: int = 2,
    ) -> None:
        self._connect = connect
        self._window = window
        self._default_retention_s = default_retention_s
        self._metrics = metrics
        self._lane_count = lanes
        self._lanes: list[asyncio.Task[None]] = []
        self._queue: deque[_Submission] = deque()
        self.queued_entries = 0
        self._arrived = asyncio.Event()
        self._gathering = asyncio.Lock()
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._lanes = [asyncio.create_task(self._run_lane()) for _ in range(self._lane_count)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stopping = True
        self._arrived.set()
        await asyncio.gather(*self._lanes)

    async def commit(self, entries: Sequence[Entry]) -> list[Verdict]:
        """One verdict an entry, in order, when all of them are committed with their audit, or `unavailable`.

        Entries of one call are judged in their order. A caller that goes away does not take back what it submitted.
        """
        if self._stopping or self.queued_entries + len(entries) > QUEUE_ENTRIES:
            return [_unavailable(entry) for entry in entries]
        submission = _Submission(entries, asyncio.get_running_loop().create_future())
        self._queue.append(submission)
        self.queued_entries += len(entries)
        self._arrived.set()
        return await asyncio.shield(submission.verdicts)

    async def _run_lane(self) -> None:
        async with _Lane(self._connect, self._window, self._default_retention_s, self._metrics) as lane:
            while group := await self._gather():
                verdicts = await lane.commit([entry for each in group for entry in each.entries])
                self._count(verdicts)
                remaining = iter(verdicts)
                for submission in group:
                    mine = [next(remaining) for _ in submission.entries]
                    if not submission.verdicts.done():
                        submission.verdicts.set_result(mine)

    def _count(self, verdicts: list[Verdict]) -> None:
        for outcome, count in Counter(v.outcome for v in verdicts if isinstance(v, Receipt)).items():
            self._metrics.envelopes[outcome].inc(count)

    async def _gather(self) -> list[_Submission]:
        """The next group; empty when the committer stops and nothing is left. One lane gathers at a time."""
        async with self._gathering:
            while not self._queue:
                if self._stopping:
                    return []
                self._arrived.clear()
                await self._arrived.wait()
            if self.queued_entries < GROUP_ENTRIES and not self._stopping:
                await asyncio.sleep(GATHER_S)
            group: list[_Submission] = []
            size = 0
            while self._queue and size < GROUP_ENTRIES:
                group.append(self._queue.popleft())
                size += len(group[-1].entries)
            self.queued_entries -= size
            self._metrics.group_entries.observe(size)
            self._metrics.group_wait.observe(time.monotonic() - group[0].submitted_s)
            return group


class _Lane:
    """One connection that commits one group after another, and comes back after it was lost."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        window: int,
        default_retention_s: int,
        metrics: Metrics,
    ) -> None:
        self._connect = connect
        self._window = window
        self._default_retention_s = default_retention_s
        self._metrics = metrics
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def commit(self, entries: Sequence[Entry]) -> list[Verdict]:
        """One verdict an entry. Never raises: what is not certain is `unavailable`."""
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                with self._metrics.commit_seconds.time():
                    verdicts = await self._transact(entries)
            except Exception as error:  # noqa: BLE001 - every fault has an answer, and a lane outlives them all
                fault = error
            else:
                self._metrics.commits[CommitResult.CERTAIN].inc()
                return verdicts
            sqlstate = fault.sqlstate if isinstance(fault, psycopg.Error) else None
            _log.warning("group_failed", error=type(fault).__name__, sqlstate=sqlstate, entries=len(entries))
            if _is_ours(fault) and len(entries) > 1:
                self._metrics.commits[CommitResult.RERUN].inc()
                return [(await self.commit([entry]))[0] for entry in entries]
            if (sqlstate or "")[:2] != "40" or not attempts_left:
                break
            self._metrics.commits[CommitResult.RETRIED].inc()
        self._metrics.commits[CommitResult.UNAVAILABLE].inc()
        return [_unavailable(entry) for entry in entries]

    async def _transact(self, entries: Sequence[Entry]) -> list[Verdict]:
        async with self._borrowed() as connection:
            exchange = self._exchange(connection, entries)
            return await within_deadline(connection, exchange, DATABASE_DEADLINE_S)

    async def _exchange(self, connection: Connection, entries: Sequence[Entry]) -> list[Verdict]:
        with CommitWitness(connection) as witness:
            group = await open_group(connection, [e.names for e in entries if isinstance(e, Arrival)])
            ledger = judge_group(entries, group, self._window, self._default_retention_s)
            await close_group(
                connection, witness, retained=ledger.retained, audits=ledger.audits, cursors=ledger.cursors
            )
        return ledger.verdicts

    @asynccontextmanager
    async def _borrowed(self) -> AsyncGenerator[Connection]:
        """The lane's connection, made anew if it was lost; after an error it is rolled back or thrown away."""
        if self._connection is None or self._connection.closed:
            self._connection = await self._connect()
        try:
            yield self._connection
        except psycopg.Error as error:
            if error.sqlstate is None:
                await self._throw_away()
            else:
                await within_deadline(self._connection, roll_back(self._connection), DATABASE_DEADLINE_S)
            raise
        except BaseException:
            await self._throw_away()
            raise

    async def _throw_away(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            discard(connection)
            await connection.close()


def _is_ours(fault: Exception) -> bool:
    """Whether an envelope that we did not foresee is at fault, rather than the database or the way to it."""
    if isinstance(fault, psycopg.Error):
        return (fault.sqlstate or "")[:2] in {"22", "23"}
    return not isinstance(fault, (Unavailable, OSError))


def judge_group(entries: Sequence[Entry], group: OpenGroup, window: int, default_retention_s: int) -> Ledger:
    """Judge a group's entries in order, each after the earlier ones. Pure but for the audit's random salts."""
    ledger = Ledger()
    cursors = {key: stream.cursor for key, stream in group.streams.items()}
    salts = os.urandom(16 * len(entries))
    for number, entry in enumerate(entries):
        salt = salts[16 * number : 16 * number + 16]
        match entry:
            case Rejection():
                ledger.audits.append(_audit_of_rejection(entry, salt))
                ledger.verdicts.append(_refusal_of_rejection(entry))
            case Arrival():
                _judge_arrival(entry, group, cursors, window, default_retention_s, ledger, salt)
    ledger.cursors = {key: cursor for key, cursor in cursors.items() if cursor is not group.streams[key].cursor}
    return ledger


def _judge_arrival(
    arrival: Arrival,
    group: OpenGroup,
    cursors: dict[StreamKey, Cursor],
    window: int,
    default_retention_s: int,
    ledger: Ledger,
    salt: bytes,
) -> None:
    names, key = arrival.names, arrival.names.stream
    stream = group.streams[key]
    judgement = judge(
        cursors[key],
        event_id=names.event_id,
        event_identity=arrival.event_identity,
        sequence=arrival.sequence,
        matches=Matches(
            group.identity_of_event.get((key, names.event_id)),
            group.event_of_idempotency_hash.get((key, names.idempotency_hash)),
        ),
        retired=stream.retired,
        key=group.keys.get((key.tenant, names.keyid), KeyState.REMOVED),
        window=window,
    )
    cursor = cursors[key] = judgement.cursor
    if judgement.is_new:
        # What the next envelopes of this group find retained.
        group.identity_of_event[key, names.event_id] = arrival.event_identity
        group.event_of_idempotency_hash[key, names.idempotency_hash] = names.event_id
        retention_s = default_retention_s if stream.retention_s is None else stream.retention_s
        ledger.retained.append(
            RetainedRow(
                names,
                arrival.sequence,
                arrival.event_identity,
                arrival.payload,
                arrival.signature,
                retention_s,
            )
        )
    ledger.audits.append(_audit_of_arrival(arrival, judgement.answer, salt))
    ledger.verdicts.append(_verdict(arrival, judgement.answer, cursor))


def _verdict(arrival: Arrival, answer: Outcome | Reason, cursor: Cursor) -> Verdict:
    if isinstance(answer, Outcome):
        return Receipt(
            answer,
            arrival.event_identity,
            arrival.sequence,
            cursor.contiguous,
            cursor.highest,
            arrival.correlation_id,
        )
    return Refusal(
        answer,
        arrival.correlation_id,
        contiguous=cursor.contiguous,
        highest=cursor.highest,
        event_identity=arrival.event_identity,
    )


def _refusal_of_rejection(rejection: Rejection) -> Refusal:
    return Refusal(
        rejection.reason, rejection.correlation_id, rejection.detail, event_identity=rejection.event_identity
    )


def _audit_of_arrival(arrival: Arrival, answer: Outcome | Reason, salt: bytes) -> AuditRow:
    acknowledged = isinstance(answer, Outcome)
    return AuditRow(
        tenant=arrival.caller.tenant,
        project=arrival.project,
        account=arrival.caller.account,
        device=arrival.caller.device,
        outcome=answer.value if acknowledged else "refused",
        reason=None if acknowledged else answer.value,
        event_identity=arrival.event_identity,
        undecodable=False,
        occurrences=1,
        correlation_id=arrival.correlation_id,
        salt=salt,
    )


def _audit_of_rejection(rejection: Rejection, salt: bytes) -> AuditRow:
    return AuditRow(
        tenant=rejection.caller.tenant,
        project=rejection.project,
        account=rejection.caller.account,
        device=rejection.caller.device,
        outcome="refused",
        reason=rejection.reason.value,
        event_identity=rejection.event_identity,
        undecodable=rejection.undecodable,
        occurrences=rejection.occurrences,
        correlation_id=rejection.correlation_id,
        salt=salt,
    )


def _unavailable(entry: Entry) -> Refusal:
    return Refusal(
        Reason.UNAVAILABLE,
        entry.correlation_id,
        "nothing is known to be committed; send it again",
        event_identity=entry.event_identity,
    )

"""Group commit: checks 5 and 6 of `receive()` for many envelopes in one transaction.

Entries from all requests go into one queue. A lane (`lane.py`) takes what has gathered, commits all of it in one
transaction, and each waiter is answered only when that commit is certain.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from postseal.errors import Unavailable
from postseal.inbound.judging import AuditOnly, Entry
from postseal.inbound.lane import Lane
from postseal.metrics import Metrics
from postseal.verdicts import Receipt, Refusal, Verdict, unavailable

GROUP_ENTRIES = 256
"""A group takes no further submission once it has so many entries: that bounds how long its streams are locked."""
GATHER_BELOW = 64
"""A group that has fewer entries waits for more."""
GATHER_S = 0.0005
"""How long it waits. Under load the queue fills while the previous group commits, and this adds nothing; where there is
little, every single request pays for it."""
QUEUE_ENTRIES = 20_000
"""More than this waiting is about a second's work: the next one is told `unavailable` at once."""
MAX_WAIT_S = 10.0
"""What has waited longer is told so and not begun: its sender has given up, and will send it again."""


@dataclass(slots=True)
class _Submission:
    entries: Sequence[Entry]
    verdicts: asyncio.Future[list[Verdict]]
    submitted_s: float = field(default_factory=time.monotonic)


class Committer:
    """Commits entries in groups over `lanes` lanes. Enter it to start; leaving it commits what is queued."""

    def __init__(self, new_lane: Callable[[], Lane], *, lanes: int, metrics: Metrics) -> None:
        self._new_lane = new_lane
        self._lane_count = lanes
        self._metrics = metrics
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
        try:
            return await self._submit(entries)
        except Unavailable:
            return [unavailable(entry.correlation_id, entry.event_identity) for entry in entries]

    async def audit(self, entry: AuditOnly) -> Refusal:
        """The refusal that `entry` stands for, once its audit event is committed, or `unavailable`."""
        (refusal,) = await self.commit([entry])
        assert isinstance(refusal, Refusal)  # noqa: S101 - a refusal is never acknowledged
        return refusal

    async def probe(self) -> None:
        """Raise Unavailable unless a group commits now: an empty one goes the way of all others."""
        await self._submit(())

    async def _submit(self, entries: Sequence[Entry]) -> list[Verdict]:
        if self._stopping or self.queued_entries + len(entries) > QUEUE_ENTRIES:
            raise Unavailable("the service has too much to do, or is stopping")
        submission = _Submission(entries, asyncio.get_running_loop().create_future())
        self._queue.append(submission)
        self.queued_entries += len(entries)
        self._arrived.set()
        return await asyncio.shield(submission.verdicts)

    async def _run_lane(self) -> None:
        async with self._new_lane() as lane:
            while group := await self._gather():
                try:
                    verdicts = await lane.commit([entry for each in group for entry in each.entries])
                except Unavailable as error:
                    _fail(group, error)
                else:
                    self._count(verdicts)
                    _answer(group, verdicts)

    async def _gather(self) -> list[_Submission]:
        """The next group; empty when the committer stops and nothing is left. One lane gathers at a time."""
        async with self._gathering:
            while True:
                while not self._queue:
                    if self._stopping:
                        return []
                    self._arrived.clear()
                    await self._arrived.wait()
                if self.queued_entries < GATHER_BELOW and not self._stopping:
                    await asyncio.sleep(GATHER_S)
                if group := self._take():
                    return group

    def _take(self) -> list[_Submission]:
        """What is queued, up to a group's size; without what has waited too long, which is told so."""
        group: list[_Submission] = []
        size, now_s = 0, time.monotonic()
        while self._queue and size < GROUP_ENTRIES:
            submission = self._queue.popleft()
            self.queued_entries -= len(submission.entries)
            if now_s - submission.submitted_s > MAX_WAIT_S:
                _fail([submission], Unavailable("the service has too much to do"))
                continue
            size += len(submission.entries)
            group.append(submission)
        if group:
            self._metrics.group_entries.observe(size)
            self._metrics.group_wait.observe(now_s - group[0].submitted_s)
        return group

    def _count(self, verdicts: list[Verdict]) -> None:
        for outcome, count in Counter(v.outcome for v in verdicts if isinstance(v, Receipt)).items():
            self._metrics.envelopes[outcome].inc(count)


def _answer(group: list[_Submission], verdicts: list[Verdict]) -> None:
    remaining = iter(verdicts)
    for submission in group:
        submission.verdicts.set_result([next(remaining) for _ in submission.entries])


def _fail(group: list[_Submission], error: Unavailable) -> None:
    for submission in group:
        submission.verdicts.set_exception(error)

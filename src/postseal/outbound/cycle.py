"""One tenant's turn of the worker, from its checks to its last settlement (protocol section 7).

1. cancellation: nothing is begun once the worker stops
2. rate: one permit of `sync-delivery`; where there is none, nothing is claimed
3. claim: under a lease, no more than there are slots for, half of them for first attempts
4. send: side by side, while no connection is held; what takes long has its lease renewed
5. settle: what is known, all of it together, every SETTLE_EVERY_S and at once when all has been sent

Cut off at any point it hands back what it has: what was not sent is released, what is known is settled, and a sending
that was cut is settled as a retry. It may have been received, so its attempt counts; and nobody has to wait for the end
of its lease. What cannot be handed back, since the database is away or the process is gone, comes back by its lease.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.envelope import dsse
from postseal.errors import Unavailable
from postseal.limits import RateLimiter
from postseal.logs import where
from postseal.outbound.marks import Marks
from postseal.outbound.scheduler import LANE, Turn
from postseal.outbound.slots import Slots
from postseal.outbound.targets import Target, Targets
from postseal.postgres.database import Connection, Database
from postseal.postgres.deliveries import MAX_CLAIMED, Claimed, Lease, Mark, Wanted, claim_for_certain
from postseal.postgres.lanes import hold
from postseal.postgres.settles import Settle, renew, settle_for_certain
from postseal.postgres.turns import Due
from postseal.rules.delivery import Attempted, Backoff, Code, Verdict, decide
from postseal.senders import Mail, Sender

PURPOSE = "sync-delivery"
SETTLE_EVERY_S = 0.2
"""How long a result waits for others, so that one slow receiver does not hold up the settlement of all."""
RENEWALS_A_LEASE = 3
CUT_S = 1.0
"""How long a sender may take to notice that it was cut off."""
HAND_BACK_S = 4.0
"""How long the last settlement of a cycle that was cut off may take."""
HOLD_ROUNDS = 1_000

_log: FilteringBoundLogger = structlog.get_logger("postseal.worker")


@dataclass(slots=True)
class Counts:
    """What came of deliveries, in one cycle or since a worker began."""

    claimed: int = 0
    ended: int = 0
    """Settled by the claim itself: expired, or out of attempts."""
    delivered: int = 0
    retried: int = 0
    dead: int = 0
    released: int = 0
    fenced: int = 0
    """Not ours any more; or settled by a commit whose answer was lost."""
    left: int = 0
    """Left to the end of their leases."""
    limited: int = 0
    """Turns that the rate limit ended."""
    renewed: int = 0
    """Leases made longer."""

    def add(self, more: "Counts") -> None:
        """Count `more` too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(more, each.name))


@dataclass(frozen=True, slots=True)
class CycleReport:
    """How one turn went."""

    tenant: str
    counts: Counts
    seconds: float


@dataclass(frozen=True, slots=True)
class Means:
    """What all cycles of a worker share."""

    database: Database
    sender: Sender
    targets: Targets
    limiter: RateLimiter
    slots: Slots
    marks: Marks
    stopping: asyncio.Event
    lease_s: float
    timeout_s: float
    backoff: Backoff
    clock: Callable[[], float]
    random: Callable[[], float]


@dataclass(eq=False, slots=True)
class _Out:
    """One delivery that this cycle has."""

    lease: Lease
    holds_until_s: float
    """Until then the lease holds for certain, by the worker's clock."""
    sending: asyncio.Task[Attempted] | None = None
    settle: Settle | None = None
    """What became of it, once that is known."""
    fenced: bool = False


@dataclass(eq=False, slots=True)
class Cycle:
    """One turn. `claimed` hears, once, which of its destinations may have more; `limited`, for how many seconds not."""

    means: Means
    turn: Turn
    claimed: Callable[[Iterable[Due]], None]
    limited: Callable[[float], None]
    counts: Counts = field(default_factory=Counts)
    _outs: set[_Out] = field(default_factory=set[_Out])
    _reserved: dict[int, int] = field(default_factory=dict[int, int])
    """Slots that were taken and in which nothing is sent yet, by stream."""
    _renew_at_s: float = 0.0
    _gone: set[int] = field(default_factory=set[int])

    async def run(self) -> None:
        """Use the turn. Raises Unavailable before anything was claimed, TimeoutError when it was cut off."""
        try:
            async with asyncio.timeout(self.means.timeout_s):
                await self._run()
        finally:
            try:
                if self._outs:
                    await _to_its_end(self._hand_back())
            finally:
                self._give_back_reserved()

    async def _run(self) -> None:
        again: Iterable[Due] = ()
        try:
            if self.means.stopping.is_set() or not self._permitted():
                again = self.turn.due
                return
            again = await self._claim()
        finally:
            self.claimed(again)
        await self._begin()
        await self._settle()
        while self._outs:
            await self._wait()
            await self._settle()
            await self._renew()
        await self._hold_gone()

    def _permitted(self) -> bool:
        quota = self.means.limiter.take(f"{self.turn.identity}/{PURPOSE}")
        if not quota.granted:
            self.counts.limited += 1
            self.limited(quota.retry_after_s)
        return quota.granted

    async def _claim(self) -> list[Due]:
        """Claim what there are slots for; returns the destinations that may have more."""
        means, tenant = self.means, self.turn.tenant
        self._reserved = means.slots.take(tenant, [due.stream for due in self.turn.due], MAX_CLAIMED)
        began = {stream: means.marks.of(tenant, stream) for stream in self._reserved}
        wanted = [
            _wanted(due, self._reserved[due.stream], began[due.stream], means.random)
            for due in self.turn.due
            if due.stream in self._reserved
        ]
        if not wanted:
            return list(self.turn.due)

        async def lease(connection: Connection) -> Claimed:
            return await claim_for_certain(connection, tenant, wanted, lane=LANE, lease_s=means.lease_s)

        asked_s = means.clock()
        claimed = await means.database.exchange(lease)
        self._outs = {_Out(lease, asked_s + means.lease_s) for lease in claimed.leases}
        self._renew_at_s = asked_s + means.lease_s / RENEWALS_A_LEASE
        self.counts.claimed += len(claimed.leases)
        self.counts.ended += claimed.ended
        found = Counter(lease.stream for lease in claimed.leases)
        for stream, mark in claimed.marks.items():
            means.marks.keep(tenant, stream, began=began[stream], reached=mark, found=found[stream])
        return _with_more(self.turn.due, wanted, claimed)

    async def _begin(self) -> None:
        """Begin to send everything at once; nothing if the worker stops meanwhile."""
        targets = await self.means.targets.of(self.turn.tenant, {out.lease.stream for out in self._outs})
        if self.means.stopping.is_set():
            await self._hand_back()
            return
        for out in self._outs:
            target = targets[out.lease.stream]
            if target.taken_away or self.means.clock() >= out.holds_until_s:
                out.settle = _release(out.lease)
            elif target.fault is not None:
                out.settle = self._judged(out.lease, Attempted(target.fault))
            else:
                self._reserved[out.lease.stream] -= 1
                out.sending = asyncio.create_task(self.means.sender.send(_mail(out.lease, target)))
                out.sending.add_done_callback(lambda sending, out=out: self._sent(out, sending))
        self._give_back_reserved()

    def _sent(self, out: _Out, sending: asyncio.Task[Attempted]) -> None:
        """A sending has ended, in whatever way."""
        out.sending = None
        self.means.slots.give_back(out.lease.tenant, out.lease.stream)
        fault = None if sending.cancelled() else sending.exception()
        if fault is not None:
            at = where(fault) if isinstance(fault, Exception) else None
            _log.error("sender_failed", error=type(fault).__name__, at=at)
        if out.fenced:
            self._outs.discard(out)
        elif sending.cancelled() or fault is not None:
            out.settle = self._judged(out.lease, Attempted(Code.SENDER_FAILED))
        else:
            out.settle = self._judged(out.lease, sending.result())

    def _judged(self, lease: Lease, attempted: Attempted) -> Settle:
        decision = decide(
            attempted,
            attempt=lease.attempt,
            attempt_limit=lease.attempt_limit,
            backoff=self.means.backoff,
            random=self.means.random(),
        )
        gone = decision.code is Code.GONE
        return Settle(
            lease.stream,
            lease.sequence,
            lease.attempt,
            lease.token,
            decision.verdict,
            decision.code,
            decision.delay_s,
            gone,
        )

    async def _wait(self) -> None:
        """Until all is sent, or it is time to settle what is known; a settlement that failed has a pause too."""
        sending = [out.sending for out in self._outs if out.sending is not None]
        if sending:
            await asyncio.wait(sending, timeout=SETTLE_EVERY_S)
        else:
            await asyncio.sleep(SETTLE_EVERY_S)

    async def _settle(self) -> None:
        """Settle what is known. While the database is away it stays known, until its lease has ended."""
        known = [(out, out.settle) for out in self._outs if out.settle is not None]
        if not known:
            return
        settles = [settle for _, settle in known]

        async def write(connection: Connection) -> set[tuple[int, int]]:
            return await settle_for_certain(connection, self.turn.tenant, settles)

        try:
            fenced = await self.means.database.exchange(write)
        except Unavailable:
            now_s = self.means.clock()
            ended = {out for out, _ in known if now_s >= out.holds_until_s}
            self.counts.left += len(ended)
            self._outs -= ended
            return
        self._outs.difference_update(out for out, _ in known)
        self._gone.update(settle.stream for settle in settles if settle.gone)
        self._count(settles, fenced)

    def _count(self, settles: list[Settle], fenced: set[tuple[int, int]]) -> None:
        verdicts = Counter(each.verdict for each in settles if (each.stream, each.sequence) not in fenced)
        self.counts.delivered += verdicts[Verdict.DELIVERED]
        self.counts.retried += verdicts[Verdict.RETRY]
        self.counts.dead += verdicts[Verdict.DEAD]
        self.counts.released += verdicts[Verdict.RELEASE]
        self.counts.fenced += len(fenced)

    async def _renew(self) -> None:
        """At a third of a lease, renew those of what is still being sent; a sending that lost its lease is cut off."""
        sending = {(out.lease.stream, out.lease.sequence): out for out in self._outs if out.sending is not None}
        now_s = self.means.clock()
        if not sending or now_s < self._renew_at_s:
            return

        async def lengthen(connection: Connection) -> set[tuple[int, int]]:
            leases = [out.lease for out in sending.values()]
            return await renew(connection, self.turn.tenant, leases, lease_s=self.means.lease_s)

        try:
            fenced = await self.means.database.transact(lengthen)
        except Unavailable:
            return  # to be tried again after the next pause
        self._renew_at_s = now_s + self.means.lease_s / RENEWALS_A_LEASE
        self.counts.renewed += len(sending) - len(fenced)
        self.counts.fenced += len(fenced)
        for place, out in sending.items():
            if place not in fenced:
                out.holds_until_s = now_s + self.means.lease_s
                continue
            out.fenced = True
            if out.sending is not None:
                out.sending.cancel()
            else:
                self._outs.discard(out)

    async def _hold_gone(self) -> None:
        """Take what waits for a destination that said it is gone out of the workers' way."""
        for stream in self._gone:
            for _ in range(HOLD_ROUNDS):
                if not await self.means.database.transact(lambda c, stream=stream: hold(c, self.turn.tenant, stream)):
                    break

    async def _hand_back(self) -> None:
        """Cut off what is being sent and settle everything, in one go and within a bounded time."""
        sending = {out.sending for out in self._outs if out.sending is not None}
        for each in sending:
            each.cancel()
        if sending:
            await asyncio.wait(sending, timeout=CUT_S)
        for out in self._outs:
            if out.settle is None and out.sending is None:
                out.settle = _release(out.lease)
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_S):
                await self._settle()
        self.counts.left += len(self._outs)
        self._outs.clear()

    def _give_back_reserved(self) -> None:
        for stream, count in self._reserved.items():
            if count:
                self.means.slots.give_back(self.turn.tenant, stream, count)
        self._reserved = {}


def _wanted(due: Due, share: int, began: Mark, random: Callable[[], float]) -> Wanted:
    """At least half for first attempts where both are due; a single one for either, so that neither waits for ever."""
    fresh = share * due.fresh_due
    if due.fresh_due and due.retries_due:
        fresh = (share + 1) // 2 if share > 1 else round(random())
    return Wanted(due.stream, fresh, share - fresh, began.since, began.retries_since)


def _with_more(dues: Sequence[Due], wanted: Sequence[Wanted], claimed: Claimed) -> list[Due]:
    """The destinations that may have more: which gave all that was asked of either kind, or were not asked at all."""
    if claimed.ended:
        return list(dues)  # what was only ended stood in the way of others
    first = Counter(lease.stream for lease in claimed.leases if lease.attempt == 1)
    later = Counter(lease.stream for lease in claimed.leases if lease.attempt > 1)
    asked = {each.stream: each for each in wanted}
    again: list[Due] = []
    for due in dues:
        stream, want = due.stream, asked.get(due.stream)
        if want is not None and first[stream] + later[stream] < want.fresh + want.retries:
            fresh_due = due.fresh_due and (not want.fresh or first[stream] >= want.fresh)
            retries_due = due.retries_due and (not want.retries or later[stream] >= want.retries)
            due = Due(due.tenant, stream, fresh_due, retries_due)  # noqa: PLW2901 - the same with what is known now
        if due.fresh_due or due.retries_due:
            again.append(due)
    return again


def _mail(lease: Lease, target: Target) -> Mail:
    body = dsse.wrap(lease.payload, lease.keyid, lease.signature)
    return Mail(
        lease.delivery,
        lease.tenant,
        lease.project,
        lease.destination,
        target.url,
        body,
        target.secrets,
        lease.attempt,
    )


def _release(lease: Lease) -> Settle:
    return Settle(lease.stream, lease.sequence, lease.attempt, lease.token, Verdict.RELEASE)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, which has bounds of its own, however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.result()

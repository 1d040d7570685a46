"""What one cycle has out, from its claim to the last settlement.

Results are settled together, every SETTLE_EVERY_S and at once when all has been sent; leases of what takes long are
renewed. Handed back, what was not sent is released, what is known is settled, and a sending that was cut is settled as
a retry: it may have been received. What cannot be handed back, since the database is away, comes back by its lease.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.errors import Unavailable
from postseal.logs import where
from postseal.outbound.holding import move_mail
from postseal.outbound.means import Counts, Means
from postseal.postgres.database import Connection
from postseal.postgres.deliveries import Lease
from postseal.postgres.settles import Settle, renew, settle_for_certain
from postseal.rules.delivery import Attempted, Code, Verdict, decide

SETTLE_EVERY_S = 0.2
"""How long a result waits for others, so that one slow receiver does not hold up the settlement of all."""
RENEWALS_A_LEASE = 3
CUT_S = 1.0
"""How long a sender may take to notice that it was cut off."""
HAND_BACK_S = 4.0
"""How long the last settlement of a cycle that was cut off may take."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.worker")


@dataclass(eq=False, slots=True)
class Out:
    """One delivery that a cycle has."""

    lease: Lease
    holds_until_s: float
    """Until then the lease holds for certain, by the worker's clock."""
    sending: asyncio.Task[Attempted] | None = None
    settle: Settle | None = None
    """What became of it, once that is known."""
    fenced: bool = False


@dataclass(eq=False, slots=True)
class Outs:
    """The deliveries that one cycle of `tenant` has. `counts` are the cycle's."""

    means: Means
    tenant: str
    counts: Counts
    _outs: set[Out] = field(default_factory=set[Out])
    _renew_at_s: float = 0.0
    _gone: set[int] = field(default_factory=set[int])

    def __len__(self) -> int:
        return len(self._outs)

    def __iter__(self) -> Iterator[Out]:
        return iter(self._outs)

    def take(self, leases: Iterable[Lease], asked_s: float) -> None:
        """These were claimed; `asked_s` is when that was asked for."""
        lease_s = self.means.pace.lease_s
        self._outs = {Out(lease, asked_s + lease_s) for lease in leases}
        self._renew_at_s = asked_s + lease_s / RENEWALS_A_LEASE
        self.counts.claimed += len(self._outs)

    def send(self, out: Out, work: Coroutine[Any, Any, Attempted]) -> None:
        """Begin to send one, in its slot, which comes back when `work` ends."""
        out.sending = asyncio.create_task(work)
        out.sending.add_done_callback(lambda sending: self._sent(out, sending))

    def release(self, out: Out) -> None:
        """It was not sent, and is to be given back."""
        lease = out.lease
        out.settle = Settle(lease.stream, lease.sequence, lease.attempt, lease.token, Verdict.RELEASE)

    def judge(self, out: Out, attempted: Attempted) -> None:
        """Its attempt went so."""
        lease = out.lease
        decision = decide(
            attempted,
            attempt=lease.attempt,
            attempt_limit=lease.attempt_limit,
            backoff=self.means.pace.backoff,
            random=self.means.random(),
        )
        out.settle = Settle(
            lease.stream,
            lease.sequence,
            lease.attempt,
            lease.token,
            decision.verdict,
            decision.code,
            decision.delay_s,
            decision.code is Code.GONE,
        )

    async def end(self) -> None:
        """Settle all of it as it becomes known."""
        await self._settle()
        while self._outs:
            await self._wait()
            await self._settle()
            await self._renew()
        await self._hold_gone()

    async def hand_back(self) -> None:
        """Cut off what is being sent and settle everything, in one go and within a bounded time."""
        sending = {out.sending for out in self._outs if out.sending is not None}
        for each in sending:
            each.cancel()
        if sending:
            await asyncio.wait(sending, timeout=CUT_S)
        for out in self._outs:
            if out.settle is None and out.sending is None:
                self.release(out)
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_S):
                await self._settle()
        self.counts.left += len(self._outs)
        self._outs.clear()

    def _sent(self, out: Out, sending: asyncio.Task[Attempted]) -> None:
        """A sending has ended, in whatever way."""
        out.sending = None
        self.means.slots.give_back(self.tenant, out.lease.stream)
        fault = None if sending.cancelled() else sending.exception()
        if fault is not None:
            at = where(fault) if isinstance(fault, Exception) else None
            _log.error("sender_failed", error=type(fault).__name__, at=at)
        if out.fenced:
            self._outs.discard(out)
        elif sending.cancelled() or fault is not None:
            self.judge(out, Attempted(Code.SENDER_FAILED))
        else:
            self.judge(out, sending.result())

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
            return await settle_for_certain(connection, self.tenant, settles)

        try:
            fenced = await self.means.database.exchange(write)
        except Unavailable:
            now_s = self.means.clock()
            ended = {out for out, _ in known if now_s >= out.holds_until_s}
            self.counts.left += len(ended)
            self._outs -= ended
            return
        self._outs.difference_update(out for out, _ in known)
        for out, settle in known:
            if settle.gone and settle.stream not in self._gone and (settle.stream, settle.sequence) not in fenced:
                self._gone.add(settle.stream)
                lease = out.lease
                _log.warning(
                    "destination_gone", tenant=self.tenant, project=lease.project, destination=lease.destination
                )
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
        now_s, lease_s = self.means.clock(), self.means.pace.lease_s
        if not sending or now_s < self._renew_at_s:
            return

        async def lengthen(connection: Connection) -> set[tuple[int, int]]:
            return await renew(connection, self.tenant, [out.lease for out in sending.values()], lease_s=lease_s)

        try:
            fenced = await self.means.database.transact(lengthen)
        except Unavailable:
            return  # to be tried again after the next pause
        self._renew_at_s = now_s + lease_s / RENEWALS_A_LEASE
        self.counts.renewed += len(sending) - len(fenced)
        self.counts.fenced += len(fenced)
        for place, out in sending.items():
            if place not in fenced:
                out.holds_until_s = now_s + lease_s
                continue
            out.fenced = True
            if out.sending is not None:
                out.sending.cancel()
            else:
                self._outs.discard(out)

    async def _hold_gone(self) -> None:
        """Take what waits for a destination that said it is gone out of the workers' way."""
        for stream in self._gone:
            await move_mail(self.means.database, self.tenant, stream)

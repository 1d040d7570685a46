"""One tenant's turn of the worker, from its checks to its last settlement (protocol section 7).

1. cancellation: nothing is begun once the worker stops
2. rate: one permit of `sync-delivery`; where there is none, nothing is claimed
3. claim: under a lease, no more than there are slots for, half of them for first attempts
4. send: side by side, while no connection is held; what takes long has its lease renewed
5. settle: what is known, all of it together (`out.py`)

Cut off at any point it hands back what it has, so that nobody has to wait for the end of its leases.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from postseal.envelope import dsse
from postseal.outbound.means import Counts, Means
from postseal.outbound.out import Outs
from postseal.outbound.scheduler import LANE, Turn
from postseal.outbound.targets import Target
from postseal.postgres.database import Connection
from postseal.postgres.deliveries import MAX_CLAIMED, Claimed, Lease, Mark, Wanted, claim_for_certain
from postseal.postgres.turns import Due
from postseal.rules.delivery import Attempted
from postseal.senders import Mail

PURPOSE = "sync-delivery"


@dataclass(frozen=True, slots=True)
class CycleReport:
    """How one turn went."""

    tenant: str
    counts: Counts
    seconds: float


@dataclass(eq=False, slots=True)
class Cycle:
    """One turn: within `bounded`, first `claim`, then `deliver`."""

    means: Means
    turn: Turn
    counts: Counts = field(default_factory=Counts)
    limited_s: float = 0.0
    """For how long the rate lets its tenant claim nothing."""
    _outs: Outs = field(init=False)
    _reserved: dict[int, int] = field(default_factory=dict[int, int])
    """Slots that were taken and in which nothing is sent yet, by stream."""
    _bound: asyncio.Timeout = field(init=False)

    def __post_init__(self) -> None:
        self._outs = Outs(self.means, self.turn.tenant, self.counts)

    @asynccontextmanager
    async def bounded(self) -> AsyncGenerator[None]:
        """At the end of the block, hand back what it still has. Raises TimeoutError after `cycle_timeout_s`."""
        try:
            async with asyncio.timeout(self.means.pace.cycle_timeout_s) as self._bound:
                yield
        finally:
            try:
                if self._outs:
                    await _to_its_end(self._outs.hand_back())
            finally:
                self._give_back_reserved()

    async def claim(self) -> Sequence[Due]:
        """Steps 1 to 3: claim what may be sent; returns the destinations that may have more. Raises Unavailable."""
        if self.means.stopping.is_set() or not self._permitted():
            return self.turn.due
        means, tenant = self.means, self.turn.tenant
        self._reserved = means.slots.take(tenant, [due.stream for due in self.turn.due], MAX_CLAIMED)
        began = {stream: means.marks.of(tenant, stream) for stream in self._reserved}
        wanted = [
            _wanted(due, self._reserved[due.stream], began[due.stream], means.random)
            for due in self.turn.due
            if due.stream in self._reserved
        ]
        if not wanted:
            return self.turn.due

        async def lease(connection: Connection) -> Claimed:
            return await claim_for_certain(connection, tenant, wanted, lane=LANE, lease_s=means.pace.lease_s)

        asked_s = means.clock()
        claimed = await means.database.exchange(lease)
        self._outs.take(claimed.leases, asked_s)
        self.counts.ended += claimed.ended
        found = Counter(lease.stream for lease in claimed.leases)
        for stream, mark in claimed.marks.items():
            means.marks.keep(tenant, stream, began=began[stream], reached=mark, found=found[stream])
        return _with_more(self.turn.due, wanted, claimed)

    async def deliver(self) -> None:
        """Steps 4 and 5: send what was claimed, and settle it. Raises Unavailable."""
        await self._begin()
        await self._outs.end()

    def _permitted(self) -> bool:
        quota = self.means.limiter.take(f"{self.turn.identity}/{PURPOSE}")
        if not quota.granted:
            self.counts.limited += 1
            self.limited_s = quota.retry_after_s
        return quota.granted

    async def _begin(self) -> None:
        """Begin to send everything at once; nothing if the worker stops meanwhile."""
        targets = await self.means.targets.of(self.turn.tenant, {out.lease.stream for out in self._outs})
        if self.means.stopping.is_set():
            await self._outs.hand_back()
            return
        for out in self._outs:
            target = targets[out.lease.stream]
            if target.taken_away or self.means.clock() >= out.holds_until_s:
                self._outs.release(out)
            elif target.fault is not None:
                self._outs.judge(out, Attempted(target.fault, ours=True))
            else:
                self._reserved[out.lease.stream] -= 1
                self._outs.send(out, self.means.sender.send(_mail(out.lease, target)))
        self._give_back_reserved()

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


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, which has bounds of its own, however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.result()

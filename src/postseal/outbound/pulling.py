"""A device claims and settles its own deliveries (protocol section 7, "Pull").

1. rate: one permit of `sync-delivery` a claim, keyed by tenant and device; where there is none, nothing is claimed
2. claim: from the destinations of the device's name in the projects of its credential, under the same leases as a
   worker's; the length of a lease is ours
3. with nothing due, wait: look again every LOOK_EVERY_S, and at once when somebody wakes the device
4. settle: behind the same fence; what the device does not settle is due again when its lease ends
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from uuid import UUID

from msgspec import Struct

from postseal.correlation import new_correlation_id
from postseal.door import RateLimited
from postseal.identity.verified import VerifiedIdentity
from postseal.limits import Rate, RateLimiter
from postseal.outbound.marks import Marks
from postseal.outcomes import Reason
from postseal.postgres.database import Connection, Database
from postseal.postgres.deliveries import MAX_CLAIMED, Claimed, Lease, Mark, Wanted, claim
from postseal.postgres.pulls import read_pulled
from postseal.postgres.settles import Settle, read_fences, settle
from postseal.remembered import Remembered
from postseal.rules.delivery import Attempted, Backoff, Code, decide

LANE = "pull"
PURPOSE = "sync-delivery"
LOOK_EVERY_S = 1.0
ENDING_S = 1.0
"""How long one look goes on over what can only be ended (expired, or out of attempts), before it comes to live mail."""
TENANT_SHARES = 2
"""No tenant has more than one part in so many of all waiting places."""
REMEMBERED_FOR_S = 5.0
REMEMBERED_DEVICES = 10_000
MAX_WAIT_S = 60.0

Marked = dict[int, Mark]
"""From where on in time to look, by stream; in the order in which they are looked at."""


class PullVerdict(StrEnum):
    """What a device says of a delivery."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REJECT = "reject"


_CODES = {PullVerdict.DELIVERED: None, PullVerdict.RETRY: Code.DEFERRED, PullVerdict.REJECT: Code.REJECTED}


class PullSettle(Struct, frozen=True):
    """One settlement of a device's. `attempt` and `token` are those of the claim.

    `retry_after_s` goes with a retry; it lengthens the wait within the cap of the backoff.
    """

    project: str
    sequence: int
    attempt: int
    token: UUID
    verdict: PullVerdict
    retry_after_s: float | None = None

    def __repr__(self) -> str:
        return f"PullSettle({self.project}, {self.sequence}, {self.verdict})"


class Pulling:
    """Claims and settlements of devices, in one process.

    `most_waiting` devices wait at once, and at most half of them one tenant's; the others are answered. Whoever calls
    has verified the caller: a device.
    """

    def __init__(
        self,
        database: Database,
        rate: Rate,
        *,
        lease_s: float,
        most_waiting: int,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.limiter = RateLimiter(rate, clock)
        self._database = database
        self._lease_s = lease_s
        self._most_waiting = most_waiting
        self._most_a_tenant = max(1, most_waiting // TENANT_SHARES)
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._chance = chance
        self._marks = Marks(clock)
        self._taken: Counter[str] = Counter()
        """Waiting places, by tenant."""
        self._waiting: dict[tuple[str, str], set[asyncio.Event]] = {}
        self._ended = False
        self._pulled: Remembered[tuple[str, str, frozenset[str]], dict[str, int]] = Remembered(
            entries=REMEMBERED_DEVICES, ttl_s=REMEMBERED_FOR_S, clock=clock
        )

    @property
    def waiting(self) -> int:
        """How many claims wait for something to be due."""
        return self._taken.total()

    async def claim(self, caller: VerifiedIdentity, *, most: int = MAX_CLAIMED, wait_s: float = 0.0) -> list[Lease]:
        """At most `most` deliveries (1 to 100) that the device now has for `lease_s`, waited for at most `wait_s`.

        Raises RateLimited, and Unavailable: then nothing is known to be claimed.
        """
        device = caller.device or ""
        quota = self.limiter.take(f"{caller.tenant}/{device}/{PURPOSE}")
        if not quota.granted:
            raise RateLimited(Reason.SYNC_RATE_LIMITED, quota, new_correlation_id())
        until_s = self._clock() + min(wait_s, MAX_WAIT_S)
        with self._place(caller.tenant, device, wanted=wait_s > 0) as woken:
            while True:
                if woken is not None:
                    woken.clear()
                leases = await self._claim(caller, most, max(until_s, self._clock() + ENDING_S))
                left_s = until_s - self._clock()
                if leases or left_s <= 0 or woken is None or self._ended:
                    return leases
                _require_not_cancelled()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_EVERY_S * (1 - self._chance() / 4))):
                        await woken.wait()

    async def settle(self, caller: VerifiedIdentity, settles: Sequence[PullSettle]) -> list[bool]:
        """Settle at most 100; whether each was, in order. One that was not is fenced: it changed nothing.

        Of two for the same claim the first counts. Raises Unavailable: then nothing is known to be settled, and the
        same may be settled again.
        """
        streams = await self._streams(caller)
        placed = [
            ((streams[each.project], each.sequence), number)
            for number, each in enumerate(settles)
            if each.project in streams
        ]
        if not placed:
            return [False] * len(settles)

        async def write(connection: Connection) -> set[int]:
            fences = await read_fences(connection, caller.tenant, {place for place, _ in placed})
            good: dict[tuple[int, int], int] = {}
            for place, number in placed:
                fence = fences.get(place)
                if fence and (fence.attempt, fence.token) == (settles[number].attempt, settles[number].token):
                    good.setdefault(place, number)
            written = [
                self._settle_of(stream, settles[number], fences[stream, sequence].attempt_limit)
                for (stream, sequence), number in good.items()
            ]
            fenced = await settle(connection, caller.tenant, written) if written else set[tuple[int, int]]()
            return {number for place, number in good.items() if place not in fenced}

        settled = await self._database.transact(write, tenant=caller.tenant)
        return [number in settled for number in range(len(settles))]

    def wake(self, tenant: str, device: str) -> None:
        """Something may be due for a device: let what waits look at once."""
        for woken in self._waiting.get((tenant, device), ()):
            woken.set()

    def end(self) -> None:
        """End every wait, and let none begin."""
        self._ended = True
        for each in self._waiting.values():
            for woken in each:
                woken.set()

    @contextmanager
    def _place(self, tenant: str, device: str, *, wanted: bool) -> Generator[asyncio.Event | None]:
        """What wakes a claim that waits, until the block ends; None if it may not wait."""
        full = self._taken[tenant] >= self._most_a_tenant or self.waiting >= self._most_waiting
        if not wanted or self._ended or full:
            yield None
            return
        woken = asyncio.Event()
        of_device = self._waiting.setdefault((tenant, device), set())
        of_device.add(woken)
        self._taken[tenant] += 1
        try:
            yield woken
        finally:
            self._taken[tenant] -= 1
            of_device.remove(woken)
            if not of_device:
                del self._waiting[tenant, device]

    async def _claim(self, caller: VerifiedIdentity, most: int, until_s: float) -> list[Lease]:
        """What can be claimed now. Each time another project comes first.

        What can only be ended stands in the way of live mail: then it looks again at once, until `until_s`.
        """
        streams = list((await self._streams(caller)).values())
        if not streams:
            return []
        first = int(self._chance() * len(streams))
        began = {stream: self._marks.of(caller.tenant, stream) for stream in streams[first:] + streams[:first]}
        claimed = Claimed([], 0, began)
        while True:
            some = await self._look(caller.tenant, claimed.marks, most)
            claimed = Claimed(some.leases, claimed.ended + some.ended, some.marks)
            if some.leases or not some.ended or self._ended or self._clock() >= until_s:
                break
            _require_not_cancelled()
        found = Counter(lease.stream for lease in claimed.leases)
        for stream, reached in claimed.marks.items():
            self._marks.keep(
                caller.tenant, stream, began=began[stream], reached=reached, found=found[stream] + claimed.ended
            )
        return claimed.leases

    async def _look(self, tenant: str, marks: Marked, most: int) -> Claimed:
        """One transaction: at least half for first attempts and the rest for others; to either what the other leaves.

        A single one is for either, so that neither waits for ever.
        """
        fresh = (most + 1) // 2 if most > 1 else round(self._chance())

        async def lease(connection: Connection) -> Claimed:
            claimed = await self._claim_of(connection, tenant, marks, fresh, most - fresh, most)
            left = most - len(claimed.leases)
            if not left or (most > 1 and not claimed.leases and not claimed.ended):
                return claimed
            more = await self._claim_of(connection, tenant, claimed.marks, left, left, left)
            return Claimed([*claimed.leases, *more.leases], claimed.ended + more.ended, more.marks)

        return await self._database.transact(lease, tenant=tenant)

    async def _claim_of(
        self, connection: Connection, tenant: str, marks: Marked, fresh: int, retries: int, most: int
    ) -> Claimed:
        """So many of either kind from each stream, and at most `most` in all."""
        wanted = [Wanted(stream, fresh, retries, mark.since, mark.retries_since) for stream, mark in marks.items()]
        return await claim(connection, tenant, wanted, lane=LANE, lease_s=self._lease_s, most=most)

    async def _streams(self, caller: VerifiedIdentity) -> dict[str, int]:
        """The streams that the device pulls, by project. Raises Unavailable."""
        device = caller.device or ""
        key = (caller.tenant, device, caller.projects)
        streams = self._pulled.recall(key)
        if streams is None:
            streams = await self._database.transact(
                lambda connection: read_pulled(
                    connection, tenant=caller.tenant, device=device, projects=caller.projects
                ),
                tenant=caller.tenant,
            )
            if streams:
                self._pulled.remember(key, streams)
        return streams

    def _settle_of(self, stream: int, told: PullSettle, attempt_limit: int) -> Settle:
        decision = decide(
            Attempted(_CODES[told.verdict], told.retry_after_s),
            attempt=told.attempt,
            attempt_limit=attempt_limit,
            backoff=self._backoff,
            random=self._chance(),
        )
        return Settle(
            stream, told.sequence, told.attempt, told.token, decision.verdict, decision.code, decision.delay_s
        )


def _require_not_cancelled() -> None:
    """Raise CancelledError if it got lost: asyncio.wait_for swallows it up to Python 3.11 where both come at once."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError

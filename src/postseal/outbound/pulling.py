"""A device claims and settles its own deliveries (protocol section 7, "Destinations": pull).

1. rate: one permit of `sync-delivery` a claim, keyed by tenant and device; where there is none, nothing is claimed
2. claim: from the destinations of the device's name in the projects of its credential, under the same leases as a
   worker's; the length of a lease is ours
3. with nothing due, wait: look again every LOOK_EVERY_S, and at once when somebody wakes the device
4. settle: behind the same fence; what the device does not settle is due again when its lease ends
"""

import asyncio
import random
import time
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
from postseal.postgres.settles import Settle, settle_for_certain
from postseal.remembered import Remembered
from postseal.rules.delivery import Backoff, Code, Verdict

LANE = "pull"
PURPOSE = "sync-delivery"
LOOK_EVERY_S = 1.0
REMEMBERED_FOR_S = 5.0
REMEMBERED_DEVICES = 10_000
MAX_WAIT_S = 60.0


class PullVerdict(StrEnum):
    """What a device says of a delivery."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REJECT = "reject"


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
    """Claims and settlements of devices, in one process. `most_waiting` devices wait at once, the others are answered.

    Whoever calls has verified the caller: a device.
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
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._chance = chance
        self._marks = Marks(clock)
        self.waiting = 0
        """How many claims wait for something to be due."""
        self._waiting: dict[tuple[str, str], set[asyncio.Event]] = {}
        self._ended = False
        self._pulled: Remembered[tuple[str, str, frozenset[str]], dict[str, int]] = Remembered(
            entries=REMEMBERED_DEVICES, ttl_s=REMEMBERED_FOR_S, clock=clock
        )

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
                leases = await self._claim(caller, most)
                left_s = until_s - self._clock()
                if leases or left_s <= 0 or woken is None or self._ended:
                    return leases
                _require_not_cancelled()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_EVERY_S * (1 - self._chance() / 4))):
                        await woken.wait()

    async def settle(self, caller: VerifiedIdentity, settles: Sequence[PullSettle]) -> list[bool]:
        """Settle at most 100; whether each was, in order. One that was not is fenced: it changed nothing.

        Raises Unavailable: then nothing is known to be settled, and the same may be settled again.
        """
        streams = await self._streams(caller)
        known: dict[tuple[int, int], int] = {}
        for number, each in enumerate(settles):
            if each.project in streams:
                # Of two for one delivery the first counts.
                known.setdefault((streams[each.project], each.sequence), number)
        if not known:
            return [False] * len(settles)
        written = [self._settle_of(stream, settles[number]) for (stream, _), number in known.items()]

        async def write(connection: Connection) -> set[tuple[int, int]]:
            return await settle_for_certain(connection, caller.tenant, written)

        fenced = await self._database.exchange(write)
        settled = {number for place, number in known.items() if place not in fenced}
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
        if not wanted or self._ended or self.waiting >= self._most_waiting:
            yield None
            return
        woken = asyncio.Event()
        of_device = self._waiting.setdefault((tenant, device), set())
        of_device.add(woken)
        self.waiting += 1
        try:
            yield woken
        finally:
            self.waiting -= 1
            of_device.remove(woken)
            if not of_device:
                del self._waiting[tenant, device]

    async def _claim(self, caller: VerifiedIdentity, most: int) -> list[Lease]:
        """What can be claimed now. Each time another project comes first."""
        streams = list((await self._streams(caller)).values())
        if not streams:
            return []
        first = int(self._chance() * len(streams))

        began = {stream: self._marks.of(caller.tenant, stream) for stream in streams[first:] + streams[:first]}

        async def lease(connection: Connection) -> dict[int, Claimed]:
            claimed: dict[int, Claimed] = {}
            left = most
            for stream, mark in began.items():
                if left:
                    claimed[stream] = await self._claim_of(connection, caller.tenant, stream, left, mark)
                    left -= len(claimed[stream].leases)
            return claimed

        claimed = await self._database.transact(lease)
        for stream, each in claimed.items():
            self._marks.keep(
                caller.tenant, stream, began=began[stream], reached=each.marks[stream], found=len(each.leases)
            )
        return [lease for each in claimed.values() for lease in each.leases]

    async def _claim_of(self, connection: Connection, tenant: str, stream: int, most: int, began: Mark) -> Claimed:
        """At least half for first attempts and the rest for others, and to either what the other leaves."""

        async def some(fresh: int, retries: int, mark: Mark) -> Claimed:
            wanted = Wanted(stream, fresh, retries, mark.since, mark.retries_since)
            return await claim(connection, tenant, [wanted], lane=LANE, lease_s=self._lease_s)

        fresh = (most + 1) // 2 if most > 1 else round(self._chance())
        claimed = await some(fresh, most - fresh, began)
        if most > 1 and not claimed.leases:
            return claimed
        for share in ((1, 0), (0, 1)):
            if left := most - len(claimed.leases):
                more = await some(left * share[0], left * share[1], claimed.marks[stream])
                claimed = Claimed([*claimed.leases, *more.leases], claimed.ended + more.ended, more.marks)
        return claimed

    async def _streams(self, caller: VerifiedIdentity) -> dict[str, int]:
        """The streams that the device pulls, by project. Raises Unavailable."""
        device = caller.device or ""
        key = (caller.tenant, device, caller.projects)
        streams = self._pulled.recall(key)
        if streams is None:
            streams = await self._database.transact(
                lambda connection: read_pulled(
                    connection, tenant=caller.tenant, device=device, projects=caller.projects
                )
            )
            if streams:
                self._pulled.remember(key, streams)
        return streams

    def _settle_of(self, stream: int, told: PullSettle) -> Settle:
        match told.verdict:
            case PullVerdict.DELIVERED:
                verdict, code, delay_s = Verdict.DELIVERED, None, 0.0
            case PullVerdict.REJECT:
                verdict, code, delay_s = Verdict.DEAD, Code.REJECTED, 0.0
            case PullVerdict.RETRY:
                asked_s = min(told.retry_after_s or 0.0, self._backoff.cap_s)
                delay_s = max(asked_s, self._backoff.delay_s(told.attempt, self._chance()))
                verdict, code = Verdict.RETRY, Code.REJECTED
        return Settle(stream, told.sequence, told.attempt, told.token, verdict, code, delay_s)


def _require_not_cancelled() -> None:
    """Raise CancelledError if it got lost: asyncio.wait_for swallows it up to Python 3.11 where both come at once."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError

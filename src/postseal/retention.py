"""Retention: payloads of ended deliveries get their time, and what has expired is deleted (protocol section 9).

In steps of two transactions of at most 1,000 payloads each, with a pause behind each step:

1. date: what has ended gets the time of its end plus its retention (role admin)
2. delete: of the tenants that come next, what has expired and is not held; each gets the same share (role sweep)

Any number of sweeps may run, in `serve` and beside it: one at a time has a batch, and the others come back later.
Nothing is known to a sweep that it could lose: killed at any moment, it leaves a batch done or not begun.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto

import psycopg
import structlog
from structlog.typing import FilteringBoundLogger

from postseal.errors import Unavailable
from postseal.postgres import payloads
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database, Part
from postseal.postgres.payloads import MAX_BATCH, Expired
from postseal.settings import Settings

LOOK_EVERY_S = 10.0
"""How long a sweep waits when nothing has expired, when another one is at it, or after a failure."""
MIN_BATCH = 10
SLOW_STEP_S = 0.5
"""After a step that takes longer, or fails, the next batches are half as large, down to MIN_BATCH: whoever places a
hold or redrives waits for a batch, for 2 s at most."""
CONNECTIONS = 2
"""One for each of the two roles."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.retention")


@dataclass(slots=True)
class Counts:
    """What a sweep did since it began."""

    dated: int = 0
    """Payloads of ended deliveries that got their time."""
    swept: int = 0
    """Payloads deleted."""
    failed: int = 0
    """Steps that were cut off by a failure."""


class Next(Enum):
    """What is to be done behind a step."""

    GO_ON = auto()
    """There may be more."""
    REST = auto()
    """A whole round over the tenants found nothing."""
    BUSY = auto()
    """Somebody else had the sweep's lock."""


class Sweeper:
    """Dates and deletes, a step at a time; where it stands among the tenants is all that it remembers."""

    def __init__(self, dating: Database, deleting: Database, *, default_retention_s: int, pause_s: float) -> None:
        self._dating = dating
        self._deleting = deleting
        self._default_retention_s = default_retention_s
        self._pause_s = pause_s
        self._after = ""
        self._found_in_round = 0
        self._batch = MAX_BATCH
        self.counts = Counts()

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep until `stop` is set; what fails is logged and tried again."""
        while not stop.is_set():
            try:
                what = await self._step()
            except (Unavailable, psycopg.Error) as error:
                _log.warning("sweep_failed", error=type(error).__name__, next_batch=self._batch)
                what = Next.REST
            await _until(stop, self._pause_s if what is Next.GO_ON else LOOK_EVERY_S)

    async def once(self, told: Callable[[int], None] = lambda _swept: None) -> Counts:
        """Sweep until nothing is left to delete; `told` hears of each step how many payloads it deleted.

        Raises Unavailable: what was deleted until then stays so.
        """
        while True:
            before = self.counts.swept
            what = await self._step()
            told(self.counts.swept - before)
            if what is Next.REST:
                return self.counts
            await asyncio.sleep(self._pause_s)

    async def _step(self) -> Next:
        clock, batch = asyncio.get_running_loop().time, self._batch
        began_s = clock()
        self._batch = max(batch // 2, MIN_BATCH)
        try:
            dated = await self._date(batch)
            swept = await self._delete(batch)
        except (Unavailable, psycopg.Error):
            self.counts.failed += 1
            raise
        if clock() - began_s <= SLOW_STEP_S:
            self._batch = min(batch * 2, MAX_BATCH)
        return Next.GO_ON if swept is Next.REST and dated == batch else swept

    async def _date(self, most: int) -> int:
        dated = await self._dating.transact(
            lambda connection: payloads.date_ended(connection, default_retention_s=self._default_retention_s, most=most)
        )
        self.counts.dated += dated
        self._found_in_round += dated  # of a tenant, perhaps, that the round has passed
        return dated

    async def _delete(self, most: int) -> Next:
        swept = await self._deleting.transact(
            lambda connection: payloads.delete_expired(connection, after=self._after, most=most)
        )
        if swept is None:
            return Next.BUSY
        self.counts.swept += swept.payloads
        self._after = swept.through
        self._found_in_round += swept.payloads
        if self._after:
            return Next.GO_ON
        found, self._found_in_round = self._found_in_round, 0
        return Next.GO_ON if found else Next.REST


@asynccontextmanager
async def composed_sweep(settings: Settings, access: Access) -> AsyncGenerator[Sweeper]:
    """A sweep, ready and idle, until the block ends."""
    async with AsyncExitStack() as held:
        dating, deleting = [
            await held.enter_async_context(
                Database(access.of(part), prepare=settings.prepared_statements, size=CONNECTIONS // 2)
            )
            for part in (Part.ADMIN, Part.SWEEP)
        ]
        yield Sweeper(
            dating,
            deleting,
            default_retention_s=settings.payload_retention_s,
            pause_s=settings.sweep_pause_s,
        )


@asynccontextmanager
async def running_sweep(settings: Settings, access: Access) -> AsyncGenerator[Sweeper]:
    """The same, sweeping until the block ends; a batch that is under way comes to its end."""
    stop = asyncio.Event()
    async with composed_sweep(settings, access) as sweeper:
        sweeping = asyncio.create_task(sweeper.run(stop))
        try:
            yield sweeper
        finally:
            stop.set()
            try:
                await asyncio.wait({sweeping})
            finally:
                sweeping.cancel()  # if whoever stops has no time


async def survey(deleting: Database) -> list[Expired]:
    """What has expired and is still there, by tenant, held ones among them; changes nothing.

    Payloads of ended deliveries that have no time yet are not among it. Raises Unavailable.
    """
    found: list[Expired] = []

    async def behind(connection: Connection) -> Expired | None:
        return await payloads.next_expired(connection, after=found[-1].tenant if found else "")

    while row := await deleting.transact(behind):
        found.append(row)
    return found


async def _until(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return

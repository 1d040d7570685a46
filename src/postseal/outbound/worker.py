"""The worker: tenants take turns, and each turn is a cycle of its own (`cycle.py`).

One loop takes a turn from the scheduler whenever there is a place, and begins a cycle with it. There are `cycles`
places; a cycle leaves its own when it is done, or after PATIENCE_S, so that receivers that hang hold up no other
tenant: how much they may have out is bounded by the slots (`slots.py`). With nothing to do, the loop looks again after
`poll_s` at most, and at once when it is woken.

Nothing here relies on the clock of this machine for what is due, leased or expired.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import psycopg
import structlog
from structlog.typing import FilteringBoundLogger

from postseal.errors import Unavailable
from postseal.limits import RateLimiter
from postseal.logs import where
from postseal.outbound.cycle import Cycle, CycleReport
from postseal.outbound.holding import move_mail
from postseal.outbound.marks import Marks
from postseal.outbound.means import Counts, Means, Pace
from postseal.outbound.out import CUT_S, HAND_BACK_S
from postseal.outbound.scheduler import LOOK_GAP_S, TenantScheduler, Turn
from postseal.outbound.slots import Slots
from postseal.outbound.targets import Targets
from postseal.postgres.database import Database
from postseal.postgres.lanes import misplaced
from postseal.postgres.turns import Due
from postseal.senders import Sender

PATIENCE_S = 0.05
"""A hundred tenants whose receivers hang have had their first turns within a second or two."""
SLOTS_A_CYCLE = 256
"""More than two claims: one tenant, which gets half of them all, can fill every cycle."""
AGAIN_S = 1.0
"""How long nothing is begun after the database was away."""
MEND_EVERY_S = 60.0
MENDED_STREAMS = 100

_log: FilteringBoundLogger = structlog.get_logger("postseal.worker")


class Worker:
    """Delivers while it is entered. Leaving it lets what is being sent come to its end, for `stop_grace_s` at most.

    What then still runs is cut off and handed back.
    """

    def __init__(
        self,
        database: Database,
        scheduler: TenantScheduler,
        sender: Sender,
        targets: Targets,
        pace: Pace,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.turns = 0
        """How many were begun."""
        self.failed_turns = 0
        self.timed_out_turns = 0
        self._database = database
        self._pace = pace
        self._scheduler = scheduler
        self._clock = clock
        self._chance = chance
        self._places = asyncio.Semaphore(pace.cycles)
        self._woken = asyncio.Event()
        self._lacking = False
        """Whether the scheduler was told of a destination that has no room."""
        self._limited: dict[str, float] = {}
        """Until when a tenant is limited."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._cycles: set[asyncio.Task[None]] = set()
        self._ended = Counts()
        self._used: set[Cycle] = set()
        self._stopping = asyncio.Event()
        self._slots = Slots(
            most=SLOTS_A_CYCLE * pace.cycles, per_destination=pace.destination_concurrency, freed=self._slot_freed
        )
        self._means = Means(
            pace=pace,
            database=database,
            sender=sender,
            targets=targets,
            limiter=RateLimiter(pace.rate, clock),
            slots=self._slots,
            marks=Marks(clock),
            stopping=self._stopping,
            clock=clock,
            random=chance,
        )

    @property
    def totals(self) -> Counts:
        """What came of deliveries since the worker was made."""
        totals = replace(self._ended)
        for cycle in self._used:
            totals.add(cycle.counts)
        return totals

    @property
    def out(self) -> int:
        """How many deliveries are out, or about to be."""
        return self._slots.taken

    async def __aenter__(self) -> Self:
        self._tasks = {asyncio.create_task(self._take_turns()), asyncio.create_task(self._mend())}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        try:
            # Whoever cancels the worker does not want to wait for receivers.
            if self._cycles and kind is not asyncio.CancelledError:
                await asyncio.wait(self._cycles, timeout=self._pace.stop_grace_s)
        finally:
            await self._cut_off()

    async def _cut_off(self) -> None:
        until_s = self._clock() + CUT_S + HAND_BACK_S
        tasks = {*self._tasks, *self._cycles}
        while tasks and (left_s := until_s - self._clock()) > 0:
            # More than once: up to Python 3.11 asyncio.wait_for, of which the pool makes use, can swallow it.
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=min(left_s, CUT_S))

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop` is set, and a little longer: see the class."""
        async with self:
            await stop.wait()

    async def run_once(self) -> CycleReport | None:
        """Use one turn and report it; None if nothing is due. Raises Unavailable, TimeoutError when it was cut off."""
        turn = await self._scheduler.next_turn(self._has_room)
        return None if turn is None else await self._use(turn)

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopping.set()
        self._woken.set()

    def wake(self) -> None:
        """Something may be due: look at once."""
        self._woken.set()

    async def _take_turns(self) -> None:
        while not self._stopping.is_set():
            await self._places.acquire()
            if turn := await self._next_turn():
                task = asyncio.create_task(self._use_or_log(turn))
                self._cycles.add(task)
                task.add_done_callback(self._cycles.discard)

    async def _next_turn(self) -> Turn | None:
        """The next turn, waited for; None once the worker stops."""
        woken = False
        while not self._stopping.is_set():
            self._woken.clear()
            self._lacking = False
            # The scheduler may have looked too shortly before it was woken.
            pause_s = LOOK_GAP_S if woken else self._pace.poll_s * (1 - self._chance() / 2)
            try:
                if turn := await self._scheduler.next_turn(self._has_room):
                    return turn
            except Exception as fault:  # noqa: BLE001 - the worker outlives whatever the database is going through
                _report("turns_not_read", fault)
                await asyncio.sleep(AGAIN_S)
            woken = await self._is_woken(pause_s)
        return None

    async def _is_woken(self, within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._woken.wait()
        return False

    def _has_room(self, due: Due) -> bool:
        limited = due.tenant in self._limited and self._clock() < self._limited[due.tenant]
        room = not limited and self._slots.has_room(due)
        self._lacking |= not room
        return room

    def _slot_freed(self) -> None:
        if self._lacking:
            self._woken.set()

    async def _use_or_log(self, turn: Turn) -> None:
        """A cycle in a place, which it leaves when it is done or its patience is."""
        place = [self._places]

        def leave() -> None:
            while place:
                place.pop().release()

        leaving = asyncio.get_running_loop().call_later(PATIENCE_S, leave)
        try:
            await self._use(turn)
        except TimeoutError:
            self.timed_out_turns += 1
            _log.warning("turn_timed_out", tenant=turn.tenant, seconds=self._pace.cycle_timeout_s)
        except Exception as fault:  # noqa: BLE001 - one turn's fault is not the next one's
            self.failed_turns += 1
            _report("turn_failed", fault)
        finally:
            leaving.cancel()
            leave()

    async def _use(self, turn: Turn) -> CycleReport:
        began_s = self._clock()
        cycle = Cycle(self._means, turn)
        self.turns += 1
        self._used.add(cycle)
        self._limited.pop(turn.tenant, None)
        try:
            async with cycle.bounded():
                again: Sequence[Due] = ()
                try:
                    again = await cycle.claim()
                finally:
                    if cycle.limited_s:
                        self._limited[turn.tenant] = self._clock() + cycle.limited_s
                    self._scheduler.done(turn, again)
                    self._woken.set()
                await cycle.deliver()
        finally:
            self._used.discard(cycle)
            self._ended.add(cycle.counts)
        return CycleReport(tenant=turn.tenant, seconds=self._clock() - began_s, counts=cycle.counts)

    async def _mend(self) -> None:
        """Move what stayed held, or in its lane, because whoever switched its destination did not come to the end."""
        database = self._database
        while not self._stopping.is_set():
            await asyncio.sleep(MEND_EVERY_S * (1 - self._chance() / 2))
            try:
                for tenant, stream in await database.transact(lambda c: misplaced(c, limit=MENDED_STREAMS)):
                    await move_mail(database, tenant, stream)
            except Exception as fault:  # noqa: BLE001 - as in _next_turn
                _report("not_mended", fault)


def _report(event: str, fault: Exception) -> None:
    """Log a fault; without its message, which may quote a row."""
    if isinstance(fault, Unavailable):
        _log.warning(event, error=str(fault))
    else:
        sqlstate = fault.sqlstate if isinstance(fault, psycopg.Error) else None
        _log.error(event, error=type(fault).__name__, sqlstate=sqlstate, at=where(fault))

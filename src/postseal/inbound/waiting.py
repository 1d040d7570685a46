"""Readers of one process that wait for a stream to go on.

Whoever knows how far a stream reaches says so by `reached`: this process's own commits, the hints of others, and the
truth, which is the database. It is asked every POLL_S at the latest for all streams that are waited for, by one
statement, however many readers wait for each.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.logs import where
from postseal.postgres.database import Database
from postseal.postgres.ingest import StreamKey
from postseal.postgres.reading import read_contiguous

POLL_S = 1.0
"""How long a waiting reader may miss what arrived when no hint comes; a random part of the latter half is left out, so
that many processes do not ask at once."""
TENANT_SHARES = 2
"""No tenant has more than one part in so many of all places."""
GAP_S = 0.05
"""What is asked for within it is asked for together."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.waiting")


@dataclass(eq=False, slots=True)
class Place:
    """One reader's wait for more than `after`."""

    stream: StreamKey
    after: int
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def goes_on(self, wait_s: float) -> bool:
        """Wait for at most `wait_s`; whether the stream reaches further than `after`, or all waiting has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.woken.wait()
        woken = self.woken.is_set()
        self.woken.clear()
        return woken


class Waiting:
    """All places of one process, at most `most`, and at most half of them one tenant's.

    Enter it to have them looked after.
    """

    def __init__(self, database: Database, *, most: int) -> None:
        self._database = database
        self._most = most
        self._most_a_tenant = max(1, most // TENANT_SHARES)
        self._taken: Counter[str] = Counter()
        self.places: dict[int, set[Place]] = {}
        """By the number of their stream."""
        self.begun = asyncio.Event()
        """Set once there was a first place."""
        self.ended = False
        self._asked: set[int] = set()
        self._asks = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look_after())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @contextmanager
    def place(self, stream: StreamKey, after: int) -> Generator[Place | None]:
        """A place until the block ends; None if there is none left, or waiting has ended."""
        taken = self._taken[stream.tenant]
        if self.ended or taken >= self._most_a_tenant or self._taken.total() >= self._most:
            yield None
            return
        place = Place(stream, after)
        places = self.places.setdefault(stream.stream, set())
        places.add(place)
        self._taken[stream.tenant] += 1
        self.begun.set()
        self._ask({stream.stream})  # for what came since the reader looked
        try:
            yield place
        finally:
            self._taken[stream.tenant] -= 1
            places.remove(place)
            if not places:
                del self.places[stream.stream]

    def reached(self, stream: int, contiguous: int) -> None:
        """A stream reaches so far: whoever waits for less than that is woken."""
        for place in self.places.get(stream, ()):
            if place.after < contiguous:
                place.woken.set()

    def look_at_all(self) -> None:
        """Anything may have happened: ask the database of all streams soon."""
        self._ask(self.places)

    def end(self) -> None:
        """End every wait, and let none begin."""
        self.ended = True
        for places in self.places.values():
            for place in places:
                place.woken.set()

    def _ask(self, streams: set[int] | dict[int, set[Place]]) -> None:
        self._asked.update(streams)
        self._asks.set()

    async def _look_after(self) -> None:
        due_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(due_s - time.monotonic()):
                    await self._asks.wait()
            now_s = time.monotonic()
            if now_s >= due_s:
                self.look_at_all()
                due_s = now_s + POLL_S * random.uniform(0.5, 1)  # noqa: S311 - jitter, no secret
            self._asks.clear()
            await self._look()
            await asyncio.sleep(GAP_S)

    async def _look(self) -> None:
        asked, self._asked = self._asked, set()
        streams = [next(iter(self.places[number])).stream for number in asked if number in self.places]
        if not streams:
            return
        try:
            reached = await self._database.transact(lambda connection: read_contiguous(connection, streams))
        except Exception as fault:  # noqa: BLE001 - whatever fails here must not leave all readers waiting
            _log.warning("streams_not_read", error=type(fault).__name__, at=where(fault))
            return
        for number, contiguous in reached.items():
            self.reached(number, contiguous)

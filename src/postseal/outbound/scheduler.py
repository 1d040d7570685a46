"""Whose turn it is: in which order the tenants that have due deliveries are served (protocol section 7, "Fairness").

A tenant has one turn, then the next tenant. Within a tenant its destinations take turns too, so that one destination's
backlog does not keep another's mail waiting. Where nothing fits at the moment (`has_room`), the next one is asked.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.postgres.database import Connection, Database
from postseal.postgres.turns import END, LAST_STREAM, START, Due, LookTimeout, Position, due_turns, pending_turns

LANE = "push"
STREAMS_A_TURN = 100
"""A claim takes at most so many deliveries, and at least one of each stream that it is for."""
PAGE_STREAMS = 1_000
"""Of streams with mail, be it due or not."""
PAGES_A_LOOK = 8
LOOK_EVERY_S = 1.0
"""How long a tenant whose mail becomes due can stay unseen while others keep the worker busy."""
LOOK_GAP_S = 0.05
"""The least between two looks, however often somebody wakes the worker."""
BY_PENDING_S = 60.0
"""How long streams are read by what is pending, once the queue took too long."""
MAX_SEEN_STREAMS = 20_000
"""Beyond this nothing more is looked for before some of it was served."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.scheduler")

HasRoom = Callable[[Due], bool]
"""Whether something for that destination could be sent now."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One tenant's turn: the destinations that it may be used for, at most STREAMS_A_TURN."""

    tenant: str
    due: Sequence[Due]

    @property
    def identity(self) -> str:
        """Under which trusted name the turn is rate limited."""
        return f"tenant-scheduler/{self.tenant}"


class TenantScheduler(Protocol):
    """Picks the next tenant. One worker asks it; calls of `next_turn` do not overlap."""

    async def next_turn(self, has_room: HasRoom) -> Turn | None:
        """The next turn, with such destinations alone as have room; None if nothing is due that has.

        What is in a turn may be in the next one before `done`, if more of it is due. Raises Unavailable.
        """
        ...

    def done(self, turn: Turn, again: Iterable[Due], /) -> None:
        """The turn was used; `again` is what of it may have more that is due."""
        ...


class RoundRobin:
    """Fair turns over all tenants that have due deliveries.

    It keeps what it saw in the database and looks again when that is used up, and every LOOK_EVERY_S. A look is bounded
    and goes on where the last one ended; no connection is held in between. In one round a tenant with very many
    destinations shows its first page of them, and a second one that goes on from round to round.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._pages = _Pages(database, clock)
        self._turns = _Turns(self._look, lambda: self._pages.gap_s, clock)
        self._after = START
        self._deep: dict[str, int] = {}

    async def next_turn(self, has_room: HasRoom) -> Turn | None:
        """The next tenant's."""
        return await self._turns.next(has_room)

    def done(self, _turn: Turn, again: Iterable[Due], /) -> None:
        """Put `again` at the end of the tenant's line."""
        self._turns.add(again)

    async def _look(self) -> None:
        from_start, seen = self._after == START, False
        for _ in range(PAGES_A_LOOK):
            seen |= self._turns.add(await self._next_page())
            if self._after == START:
                if from_start or seen:
                    return
                from_start = True

    async def _next_page(self) -> list[Due]:
        """The next page of streams; moves on behind it, to the start again where it was the last."""
        tenant, stream = self._after
        if stream != LAST_STREAM:
            stream = max(stream, self._deep.pop(tenant, 0))
        page = await self._pages.read((tenant, stream), END)
        if len(page) < PAGE_STREAMS:
            self._after = START
            return page
        last = page[-1]
        self._after = (last.tenant, last.stream)
        if page[0].tenant == last.tenant == tenant:
            self._deep[tenant] = last.stream
            self._after = (tenant, LAST_STREAM)
        return page


class FixedTenants:
    """Turns over a fixed list of tenants: each of several workers has its share of them."""

    def __init__(self, database: Database, tenants: Sequence[str], clock: Callable[[], float]) -> None:
        self._pages = _Pages(database, clock)
        self._turns = _Turns(self._look, lambda: self._pages.gap_s, clock)
        self._after = dict.fromkeys(tenants, 0)

    async def next_turn(self, has_room: HasRoom) -> Turn | None:
        """The next of the list that has anything due."""
        return await self._turns.next(has_room)

    def done(self, _turn: Turn, again: Iterable[Due], /) -> None:
        """Put `again` at the end of the tenant's line."""
        self._turns.add(again)

    async def _look(self) -> None:
        for tenant, stream in self._after.items():
            page = await self._pages.read((tenant, stream), (tenant, LAST_STREAM))
            self._turns.add(page)
            self._after[tenant] = page[-1].stream if len(page) == PAGE_STREAMS else 0


class _Pages:
    """Pages of PAGE_STREAMS streams, with what of each is due.

    While some snapshot stays open for hours, the queue's index is full of dead entries and takes too long to read. What
    is pending then stands for what is due: claims go on from their marks and tell the rest.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._by_pending_until_s: float | None = None

    @property
    def gap_s(self) -> float:
        """The least between two looks."""
        return LOOK_GAP_S if self._by_pending_until_s is None else LOOK_EVERY_S

    async def read(self, after: Position, through: Position) -> list[Due]:
        """The first page behind `after`, through `through`. Raises Unavailable."""
        if self._by_pending_until_s is not None and self._clock() < self._by_pending_until_s:
            return await self._read_page(after, through, by_pending=True)
        try:
            page = await self._read_page(after, through)
        except LookTimeout:
            _log.warning("queue_reads_slowly", seconds=BY_PENDING_S)
            self._by_pending_until_s = self._clock() + BY_PENDING_S
            return await self._read_page(after, through, by_pending=True)
        self._by_pending_until_s = None
        return page

    async def _read_page(self, after: Position, through: Position, *, by_pending: bool = False) -> list[Due]:
        turns = pending_turns if by_pending else due_turns

        async def read(connection: Connection) -> list[Due]:
            return await turns(connection, lane=LANE, after=after, through=through, limit=PAGE_STREAMS)

        return await self._database.transact(read)


class _Turns:
    """What was seen to be due, tenant after tenant; looks for more by `look` when it may and must.

    `gap_s` says how long it leaves between two looks at least.
    """

    def __init__(
        self, look: Callable[[], Awaitable[None]], gap_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._look = look
        self._gap_s = gap_s
        self._clock = clock
        self._looked_s = -LOOK_EVERY_S
        self._tenants: OrderedDict[str, OrderedDict[int, Due]] = OrderedDict()
        self._streams = 0

    def add(self, dues: Iterable[Due]) -> bool:
        """Put what is due at the end of its tenant's line, unless it stands there already; whether anything is."""
        added = False
        for due in dues:
            if due.fresh_due or due.retries_due:
                streams = self._tenants.setdefault(due.tenant, OrderedDict())
                self._streams += due.stream not in streams
                streams[due.stream] = due
                added = True
        return added

    async def next(self, has_room: HasRoom) -> Turn | None:
        """The first tenant with room for something, which then stands last."""
        since_s = self._clock() - self._looked_s
        if since_s < LOOK_EVERY_S and (turn := self._take(has_room)):
            return turn
        if since_s >= self._gap_s() and self._streams < MAX_SEEN_STREAMS:
            self._looked_s = self._clock()
            await self._look()
        return self._take(has_room)

    def _take(self, has_room: HasRoom) -> Turn | None:
        for _ in range(len(self._tenants)):
            tenant, streams = self._tenants.popitem(last=False)
            ready = [due for due in streams.values() if has_room(due)][:STREAMS_A_TURN]
            for due in ready:
                del streams[due.stream]
            self._streams -= len(ready)
            if streams:
                self._tenants[tenant] = streams
            if ready:
                return Turn(tenant, ready)
        return None

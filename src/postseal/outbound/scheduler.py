"""Whose turn it is: in which order the tenants that have due deliveries are served (protocol section 7, "Fairness").

A tenant has one turn, then the next tenant. Within a tenant its destinations take turns too, so that one destination's
backlog does not keep another's mail waiting. Where nothing fits at the moment (`has_room`), the next one is asked.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from postseal.postgres.database import Connection, Database
from postseal.postgres.turns import Due, due_turns

LANE = "push"
STREAMS_A_TURN = 100
"""A claim takes at most so many deliveries, and at least one of each stream that it is for."""
PAGE_STREAMS = 256
PAGES_A_LOOK = 8
LOOK_EVERY_S = 1.0
"""How long a tenant whose mail becomes due can stay unseen while others keep the worker busy."""
LOOK_GAP_S = 0.05
"""The least between two looks, however often somebody wakes the worker."""
MAX_SEEN_STREAMS = 20_000
"""Beyond this nothing more is looked for before some of it was served."""
LAST_STREAM = 2**63 - 1

HasRoom = Callable[[Due], bool]
"""Whether something for that destination could be sent now."""
Position = tuple[str, int]
"""A tenant and a stream behind which a page begins."""
START: Position = ("", 0)


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

        What is in a turn is in no other one until `done`. Raises Unavailable.
        """
        ...

    def done(self, turn: Turn, again: Iterable[Due], /) -> None:
        """The turn was used; `again` is what of it may have more that is due."""
        ...


class RoundRobin:
    """Fair turns over all tenants that have due deliveries.

    It keeps what it saw in the database and looks again when that is used up, and every LOOK_EVERY_S. A look is bounded
    and goes on where the last one ended; no connection is held in between. In one round a tenant with very many due
    destinations shows its first page of them, and a second one that goes on from round to round.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._turns = _Turns(self._look, clock)
        self._after = START
        self._deep: dict[str, int] = {}

    async def next_turn(self, has_room: HasRoom) -> Turn | None:
        """The next tenant's."""
        return await self._turns.next(has_room)

    def done(self, _turn: Turn, again: Iterable[Due], /) -> None:
        """Put `again` at the end of the tenant's line."""
        self._turns.add(again)

    async def _look(self) -> None:
        from_start, seen = self._after == START, 0
        for _ in range(PAGES_A_LOOK):
            page = await self._next_page()
            seen += len(page)
            self._turns.add(page)
            if self._after == START:
                if from_start or seen:
                    return
                from_start = True

    async def _next_page(self) -> list[Due]:
        """The next page of what is due; moves on behind it, to the start again where it was the last."""
        tenant, stream = self._after
        if stream != LAST_STREAM:
            stream = max(stream, self._deep.pop(tenant, 0))
        page = await _read_due(self._database, (tenant, stream), PAGE_STREAMS)
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
        self._database = database
        self._turns = _Turns(self._look, clock)
        self._after = dict.fromkeys(tenants, 0)

    async def next_turn(self, has_room: HasRoom) -> Turn | None:
        """The next of the list that has anything due."""
        return await self._turns.next(has_room)

    def done(self, _turn: Turn, again: Iterable[Due], /) -> None:
        """Put `again` at the end of the tenant's line."""
        self._turns.add(again)

    async def _look(self) -> None:
        for tenant, stream in self._after.items():
            page = await _read_due(self._database, (tenant, stream), STREAMS_A_TURN)
            mine = [due for due in page if due.tenant == tenant]
            self._turns.add(mine)
            self._after[tenant] = mine[-1].stream if len(mine) == STREAMS_A_TURN else 0


async def _read_due(database: Database, after: Position, limit: int) -> list[Due]:
    async def read(connection: Connection) -> list[Due]:
        return await due_turns(connection, lane=LANE, after=after, limit=limit)

    return await database.transact(read)


class _Turns:
    """What was seen to be due, tenant after tenant; looks for more by `look` when it may and must."""

    def __init__(self, look: Callable[[], Awaitable[None]], clock: Callable[[], float]) -> None:
        self._look = look
        self._clock = clock
        self._looked_s = -LOOK_EVERY_S
        self._tenants: OrderedDict[str, OrderedDict[int, Due]] = OrderedDict()
        self._streams = 0

    def add(self, dues: Iterable[Due]) -> None:
        """Put each at the end of its tenant's line, unless it stands there already."""
        for due in dues:
            streams = self._tenants.setdefault(due.tenant, OrderedDict())
            self._streams += due.stream not in streams
            streams[due.stream] = due

    async def next(self, has_room: HasRoom) -> Turn | None:
        """The first tenant with room for something, which then stands last."""
        since_s = self._clock() - self._looked_s
        if since_s < LOOK_EVERY_S and (turn := self._take(has_room)):
            return turn
        if since_s >= LOOK_GAP_S and self._streams < MAX_SEEN_STREAMS:
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

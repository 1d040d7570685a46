"""No tenant takes the whole pool: what waits for one tenant's locks leaves connections to the others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from postseal.errors import Unavailable
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.shares import Shares
from postseal.postgres.transaction import Connection
from until import until_async

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Let tests run on asyncio, which psycopg needs."""
    return "asyncio"


@pytest.fixture
async def database(shared_access: Access) -> AsyncIterator[Database]:
    """A pool of four."""
    async with Database(shared_access.of(Part.DELIVERY), prepare=True, size=4) as database:
        yield database


class Gate:
    """What holds its connection until the gate is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.inside = 0

    async def wait(self, _connection: Connection) -> None:
        """Hold a connection."""
        self.inside += 1
        await self.open.wait()


async def nothing(_connection: Connection) -> None:
    """A transaction that does nothing."""


async def test_a_tenant_has_half_of_the_pool(database: Database) -> None:
    """However much it asks for at once, another one is served meanwhile; and then all of it is done."""
    gate = Gate()
    asked = [asyncio.create_task(database.transact(gate.wait, tenant="acme")) for _ in range(8)]
    try:
        await until_async(lambda: gate.inside == 2)
        async with asyncio.timeout(3):
            await database.transact(nothing, tenant="globex")
            await database.transact(nothing)
        assert gate.inside == 2
    finally:
        gate.open.set()
        await asyncio.gather(*asked)
    assert gate.inside == 8
    assert database._shares._shares == {}


async def test_a_share_is_not_waited_for_without_end(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has waited too long is told to come again; nothing of theirs was begun."""
    monkeypatch.setattr(database, "_shares", Shares(1, wait_s=0.1))
    gate = Gate()
    first = asyncio.create_task(database.transact(gate.wait, tenant="acme"))
    try:
        await until_async(lambda: gate.inside == 1)
        with pytest.raises(Unavailable):
            await database.transact(gate.wait, tenant="acme")
    finally:
        gate.open.set()
        await first
    assert gate.inside == 1


@pytest.mark.parametrize("after_steps", range(6))
async def test_who_goes_away_leaves_their_place(after_steps: int) -> None:
    """Whether they waited for it, just got it, or had it."""
    held = Shares(1, wait_s=5)

    async def hold(work: Callable[[], Awaitable[object]]) -> None:
        async with held.place("acme"):
            await work()

    gate = asyncio.Event()
    first = asyncio.create_task(hold(gate.wait))
    second = asyncio.create_task(hold(asyncio.Event().wait))
    await asyncio.sleep(0)
    gate.set()
    for _ in range(after_steps):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({first, second})
    async with asyncio.timeout(1):
        await hold(lambda: asyncio.sleep(0))
    assert held._shares == {}

"""The database goes away and comes back: `unavailable` within bounds meanwhile, and work again without a restart."""

import asyncio
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest
from psycopg_pool.base import AttemptWithBackoff

from fleet import PEER, Device, enrol, stored
from own_server import OwnServer, own_server
from postseal.errors import Unavailable
from postseal.inbound import lane
from postseal.inbound.inbox import Inbound
from postseal.outcomes import Outcome, Reason
from postseal.postgres import database
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt

pytestmark = pytest.mark.anyio

POOL_WAIT_S = 0.5
DEADLINE_S = 0.5
"""Of an exchange during the outage; before and after it they have their usual time."""
CONNECT_TIMEOUT_S = 2
"""The least that libpq knows."""
BOUND_S = 4.0
"""A little more than a connection attempt and a deadline together."""
BACK_WITHIN_S = 8.0
OUTAGE_S = 2.5


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bounds, in seconds that a test has."""
    monkeypatch.setattr(database, "POOL_WAIT_S", POOL_WAIT_S)
    # An outage of minutes: the pool's own back-off has grown to this by then.
    monkeypatch.setattr(AttemptWithBackoff, "INITIAL_DELAY", 60.0)
    monkeypatch.setitem(database.KEEPALIVE, "connect_timeout", str(CONNECT_TIMEOUT_S))


@contextmanager
def impatient() -> Generator[None]:
    """Exchanges are given up after DEADLINE_S until the block ends."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(database, "DATABASE_DEADLINE_S", DEADLINE_S)
        patched.setattr(lane, "DATABASE_DEADLINE_S", DEADLINE_S)
        yield


@pytest.fixture
def server() -> Iterator[OwnServer]:
    """A database of this test's own."""
    with own_server() as server:
        yield server


async def answer(service: Service, device: Device, body: bytes) -> Outcome | Reason:
    """The answer, which must come within the bound."""
    try:
        async with asyncio.timeout(BOUND_S):
            caller = await service.door.identify(PEER, device.token.reveal())
            verdict = await service.inbox.receive(Inbound(caller, body))
    except Unavailable:
        return Reason.UNAVAILABLE
    return verdict.outcome if isinstance(verdict, Receipt) else verdict.reason


async def require_back(service: Service, device: Device, body: bytes) -> Outcome | Reason:
    """Try until it is no more `unavailable`, for a bounded time."""
    give_up = time.monotonic() + BACK_WITHIN_S
    while (told := await answer(service, device, body)) is Reason.UNAVAILABLE:
        assert time.monotonic() < give_up, "the service did not come back"
        await asyncio.sleep(0.05)
    return told


async def test_a_database_that_stops_and_comes_back(server: OwnServer):
    """For a device that is remembered and for one that must be looked up first."""
    known, stranger = enrol(server.access, "known"), enrol(server.access, "stranger")
    async with running_service(Settings(), server.access) as service:
        assert await answer(service, known, known.envelope(1)) is Outcome.ACCEPTED
        await asyncio.to_thread(server.stop)
        missed = {known.name: known.envelope(2), stranger.name: stranger.envelope(1)}
        until_s = time.monotonic() + OUTAGE_S
        with impatient():
            while time.monotonic() < until_s:
                for device in (known, stranger):
                    assert await answer(service, device, missed[device.name]) is Reason.UNAVAILABLE
        await asyncio.to_thread(server.start)
        for device in (known, stranger):
            assert await require_back(service, device, missed[device.name]) is Outcome.ACCEPTED
        assert await answer(service, known, known.envelope(3)) is Outcome.ACCEPTED
    assert stored(server.access, known).cursor == (0, 3, 3)
    assert stored(server.access, stranger).cursor == (0, 1, 1)


async def test_a_database_that_freezes_and_thaws(server: OwnServer):
    """It holds its connections and says nothing: the client's own deadlines are all there is."""
    known, stranger = enrol(server.access, "known"), enrol(server.access, "stranger")
    async with running_service(Settings(), server.access) as service:
        assert await answer(service, known, known.envelope(1)) is Outcome.ACCEPTED
        missed = {known.name: known.envelope(2), stranger.name: stranger.envelope(1)}
        with server.frozen(), impatient():
            for device in (known, stranger, known):
                assert await answer(service, device, missed[device.name]) is Reason.UNAVAILABLE
        for device in (known, stranger):
            # What was on its way when it froze may have been committed after the thaw.
            told = await require_back(service, device, missed[device.name])
            assert told in (Outcome.ACCEPTED, Outcome.DUPLICATE)
    assert stored(server.access, known).cursor == (0, 2, 2)
    assert stored(server.access, stranger).cursor == (0, 1, 1)

"""Cancellation at every await of a turn: nothing is lost, nothing stays out but by its lease, all slots come back."""

import asyncio
import random
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from mailing import FakeSender, at_once, fill, make_all_due, make_box, make_worker, stages

from fleet import as_owner
from postseal.outbound import scheduler
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.rules.delivery import Attempted, Code
from postseal.senders import Mail

pytestmark = pytest.mark.anyio

MANY = 1_000


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker looks whenever it likes."""
    monkeypatch.setattr(scheduler, "LOOK_GAP_S", 0.0)


class Cancelled:
    """Runs a coroutine as its task and cancels that where it waits for the time `at`, and for the time `again`."""

    def __init__(self, work: Coroutine[Any, Any, object], at: int, again: int = MANY) -> None:
        self.waits = 0
        self._work = work
        self._at = {at, again}

    def __await__(self) -> Generator[Any, Any, object]:
        """Drive it wait by wait."""
        task = asyncio.current_task()
        assert task is not None
        sent, thrown = None, None
        while True:
            try:
                waited_for = self._work.throw(thrown) if thrown else self._work.send(sent)
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits in self._at:
                asyncio.get_running_loop().call_soon(task.cancel)
            sent, thrown = None, None
            try:
                sent = yield waited_for
            except BaseException as error:  # noqa: BLE001 - handed on
                thrown = error


async def driven(driver: Cancelled) -> None:
    """Run it in a task of its own, to whatever end."""

    async def run() -> None:
        await driver

    await asyncio.wait({asyncio.create_task(run())})


async def a_turn(access: Access, database: Database, at: int, again: int = MANY) -> tuple[int, bool]:
    """One cancelled turn on fresh mail, and what must hold after it; how often it waited, and whether it was begun."""
    box = make_box(access, f"box-{at}-{again}")
    fill(access, box, 6)

    async def answer(mail: Mail) -> Attempted:
        await asyncio.sleep(0.002 * (mail.attempt % 3))
        number = len(sender.begun) % 3
        return Attempted((None, Code.STATUS_5XX, Code.CONNECT_FAILED)[number])

    sender = FakeSender(answer)
    one = make_worker(database, sender)
    turn = Cancelled(one.run_once(), at, again)
    await driven(turn)
    assert one.out == 0
    assert sender.now.total() == 0
    begun = bool(sender.begun)
    left = stages(access, box)
    assert left.total() == 6
    if begun:
        assert left["leased"] == 0
    return turn.waits, begun


async def finish(access: Access, database: Database) -> None:
    """Deliver all that is left, whoever had it."""
    sender = at_once()
    one = make_worker(database, sender, destination_concurrency=100)
    for _ in range(200):
        make_all_due(access)
        if await one.run_once() is None:
            break
    with as_owner(access) as owner:
        assert owner.execute("SELECT count(*) FROM queue").fetchone() == (0,)
        rows = owner.execute("SELECT state, count(*) FROM settlements GROUP BY 1").fetchall()
        sums = owner.execute(
            "SELECT bool_and(highest = settled), sum(highest) FROM destinations JOIN destination_health "
            "USING (tenant, stream)"
        ).fetchone()
    assert dict(rows) == {"delivered": sums[1]} if sums else False
    assert sums is not None
    assert sums[0]


async def test_cancelled_at_every_await(access: Access, database: Database):
    """Of a turn from the look to the last settlement."""
    at = reached = 0
    while True:
        at += 1
        waits, begun = await a_turn(access, database, at)
        reached += begun
        if waits < at:
            break
    assert at >= 6
    assert reached >= 3
    await finish(access, database)


async def cancelled_again(access: Access, database: Database, chance: random.Random, most: int) -> None:
    """Cancel turns twice: at one of their waits, and one to three waits later; at most so many of these pairs."""
    last, _ = await a_turn(access, database, MANY)
    pairs = [(at, at + later) for at in range(1, last + 1) for later in (1, 2, 3)]
    for at, again in chance.sample(pairs, min(most, len(pairs))):
        await a_turn(access, database, at, again)
    await finish(access, database)


async def test_cancelled_again_while_it_hands_back(access: Access, database: Database, seed: int):
    """Whoever is impatient does not keep a turn from handing back what it has: ten of the moments for it."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    await cancelled_again(access, database, random.Random(seed), 10)


@pytest.mark.soak
async def test_cancelled_again_at_every_await(access: Access, database: Database, seed: int):
    """All of them."""
    await cancelled_again(access, database, random.Random(seed), MANY)

"""Workers that crash, freeze past their leases and come back do what a model of one page says, in whatever order.

Each seed is one history of some eighty steps on real PostgreSQL. After each step the queue, the settlements and the
counters must fit together; at the end every delivery is settled once, and every worker knows which ones it settled.
A failure prints its seed: POSTSEAL_TEST_SEED=... repeats the run.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

import psycopg
import pytest
from mailing import Box, FakeSender, at_once, delivering, fill, make_all_due, make_box, make_worker

from fleet import as_owner
from postseal.errors import Unavailable
from postseal.outbound import out, scheduler
from postseal.outbound.cycle import CycleReport
from postseal.outbound.means import Counts
from postseal.outbound.worker import Worker
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database
from postseal.rules.delivery import Attempted, Code
from postseal.senders import Mail
from until import until_async

pytestmark = pytest.mark.anyio

T = TypeVar("T")

STEPS = 80
WORKERS = 3
LIMIT = 4
TENANTS = count()
RESULTS = (Attempted(), Attempted(), Attempted(Code.STATUS_5XX), Attempted(Code.SEND_TIMEOUT), Attempted(Code.REJECTED))

Place = tuple[int, int]
"""Stream and sequence."""


class Frail:
    """A worker's way to the database: it can freeze, from one exchange on or when it is told, and it can be lost."""

    def __init__(self, database: Database, freezes_at: int | None) -> None:
        self._database = database
        self._freezes_at = freezes_at
        self._exchanges = 0
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.lost = False
        self.waiting = 0
        self.busy = 0

    async def exchange(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """As the database does."""
        return await self._through(self._database.exchange, work)

    async def transact(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """As the database does."""
        return await self._through(self._database.transact, work)

    async def _through(self, do: Callable[[Any], Coroutine[Any, Any, T]], work: Any) -> T:
        if self._exchanges == self._freezes_at:
            self.thawed.clear()
        self._exchanges += 1
        if not self.thawed.is_set():
            self.waiting += 1
            try:
                await self.thawed.wait()
            finally:
                self.waiting -= 1
        if self.lost:
            raise Unavailable("the process is gone")
        self.busy += 1
        try:
            return await do(work)
        finally:
            self.busy -= 1


@dataclass
class Player:
    """One worker that is using a turn."""

    worker: Worker
    database: Frail
    turn: asyncio.Task[CycleReport | None]
    sender: FakeSender
    out: list[tuple[Mail, asyncio.Future[Attempted]]] = field(default_factory=list)

    @property
    def rests(self) -> bool:
        """Whether nothing happens without another step."""
        all_out = all(not answer.done() for _, answer in self.out)
        sending = bool(self.sender.now.total()) and not self.database.busy and all_out
        return self.turn.done() or bool(self.database.waiting) or sending


@dataclass
class Model:
    """What was seen so far, and what must hold."""

    owner: psycopg.Connection[tuple[Any, ...]]
    streams: list[int]
    total: int = 0
    attempts: dict[Place, int] = field(default_factory=dict[Place, int])
    settled: dict[Place, tuple[Any, ...]] = field(default_factory=dict[Place, tuple[Any, ...]])
    lost_counts: Counter[UUID] = field(default_factory=Counter[UUID])
    sent: Counter[UUID] = field(default_factory=Counter[UUID])
    received: set[UUID] = field(default_factory=set[UUID])

    def rows(self, select: str) -> list[tuple[Any, ...]]:
        """Rows of the streams of this history."""
        return self.owner.execute(select.encode(), {"streams": self.streams}).fetchall()

    def check(self) -> None:
        """Queue, settlements and counters fit together; nothing that was settled changes, no attempt is taken back."""
        queued = self.rows(
            "SELECT stream, sequence, attempt, attempt_limit, stage, token FROM queue WHERE stream = ANY (%(streams)s)"
        )
        settled = {
            (stream, sequence): tuple(rest)
            for stream, sequence, *rest in self.rows(
                "SELECT stream, sequence, state, code, attempt, attempt_limit FROM settlements "
                "WHERE stream = ANY (%(streams)s)"
            )
        }
        pending = self.rows(
            "SELECT stream, highest - settled FROM destinations JOIN destination_health USING (tenant, stream) "
            "WHERE stream = ANY (%(streams)s) AND highest > settled"
        )
        places = {(stream, sequence) for stream, sequence, *_ in queued}
        assert not places & settled.keys()
        assert len(places) + len(settled) == self.total
        assert dict(pending) == Counter(stream for stream, _ in places)
        assert settled.items() >= self.settled.items()
        self.settled = settled
        for stream, sequence, attempt, attempt_limit, stage, token in queued:
            assert self.attempts.get((stream, sequence), 0) <= attempt <= attempt_limit
            assert (token is not None) == (stage == "leased")
            self.attempts[stream, sequence] = attempt
        for place, (_, _, attempt, attempt_limit) in settled.items():
            assert self.attempts.get(place, 0) <= attempt <= attempt_limit

    def deliveries(self) -> dict[Place, UUID]:
        """The id of each."""
        select = "SELECT stream, sequence, delivery FROM deliveries WHERE stream = ANY (%(streams)s)"
        return {(stream, sequence): delivery for stream, sequence, delivery in self.rows(select)}


class History:
    """One seed's steps."""

    def __init__(
        self, access: Access, database: Database, model: Model, boxes: list[Box], chance: random.Random
    ) -> None:
        self.access = access
        self.database = database
        self.model = model
        self.boxes = boxes
        self.chance = chance
        self.players: list[Player] = []
        self.workers: list[Worker] = []

    async def run(self, steps: int) -> None:
        """Take random steps, then let everything come to its end."""
        acts = [self.begin] * 5 + [self.answer] * 8 + [self.end_leases] * 3 + [self.freeze] * 2 + [self.thaw] * 2
        acts += [self.crash, self.cancel, self.stop, self.lose_a_count, self.make_due, self.add_mail]
        try:
            for _ in range(steps):
                await self.chance.choice(acts)()
                await self._rest()
                self.model.check()
            await self._finish()
        finally:
            for player in self.players:
                player.database.thawed.set()
                player.turn.cancel()
            if self.players:
                await asyncio.wait({player.turn for player in self.players})

    async def begin(self) -> None:
        """One more worker takes a turn."""
        if len(self.players) >= WORKERS:
            return
        # The look, the claim, the look-up of addresses, and then the settlements.
        frail = Frail(self.database, self.chance.choice([None, None, 1, 2, 2, 3]))

        async def send(mail: Mail) -> Attempted:
            self.model.sent[mail.delivery] += 1
            answer: asyncio.Future[Attempted] = asyncio.get_running_loop().create_future()
            player.out.append((mail, answer))
            try:
                return await answer
            finally:
                player.out.remove((mail, answer))

        sender = FakeSender(send)
        worker = make_worker(frail, sender, seed=self.chance.random(), destination_concurrency=4)
        player = Player(worker, frail, asyncio.create_task(worker.run_once()), sender)
        self.players.append(player)
        self.workers.append(worker)

    async def answer(self) -> None:
        """A receiver answers, to a worker that may have frozen."""
        out = [(mail, answer) for player in self.players for mail, answer in player.out if not answer.done()]
        if out:
            mail, answer = self.chance.choice(out)
            result = self.chance.choice(RESULTS)
            if result.delivered:
                self.model.received.add(mail.delivery)
            answer.set_result(result)

    async def end_leases(self) -> None:
        """The leases of some are over."""
        self.model.owner.execute(
            "UPDATE queue SET due_at = clock_timestamp() - interval '1 s' "
            "WHERE stage = 'leased' AND stream = ANY (%s) AND (sequence + %s) %% 3 <> 0",
            [self.model.streams, self.chance.randrange(3)],
        )

    async def make_due(self) -> None:
        """Time passes: retries are due."""
        self.model.owner.execute(
            "UPDATE queue SET due_at = clock_timestamp() - interval '1 s' WHERE stage = 'retry' AND stream = ANY (%s)",
            [self.model.streams],
        )

    async def freeze(self) -> None:
        """A worker's next exchange with the database waits."""
        if self.players:
            self.chance.choice(self.players).database.thawed.clear()

    async def thaw(self) -> None:
        """And goes on."""
        for player in self.players:
            player.database.thawed.set()

    async def crash(self) -> None:
        """A worker is gone, whatever it had out."""
        if self.players:
            player = self.chance.choice(self.players)
            await until_async(lambda: not player.database.busy)
            player.database.lost = True
            player.database.thawed.set()
            await self._end(player)

    async def cancel(self) -> None:
        """A worker is told to end now."""
        if self.players:
            player = self.chance.choice(self.players)
            await until_async(lambda: not player.database.busy)
            player.database.thawed.set()
            await self._end(player)

    async def stop(self) -> None:
        """A worker is told to stop; it begins nothing more."""
        if self.players:
            player = self.chance.choice(self.players)
            player.worker.stop()
            player.database.thawed.set()

    async def lose_a_count(self) -> None:
        """A failover loses the commit of a claim."""
        leased = self.model.rows(
            "SELECT stream, sequence, attempt, delivery FROM queue JOIN deliveries USING (tenant, stream, sequence) "
            "WHERE stage = 'leased' AND stream = ANY (%(streams)s) ORDER BY 1, 2"
        )
        if leased:
            stream, sequence, attempt, delivery = self.chance.choice(leased)
            self.model.owner.execute(
                "UPDATE queue SET attempt = attempt - 1, token = NULL, due_at = clock_timestamp(), "
                "stage = CASE WHEN code IS NULL THEN 'fresh' ELSE 'retry' END WHERE stream = %s AND sequence = %s",
                [stream, sequence],
            )
            self.model.attempts[stream, sequence] = attempt - 1
            self.model.lost_counts[delivery] += 1

    async def add_mail(self) -> None:
        """Somebody has something to say."""
        many = self.chance.randrange(1, 6)
        fill(self.access, self.chance.choice(self.boxes), many, limit=LIMIT)
        self.model.total += many

    async def _end(self, player: Player) -> None:
        player.turn.cancel()
        await asyncio.wait({player.turn})
        self.players.remove(player)

    async def _rest(self) -> None:
        await until_async(lambda: all(player.rests for player in self.players))
        for player in [player for player in self.players if player.turn.done()]:
            self.players.remove(player)
            if not player.turn.cancelled():
                fault = player.turn.exception()
                assert fault is None or isinstance(fault, Unavailable)

    async def _finish(self) -> None:
        while self.players:
            await self.thaw()
            await self._rest()
            for player in self.players:
                for mail, answer in player.out:
                    if not answer.done():
                        self.model.received.add(mail.delivery)
                        answer.set_result(Attempted())
            await asyncio.sleep(0.001)
        sender = at_once()
        last = make_worker(self.database, sender, destination_concurrency=100)
        self.workers.append(last)
        while self.model.rows("SELECT 1 FROM queue WHERE stream = ANY (%(streams)s) LIMIT 1"):
            make_all_due(self.access)
            await last.run_once()
        self.model.sent.update(mail.delivery for mail in sender.begun)
        self.model.received.update(mail.delivery for mail in sender.begun)
        self._check_end()

    def _check_end(self) -> None:
        self.model.check()
        assert len(self.model.settled) == self.model.total
        states = Counter(state for state, *_ in self.model.settled.values())
        totals = [worker.totals for worker in self.workers]
        assert states["delivered"] == sum(each.delivered for each in totals)
        assert states["dead"] == sum(each.dead + each.ended for each in totals)
        for place, delivery in self.model.deliveries().items():
            state, _, _, attempt_limit = self.model.settled[place]
            assert state != "delivered" or delivery in self.model.received
            assert self.model.sent[delivery] <= attempt_limit + self.model.lost_counts[delivery]


async def campaign(access: Access, seed: int, histories: int) -> None:
    """So many histories from one seed, each with tenants of its own; together they meet all that they are about."""
    met = Counts()
    async with delivering(access) as database:
        for number in range(histories):
            print(f"POSTSEAL_TEST_SEED={seed} history {number}")
            tenants = [f"tenant-{next(TENANTS)}" for _ in range(2)]
            boxes = [make_box(access, name, tenant=tenant) for tenant in tenants for name in ("erp", "crm")]
            with as_owner(access) as owner:
                model = Model(owner, [box.stream for box in boxes])
                history = History(access, database, model, boxes, random.Random(f"{seed} {number}"))
                for box in boxes:
                    fill(access, box, 6, limit=LIMIT)
                model.total = 24
                async with asyncio.timeout(60):
                    await history.run(STEPS)
                for worker in history.workers:
                    met.add(worker.totals)
    print(met)
    assert min(met.delivered, met.retried, met.dead, met.released, met.fenced, met.left)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is settled at once, and a worker looks whenever it likes."""
    monkeypatch.setattr(out, "SETTLE_EVERY_S", 0.005)
    monkeypatch.setattr(scheduler, "LOOK_GAP_S", 0.0)


async def test_workers_do_what_the_model_says(access: Access, seed: int):
    """Five histories."""
    await campaign(access, seed, 5)


@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_workers_do_what_the_model_says_for_long(access: Access, seed: int):
    """Two hundred."""
    await campaign(access, seed, 200)

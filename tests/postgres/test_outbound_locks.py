"""Whoever touches outbound rows at once: none waits in a circle, and the books are right afterwards."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import psycopg
import pytest
from orders import Place, empty, place, require_whole, seal, settled

from postseal.postgres import destinations
from postseal.postgres.access import Access
from postseal.postgres.database import Part, connect
from postseal.postgres.dead_letters import DeadFilter, redrive_some
from postseal.postgres.deliveries import Lease, Wanted, claim, claim_for_certain
from postseal.postgres.lanes import hold, unhold
from postseal.postgres.mail import cancel
from postseal.postgres.sealing import lock_destinations
from postseal.postgres.settles import Settle, renew, settle, settle_for_certain
from postseal.postgres.transaction import Connection, in_transaction
from postseal.rules.delivery import Code, Verdict


@pytest.fixture
def access(shared_access: Access) -> Access:
    """A database that the tests of this module share, emptied."""
    empty(shared_access)
    return shared_access


class Crowd:
    """Everybody who works on the mail of a few destinations, with random choices."""

    def __init__(self, access: Access, places: list[Place], chance: random.Random) -> None:
        self.access = access
        self.places = places
        self.chance = chance
        self.leases: list[Lease] = []

    async def many(self, act: Callable[[Connection], Awaitable[None]], part: Part, rounds: int) -> None:
        """Do one thing again and again on one connection."""
        connection = await connect(self.access.of(part), prepare=True)
        try:
            for _ in range(rounds):
                await act(connection)
        finally:
            await connection.close()

    async def seal(self, connection: Connection) -> None:
        """Into all destinations at once, named in any order."""

        async def work(connection: Connection) -> None:
            places = self.chance.sample(self.places, len(self.places))
            await lock_destinations(connection, "acme", [(each.project, each.name) for each in places])
            for each in places:
                await seal(connection, each, self.chance.randint(1, 6), attempt_limit=2)

        await in_transaction(connection, work)

    async def claim(self, connection: Connection) -> None:
        """From all destinations, in any order; half of them in a transaction that stays open for a while."""
        wanted = [Wanted(each.stream, 5, 5) for each in self.chance.sample(self.places, len(self.places))]

        async def slowly(connection: Connection) -> list[Lease]:
            claimed = await claim(connection, "acme", wanted, lane="push", lease_s=self.chance.choice((0, 60)))
            await connection.execute("SELECT FROM destination_health")
            return claimed.leases

        if self.chance.random() < 0.5:
            self.leases += await in_transaction(connection, slowly)
        else:
            self.leases += (await claim_for_certain(connection, "acme", wanted, lane="push", lease_s=60)).leases

    def some(self) -> list[Lease]:
        """Some leases, perhaps the same that somebody else has in hand, in any order."""
        return self.chance.sample(self.leases, min(len(self.leases), self.chance.randint(1, 30)))

    def decided(self, lease: Lease) -> Settle:
        """Any verdict; now and then the destination is gone."""
        verdict = self.chance.choice(list(Verdict))
        code = Code.STATUS_5XX if verdict in (Verdict.RETRY, Verdict.DEAD) else None
        return settled(lease, verdict, code, gone=code is not None and self.chance.random() < 0.05)

    async def settle(self, connection: Connection) -> None:
        """Whatever is at hand."""
        if settles := [self.decided(lease) for lease in self.some()]:
            await settle_for_certain(connection, "acme", settles)

    async def settle_all_alike(self, connection: Connection) -> None:
        """The short way, in a transaction that does more afterwards."""
        verdict = self.chance.choice((Verdict.DELIVERED, Verdict.DEAD))
        code = Code.STATUS_5XX if verdict is Verdict.DEAD else None

        async def work(connection: Connection) -> None:
            await settle(connection, "acme", [settled(lease, verdict, code) for lease in self.some()])
            await connection.execute("SELECT FROM destination_health")

        await in_transaction(connection, work)

    async def renew(self, connection: Connection) -> None:
        """Some leases."""

        async def work(connection: Connection) -> None:
            await renew(connection, "acme", self.some(), lease_s=60)

        await in_transaction(connection, work)

    async def administer(self, connection: Connection) -> None:
        """Switch a destination off and on, redrive, cancel."""
        each = self.chance.choice(self.places)
        lease = self.chance.choice(self.leases) if self.leases else None

        async def redrive(connection: Connection) -> None:
            await redrive_some(connection, "acme", "apollo", DeadFilter(), budget=2, limit=20)

        async def take_back(connection: Connection) -> None:
            if lease is not None:
                await cancel(connection, "acme", "apollo", lease.delivery)

        async def disable(connection: Connection) -> None:
            await destinations.disable(connection, "acme", each.stream, reason="operator")
            await hold(connection, "acme", each.stream, 10)

        async def enable(connection: Connection) -> None:
            await destinations.enable(connection, "acme", each.stream)
            await unhold(connection, "acme", each.stream)

        await in_transaction(connection, self.chance.choice((redrive, take_back, disable, enable)))

    async def together(self, rounds: int) -> None:
        """Everybody at once."""
        acts = [self.seal, self.claim, self.claim, self.settle, self.settle, self.settle_all_alike, self.renew]
        async with asyncio.TaskGroup() as group:
            for act in acts:
                group.create_task(self.many(act, Part.DELIVERY, rounds))
            for _ in range(2):
                group.create_task(self.many(self.administer, Part.ADMIN, rounds))


def crowd_together(access: Access, seed: int, rounds: int) -> None:
    """Let everybody work at once, then count."""
    places = [place(access, f"destination-{n}") for n in range(3)]
    crowd = Crowd(access, places, random.Random(seed))
    try:
        asyncio.run(crowd.together(rounds))
    except* psycopg.OperationalError as errors:
        pytest.fail(f"somebody waited for too long: {errors.exceptions}")
    require_whole(access)
    for each in places:
        [(highest,)] = each.rows("highest", "destinations", "stream")
        assert [sequence for (sequence,) in each.rows("sequence", "deliveries")] == list(range(1, highest + 1))
        [(leased_without_token,)] = each.rows("count(*) FILTER (WHERE attempt = 0 AND token IS NOT NULL)", "queue", "1")
        assert leased_without_token == 0


def test_nobody_waits_in_a_circle(access: Access, seed: int):
    """Seals, claims, settles, renewals and administrators' acts on the same few rows."""
    crowd_together(access, seed, rounds=25)


@pytest.mark.soak
@pytest.mark.parametrize("run", range(5))
def test_nobody_waits_in_a_circle_for_long(access: Access, seed: int, run: int):
    """The same for longer."""
    crowd_together(access, seed + run, rounds=400)

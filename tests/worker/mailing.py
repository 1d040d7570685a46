"""Mail to deliver: destinations, queued deliveries by the thousand, and what became of them."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fleet import as_owner
from postseal.outbound.means import Pace
from postseal.outbound.scheduler import RoundRobin, TenantScheduler
from postseal.outbound.targets import Targets
from postseal.outbound.worker import Worker
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.rules.delivery import Attempted
from postseal.senders import Mail, Scheme, Secret, Sender
from postseal.senders.secrets import DeploymentKey

KEY = DeploymentKey(bytes(range(32)))
SHARED = Secret(Scheme.V1, bytes(range(32)))
NOWHERE = "https://receiver.example/hook"
NO_WAIT_S = 0.02


@dataclass(frozen=True)
class Box:
    """A destination."""

    tenant: str
    project: str
    name: str
    stream: int


def make_box(
    access: Access,
    name: str = "erp",
    *,
    tenant: str = "acme",
    project: str = "apollo",
    mode: str = "push",
    url: str = NOWHERE,
) -> Box:
    """A destination, and its tenant and project where they are missing."""
    scope = {"tenant": tenant, "project": project, "name": name, "mode": mode, "url": url if mode == "push" else None}
    with as_owner(access) as owner:
        owner.execute("INSERT INTO tenants VALUES (%(tenant)s) ON CONFLICT DO NOTHING", scope)
        owner.execute("INSERT INTO projects VALUES (%(tenant)s, %(project)s) ON CONFLICT DO NOTHING", scope)
        row = owner.execute(
            "INSERT INTO destinations (tenant, project, destination, mode, url, max_pending) "
            "VALUES (%(tenant)s, %(project)s, %(name)s, %(mode)s, %(url)s, 10000000) RETURNING stream",
            scope,
        ).fetchone()
        assert row is not None
        scope["stream"] = row[0]
        owner.execute("INSERT INTO destination_health (tenant, stream) VALUES (%(tenant)s, %(stream)s)", scope)
        if mode == "push":
            scope["encrypted"] = KEY.encrypt(tenant, row[0], SHARED)
            owner.execute(
                "INSERT INTO destination_secrets (tenant, stream, scheme, encrypted) "
                "VALUES (%(tenant)s, %(stream)s, 'v1', %(encrypted)s)",
                scope,
            )
    return Box(tenant, project, name, scope["stream"])


FILL = """
WITH given AS (
    UPDATE destinations SET highest = highest + %(count)s WHERE tenant = %(tenant)s AND stream = %(stream)s
    RETURNING mode, highest
), numbers AS (
    SELECT mode, highest - %(count)s + n AS sequence, gen_random_uuid() AS id
    FROM given, generate_series(1, %(count)s) AS n
), sealed AS (
    INSERT INTO deliveries
    SELECT %(tenant)s, %(stream)s, sequence, id, id, 'key:' || id, sha256(id::text::bytea), sha256(id::text::bytea),
           repeat('k', 43), now(), NULL
    FROM numbers
), bodies AS (
    INSERT INTO payloads
    SELECT %(tenant)s, %(stream)s, sequence, NULL, ('{"sequence":' || sequence || '}')::bytea, repeat('s', 64)::bytea
    FROM numbers
)
INSERT INTO queue (tenant, stream, sequence, lane, stage, due_at, attempt, attempt_limit, code)
SELECT %(tenant)s, %(stream)s, sequence, mode, %(stage)s, clock_timestamp() + make_interval(secs => %(due_in_s)s),
       CASE %(stage)s WHEN 'retry' THEN 1 ELSE 0 END, %(limit)s, CASE %(stage)s WHEN 'retry' THEN 'status_5xx' END
FROM numbers
"""


def fill(access: Access, box: Box, count: int, *, stage: str = "fresh", limit: int = 8, due_in_s: float = 0.0) -> None:
    """Queue so many deliveries for a destination: never tried, or tried once."""
    values = {
        "tenant": box.tenant,
        "stream": box.stream,
        "count": count,
        "stage": stage,
        "limit": limit,
        "due_in_s": due_in_s,
    }
    with as_owner(access) as owner:
        owner.execute(FILL, values)


def stages(access: Access, *boxes: Box) -> Counter[str]:
    """How many deliveries of the boxes are in each stage of the queue, or in each state once they left it."""
    places = [box.stream for box in boxes]
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT stage, count(*) FROM queue WHERE stream = ANY (%(streams)s) GROUP BY 1 "
            "UNION ALL SELECT state, count(*) FROM settlements WHERE stream = ANY (%(streams)s) GROUP BY 1",
            {"streams": places},
        ).fetchall()
    return Counter(dict(rows))


def make_all_due(access: Access) -> None:
    """Let every wait and every lease end now."""
    with as_owner(access) as owner:
        owner.execute("UPDATE queue SET due_at = clock_timestamp() - interval '1 ms' WHERE due_at > clock_timestamp()")


@dataclass
class FakeSender:
    """A sender without a network: what it was given, and what it answers."""

    answer: Callable[[Mail], Awaitable[Attempted]]
    begun: list[Mail] = field(default_factory=list[Mail])
    ended: list[Mail] = field(default_factory=list[Mail])
    cut: list[Mail] = field(default_factory=list[Mail])
    now: Counter[str] = field(default_factory=Counter[str])
    """What is on its way, by destination."""
    most: Counter[str] = field(default_factory=Counter[str])

    async def send(self, mail: Mail) -> Attempted:
        """One attempt."""
        self.begun.append(mail)
        self.now[mail.destination] += 1
        self.most[mail.destination] = max(self.most[mail.destination], self.now[mail.destination])
        try:
            attempted = await self.answer(mail)
        except asyncio.CancelledError:
            self.cut.append(mail)
            raise
        finally:
            self.now[mail.destination] -= 1
        self.ended.append(mail)
        return attempted


async def _deliver(_mail: Mail) -> Attempted:
    return Attempted()


def at_once() -> FakeSender:
    """Delivers without a wait."""
    return FakeSender(_deliver)


def answering(attempted: Attempted) -> FakeSender:
    """Always answers so."""

    async def answer(_mail: Mail) -> Attempted:
        return attempted

    return FakeSender(answer)


def while_closed(gate: asyncio.Event) -> FakeSender:
    """Delivers once the gate is open."""

    async def answer(_mail: Mail) -> Attempted:
        await gate.wait()
        return Attempted()

    return FakeSender(answer)


@asynccontextmanager
async def delivering(access: Access) -> AsyncGenerator[Database]:
    """The pool of the part that delivers."""
    async with Database(access.of(Part.DELIVERY), prepare=True, size=6) as database:
        yield database


@dataclass
class Clock:
    """A worker's clock: the loop's, and as far ahead of it as a test wants."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        """The time."""
        return asyncio.get_running_loop().time() + self.ahead_s


class StillClock:
    """Time that a test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def make_worker(
    database: Database,
    sender: Sender,
    *,
    scheduler: TenantScheduler | None = None,
    targets: Targets | None = None,
    seed: float = 7,
    clock: Clock | None = None,
    **pace: Any,
) -> Worker:
    """A worker, not entered, with short waits."""
    clock = clock or Clock()
    return Worker(
        database,
        scheduler or RoundRobin(database, clock),
        sender,
        targets or Targets(database, KEY, clock),
        Pace(**({"poll_s": NO_WAIT_S, "stop_grace_s": 1.0} | pace)),
        clock=clock,
        chance=random.Random(seed).random,
    )


def cut_off(worker: Worker) -> None:
    """Let the time be over that the worker's turns may take."""
    for cycle in worker._used:
        cycle._bound.reschedule(asyncio.get_running_loop().time())

"""postseal's outbound half as a benchmark drives it: tenants with push destinations, in a fresh database.

What is measured is what a deployment runs, with the default settings: its outbox seals (real signatures, full audit),
its worker claims, sends and settles, its sender pushes. All of it runs in one process, under uvloop like the service.
"""

import asyncio
import itertools
import os
import subprocess
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import LiteralString

import aiohttp
import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from bench.rig import HERE
from postseal.envelope import ed25519
from postseal.envelope.dsse import ENVELOPE_MEDIA_TYPE
from postseal.outbound.marks import Marks
from postseal.outbound.outbox import Outbox
from postseal.outbound.scheduler import LANE
from postseal.outbound.wishes import Sealed, Wish
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database, Part
from postseal.postgres.deliveries import Claimed, Wanted, claim_for_certain
from postseal.postgres.settles import Settle, settle_for_certain
from postseal.rules.delivery import Attempted, Verdict
from postseal.senders import Mail, Scheme, Secret, Sender
from postseal.settings import Settings
from postseal.signing.pem_folder import folder_of, write_key
from postseal.worker_service import composed_worker, deployment_key, running_worker

PROJECT = "main"
TENANTS = [f"bench-{number}" for number in range(4)]
"""As many as the worker has cycles."""
DESTINATIONS = [f"destination-{number:02}" for number in range(16)]
"""Of each tenant. Few enough that each has a backlog, enough that a claim of 100 has slots."""
BATCH = 100
CALLERS = 10
"""Of the outbox at once, so that as much is under way as in a batch of 1,000."""
KEY_CHARACTERS = 95
"""Of an idempotency key: it fills the payload up to 600 bytes, with a sequence of five digits."""
CLAIMED_A_DESTINATION = 10
CONNECTIONS = 4 * Settings().destination_concurrency
"""To the receiver: as many as the sender opens to one host, and so the bare client."""
DEADLINE_S = 1_800
LOOK_S = 0.002
LEASE_S = 5.0
"""Of the claims that are timed: the shortest that can be set, so that ends of leases pass by meanwhile."""
FILL_ROWS = 50_000
HOOK = "http://127.0.0.1:{}/hook"

# Ids that lie beside each other in an index, as those of real mail do.
SEAL: LiteralString = """
WITH sealed AS (
    INSERT INTO deliveries (tenant, stream, sequence, delivery, event_id, idempotency_key, content_hash,
                            event_identity, keyid, sealed_at)
    SELECT d.tenant, d.stream, d.highest + n, i.id, i.id, i.id::text, sha256(uuid_send(i.id)), sha256(uuid_send(i.id)),
           k.keyid, clock_timestamp()
    FROM destinations d JOIN signing_keys k USING (tenant) CROSS JOIN generate_series(1, %(count)s) AS n
    CROSS JOIN LATERAL (SELECT (lpad(to_hex(d.stream), 8, '0') || lpad(to_hex(d.highest + n), 24, '0'))::uuid) AS i (id)
    WHERE d.tenant = %(tenant)s AND d.destination = ANY(%(destinations)s)
    RETURNING tenant, stream, sequence
), stored AS (
    INSERT INTO payloads (tenant, stream, sequence, payload, signature)
    SELECT tenant, stream, sequence, decode(repeat('7b', 600), 'hex'), decode(repeat('aa', 64), 'hex') FROM sealed
), queued AS (
    INSERT INTO queue (tenant, stream, sequence, lane, stage, due_at, attempt, attempt_limit)
    SELECT tenant, stream, sequence, 'push', %(stage)s, clock_timestamp() + %(due_in)s::interval,
           (%(stage)s = 'retry')::integer, 8
    FROM sealed WHERE %(stage)s <> 'dead'
), settled AS (
    INSERT INTO settlements (tenant, stream, sequence, state, code, project, attempt, attempt_limit)
    SELECT tenant, stream, sequence, 'dead', 'status_5xx', 'main', 8, 8 FROM sealed WHERE %(stage)s = 'dead'
), counted AS (
    UPDATE destination_health h SET settled = h.settled + %(count)s
    FROM destinations d
    WHERE d.tenant = %(tenant)s AND d.destination = ANY(%(destinations)s) AND %(stage)s = 'dead'
      AND h.tenant = d.tenant AND h.stream = d.stream
)
UPDATE destinations SET highest = highest + %(count)s
WHERE tenant = %(tenant)s AND destination = ANY(%(destinations)s)
"""

DONE: LiteralString = """
SELECT (SELECT count(*) FROM queue), (SELECT count(*) FROM settlements WHERE state = 'delivered')
"""


@dataclass(frozen=True)
class Receiver:
    """A running `receive.c`."""

    url: str


@contextmanager
def receiving(folder: Path) -> Generator[Receiver]:
    """The receiver, which answers each request at once, on a free port; its program is made in `folder`."""
    program = str(folder / "receive")
    subprocess.run(["gcc", "-O2", "-o", program, str(HERE / "receive.c")], check=True)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Receiver(HOOK.format(int(process.stdout.readline())))


@contextmanager
def fresh(access: Access, name: str) -> Generator[Access]:
    """An empty database on the same server, dropped in the end."""
    with psycopg.connect(access.owner, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield replace(access, owner=make_conninfo(access.owner, dbname=name))
        finally:
            owner.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


class ReturnsAtOnce:
    """A sender to which every delivery goes well, and that keeps the last body."""

    body = b""

    async def send(self, mail: Mail) -> Attempted:
        """See `Sender`."""
        self.body = mail.body
        return Attempted()


class Outbound:
    """Tenants, keys and destinations in the fresh database `access`; what is secret of them lies in `folder`."""

    def __init__(self, access: Access, folder: Path, receiver: Receiver) -> None:
        access.migrate()
        self._access = access
        self._receiver = receiver
        self._settings = Settings(data_dir=str(folder), allowed_cidrs=("127.0.0.0/8",), allow_http=True)
        self._numbers = itertools.count()
        self.body = b""
        """Of the last request, as it would be sent."""
        with self.owner() as owner:
            for tenant in TENANTS:
                self._add_tenant(owner, tenant)

    @contextmanager
    def owner(self) -> Generator[psycopg.Connection]:
        """A connection as the schema's owner."""
        with psycopg.connect(self._access.owner, autocommit=True) as owner:
            owner.execute("SET search_path = postseal")
            yield owner

    def _add_tenant(self, owner: psycopg.Connection, tenant: str) -> None:
        public_key = ed25519.public_key(seed := ed25519.generate())
        write_key(folder_of(self._settings), tenant, seed)
        owner.execute("INSERT INTO tenants (tenant) VALUES (%s)", [tenant])
        owner.execute("INSERT INTO projects (tenant, project) VALUES (%s, %s)", [tenant, PROJECT])
        owner.execute(
            "INSERT INTO signing_keys (tenant, keyid, public_key) VALUES (%s, %s, %s)",
            [tenant, ed25519.thumbprint(public_key), public_key],
        )
        for name in DESTINATIONS:
            row = owner.execute(
                "INSERT INTO destinations (tenant, project, destination, mode, url, max_pending) "
                "VALUES (%s, %s, %s, 'push', %s, 10000000) RETURNING stream",
                [tenant, PROJECT, name, self._receiver.url],
            ).fetchone()
            assert row is not None
            secret = deployment_key(self._settings).encrypt(tenant, row[0], Secret(Scheme.V1, os.urandom(32)))
            owner.execute("INSERT INTO destination_health (tenant, stream) VALUES (%s, %s)", [tenant, row[0]])
            owner.execute(
                "INSERT INTO destination_secrets (tenant, stream, scheme, encrypted) VALUES (%s, %s, 'v1', %s)",
                [tenant, row[0], secret],
            )

    # Each of these gives the seconds that it took.

    async def enqueue_single(self, jobs: int) -> float:
        """One an act, each sealed and committed before the next: one caller."""
        return await self._enqueue(jobs, 1, callers=1)

    async def enqueue_batch(self, jobs: int) -> float:
        """100 an act, the most that it takes, by 10 callers beside each other."""
        return await self._enqueue(jobs // BATCH, BATCH, callers=CALLERS)

    async def _enqueue(self, acts: int, intents: int, *, callers: int) -> float:
        places = list(itertools.product(DESTINATIONS, TENANTS))
        todo = iter(range(acts))

        async def call(outbox: Outbox) -> None:
            for act in todo:
                destination, tenant = places[act % len(places)]
                wishes = [self._wish(destination) for _ in range(intents)]
                results = await outbox.enqueue(tenant, PROJECT, wishes, "bench")
                if not all(isinstance(result, Sealed) for result in results):
                    raise RuntimeError(f"not all were sealed: {results}")

        async with composed_worker(self._settings, self._access) as composed:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(callers):
                    group.create_task(call(composed.outbox))
            return time.perf_counter() - began

    def _wish(self, destination: str) -> Wish:
        data = {
            "kind": "task-status",
            "taskId": str(uuid.uuid4()),
            "attempt": 1,
            "status": "failed",
            "progress": 100,
            "errorCode": "resource-exhausted",
            "resultDigest": "sha256:" + os.urandom(32).hex(),
        }
        return Wish(destination=destination, data=data, idempotency_key=f"{next(self._numbers):0{KEY_CHARACTERS}}")

    async def claim_settle(self, jobs: int) -> float:
        """By the worker, with a sender that returns at once, until all are settled."""
        sender = ReturnsAtOnce()
        took = await self._deliver(sender, jobs)
        self.body = sender.body
        return took

    async def http(self, jobs: int) -> float:
        """By the worker with the real sender, to the receiver, until all are settled."""
        return await self._deliver(None, jobs)

    async def _deliver(self, sender: Sender | None, jobs: int) -> float:
        with self.owner() as owner:
            _, before = self._done(owner)
        began = time.perf_counter()
        async with running_worker(self._settings, self._access, sender=sender) as running, asyncio.timeout(DEADLINE_S):
            while running.worker.totals.delivered < jobs:  # noqa: ASYNC110 - the worker tells nobody
                await asyncio.sleep(LOOK_S)
            took = time.perf_counter() - began
        with self.owner() as owner:
            pending, delivered = self._done(owner)
        if pending or delivered - before != jobs:
            raise RuntimeError(f"of {jobs} deliveries {delivered - before} were delivered, {pending} are pending")
        return took

    @staticmethod
    def _done(owner: psycopg.Connection) -> tuple[int, int]:
        row = owner.execute(DONE).fetchone()
        assert row is not None
        return row[0], row[1]

    async def http_client(self, jobs: int) -> float:
        """The bare client: the same body to the same receiver over as many connections, nothing else."""
        todo = iter(range(jobs))
        headers = {"Content-Type": ENVELOPE_MEDIA_TYPE}

        async def post(session: aiohttp.ClientSession) -> None:
            for _ in todo:
                async with session.post(self._receiver.url, data=self.body, headers=headers) as response:
                    await response.read()
                    response.raise_for_status()

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(CONNECTIONS):
                    group.create_task(post(session))
            return time.perf_counter() - began

    def payload_bytes(self) -> float:
        """The average payload."""
        with self.owner() as owner:
            row = owner.execute("SELECT avg(octet_length(payload)) FROM payloads").fetchone()
        assert row is not None
        return float(row[0])

    # What follows is about one tenant with ten destinations, of which each claim takes ten deliveries each.

    def fill(self, pending: int, *, far: int, dead: int) -> None:
        """Let `pending` deliveries wait, of which `far` are retries due in a month, and `dead` be dead letters."""
        with self.owner() as owner:
            owner.execute("SET synchronous_commit = off")
            for count, stage, due_in in ((dead, "dead", "0"), (far, "retry", "30 days"), (pending - far, "fresh", "0")):
                left = count // len(BUSY)
                while left > 0:
                    step = min(left, FILL_ROWS // len(BUSY))
                    self._seal(owner, step, stage, due_in)
                    left -= step
            owner.execute("VACUUM (ANALYZE)")
            owner.execute("CHECKPOINT")

    @staticmethod
    def _seal(owner: psycopg.Connection, each: int, stage: str, due_in: str) -> None:
        names = {"tenant": TENANTS[0], "destinations": BUSY, "count": each, "stage": stage, "due_in": due_in}
        owner.execute(SEAL, names)

    async def claims(self, count: int, *, held: bool) -> list[float]:
        """So many claims of 100, in milliseconds each until it is committed; each is settled, and 100 come for it.

        With `held` a transaction that began before the first of them stays open until the last.
        """
        with self.owner() as owner, self.owner() as holder:
            owner.execute("VACUUM (ANALYZE)")
            owner.execute("CHECKPOINT")
            if held:
                holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                holder.execute("SELECT FROM queue LIMIT 1")
            rows = owner.execute(
                "SELECT stream FROM destinations WHERE tenant = %s AND destination = ANY(%s)", [TENANTS[0], BUSY]
            ).fetchall()
            async with Database(self._access.of(Part.DELIVERY), prepare=True) as database:
                claiming = _Claiming(database, [row[0] for row in rows])
                taken: list[float] = []
                for _ in range(count):
                    self._seal(owner, CLAIMED_A_DESTINATION, "fresh", "0")
                    taken.append(await claiming.claim_and_settle())
            if held:
                holder.execute("ROLLBACK")
        return taken


BUSY = DESTINATIONS[:CLAIMED_A_DESTINATION]


class _Claiming:
    """Claims and settles as the worker's cycles do, with their marks."""

    def __init__(self, database: Database, streams: Sequence[int]) -> None:
        self._database = database
        self._streams = streams
        self._marks = Marks(time.monotonic)

    async def claim_and_settle(self) -> float:
        """How many milliseconds the claim of 100 took. RuntimeError if it brought less."""
        tenant, share = TENANTS[0], CLAIMED_A_DESTINATION
        began = {stream: self._marks.of(tenant, stream) for stream in self._streams}
        wanted = [Wanted(stream, share, share, mark.since, mark.retries_since) for stream, mark in began.items()]

        async def lease(connection: Connection) -> Claimed:
            return await claim_for_certain(connection, tenant, wanted, lane=LANE, lease_s=Settings().lease_s)

        before = time.perf_counter()
        claimed = await self._database.exchange(lease)
        took_ms = (time.perf_counter() - before) * 1e3
        if len(claimed.leases) != BATCH:
            raise RuntimeError(f"a claim brought {len(claimed.leases)}")
        for stream, mark in claimed.marks.items():
            self._marks.keep(tenant, stream, began=began[stream], reached=mark, found=share)
        settles = [
            Settle(each.stream, each.sequence, each.attempt, each.token, Verdict.DELIVERED) for each in claimed.leases
        ]

        async def write(connection: Connection) -> set[tuple[int, int]]:
            return await settle_for_certain(connection, tenant, settles)

        if fenced := await self._database.exchange(write):
            raise RuntimeError(f"{len(fenced)} of a claim were fenced")
        return took_ms

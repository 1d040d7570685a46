"""The composition root: settings and a way to the database become one running Service.

`serve`, the command line and the tests all enter here. A deployment that brings its own credential verifier passes it;
nothing is looked up behind its back.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from postseal.commit import Committer
from postseal.door import Door
from postseal.envelope.kinds import NO_KINDS, Kinds
from postseal.hints import Hints
from postseal.identity.tokens import TokenVerifier
from postseal.identity.verified import CredentialVerifier
from postseal.inbox import Inbox
from postseal.kinds_folder import load_kinds
from postseal.lane import Lane
from postseal.limits import Rate
from postseal.metrics import Metrics, Pool
from postseal.postgres.access import Access
from postseal.postgres.database import POOL_SIZE, READ_POOL_SIZE, Connection, Database, Part, connect
from postseal.sampler import Sampler, sampling
from postseal.settings import Settings
from postseal.waiting import Waiting

HINT_CONNECTIONS = 2
"""One tells, one hears."""


@dataclass(frozen=True, slots=True)
class Service:
    """The running parts of one process."""

    settings: Settings
    ingest: Database
    admin: Database
    reads: Database
    waiting: Waiting
    door: Door
    inbox: Inbox
    committer: Committer
    accepting: Callable[[], bool]
    """Whether the database has room for more."""
    kinds: Kinds
    """The deployment's own, beside the built-in ones."""
    metrics: Metrics
    sampler: Sampler


def connections_a_process(settings: Settings) -> int:
    """To how many connections one process's lanes, pools and hints can grow."""
    return settings.commit_lanes + 2 * POOL_SIZE + READ_POOL_SIZE + HINT_CONNECTIONS


@asynccontextmanager
async def running_service(
    settings: Settings, access: Access, *, verifier: CredentialVerifier | None = None
) -> AsyncGenerator[Service]:
    """Everything that takes envelopes in, until the block ends; then what is queued is committed first."""

    async def connect_lane() -> Connection:
        return await connect(access.of(Part.INGEST), prepare=settings.prepared_statements)

    clock = time.monotonic
    kinds = load_kinds(Path(settings.kinds_dir)) if settings.kinds_dir else NO_KINDS
    metrics = Metrics()

    def new_lane() -> Lane:
        return Lane(
            connect_lane,
            window=settings.window,
            default_retention_s=settings.payload_retention_s,
            metrics=metrics,
            moved=hints.moved,
        )

    def database(part: Part, size: int) -> Database:
        return Database(access.of(part), prepare=settings.prepared_statements, size=size)

    ingest, admin = database(Part.INGEST, POOL_SIZE), database(Part.ADMIN, POOL_SIZE)
    reads, telling = database(Part.INGEST, READ_POOL_SIZE), database(Part.INGEST, 1)
    waiting = Waiting(reads, most=settings.max_waiting_reads)
    hints = Hints(telling, waiting)
    committer = Committer(new_lane, lanes=settings.commit_lanes, metrics=metrics)
    async with ingest, admin, reads, telling, waiting, hints, committer:
        door = Door(verifier or TokenVerifier(ingest), Rate(settings.peer_permits_per_s, settings.peer_burst), clock)
        inbox = Inbox(
            door=door,
            sync_rate=Rate(settings.sync_permits_per_s, settings.sync_burst),
            database=ingest,
            committer=committer,
            accepting=access.accepting,
            clock=clock,
            max_envelope_bytes=settings.max_envelope_bytes,
            kinds=kinds,
        )
        pools = {Pool.INGEST: ingest, Pool.ADMIN: admin, Pool.READS: reads}
        sampler = Sampler(metrics, access, pools, door, inbox, committer)
        async with sampling(sampler):
            try:
                yield Service(
                    settings,
                    ingest,
                    admin,
                    reads,
                    waiting,
                    door,
                    inbox,
                    committer,
                    access.accepting,
                    kinds,
                    metrics,
                    sampler,
                )
            finally:
                await inbox.close()

"""The composition root: settings and a way to the database become one running Service.

`serve`, the command line and the tests all enter here. A deployment that brings its own credential verifier, signing
keys or sender passes them; nothing is looked up behind its back.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from postseal.door import Door
from postseal.envelope.kinds import NO_KINDS, Kinds
from postseal.identity.tokens import TokenVerifier
from postseal.identity.verified import CredentialVerifier
from postseal.inbound.commit import Committer
from postseal.inbound.hints import Hints
from postseal.inbound.inbox import Inbox
from postseal.inbound.lane import Lane
from postseal.inbound.waiting import Waiting
from postseal.kinds_folder import load_kinds
from postseal.limits import Rate
from postseal.metrics import Metrics, Pool
from postseal.outbound.outbox import Outbox, Sealed
from postseal.outbound.pulling import Pulling
from postseal.postgres.access import Access
from postseal.postgres.database import POOL_SIZE, READ_POOL_SIZE, Connection, Database, Part, connect
from postseal.sampler import Sampler, sampling
from postseal.senders import Sender
from postseal.settings import Settings
from postseal.signing import SigningKeys
from postseal.signing.pem_folder import PemFolder, folder_of
from postseal.worker_service import worker_connections

HINT_CONNECTIONS = 2
"""One tells, one hears."""


@dataclass(frozen=True, slots=True)
class Service:
    """The running parts of one process."""

    settings: Settings
    ingest: Database
    admin: Database
    reads: Database
    delivery: Database
    outbox: Outbox
    pulling: Pulling
    sender: Sender | None
    """The deployment's own, for tests of destinations; None for the shipped one."""
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
    """To how many connections one process's lanes, pools, worker and hints can grow."""
    worker = worker_connections(settings) if settings.worker else 0
    return settings.commit_lanes + 3 * POOL_SIZE + READ_POOL_SIZE + HINT_CONNECTIONS + worker


@asynccontextmanager
async def running_service(
    settings: Settings,
    access: Access,
    *,
    verifier: CredentialVerifier | None = None,
    signing_keys: SigningKeys | None = None,
    sender: Sender | None = None,
    sealed: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Service]:
    """Everything that takes envelopes and deliveries in, until the block ends.

    What is queued is committed first. Deliveries are sent by a worker (`worker_service.py`), here or elsewhere. One
    that is here is woken by `sealed`.
    """

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

    def told(tenant: str, new: Sequence[Sealed]) -> None:
        if new:
            sealed()
        for each in new:
            pulling.wake(tenant, each.destination)

    def database(part: Part, size: int) -> Database:
        return Database(access.of(part), prepare=settings.prepared_statements, size=size)

    ingest, admin = database(Part.INGEST, POOL_SIZE), database(Part.ADMIN, POOL_SIZE)
    reads, telling = database(Part.INGEST, READ_POOL_SIZE), database(Part.INGEST, 1)
    delivery = database(Part.DELIVERY, POOL_SIZE)
    outbox = Outbox(
        delivery,
        signing_keys or PemFolder(folder_of(settings)),
        kinds=kinds,
        attempt_limit=settings.attempt_limit,
        told=told,
    )
    pulling = Pulling(
        delivery,
        Rate(settings.sync_permits_per_s, settings.sync_burst),
        lease_s=settings.lease_s,
        most_waiting=settings.max_waiting_reads,
    )
    waiting = Waiting(reads, most=settings.max_waiting_reads)
    hints = Hints(telling, waiting)
    committer = Committer(new_lane, lanes=settings.commit_lanes, metrics=metrics)
    async with ingest, admin, reads, delivery, telling, waiting, hints, committer:
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
        pools = {Pool.INGEST: ingest, Pool.ADMIN: admin, Pool.READS: reads, Pool.DELIVERY: delivery}
        sampler = Sampler(metrics, access, pools, door, inbox, committer)
        async with sampling(sampler):
            try:
                yield Service(
                    settings,
                    ingest,
                    admin,
                    reads,
                    delivery,
                    outbox,
                    pulling,
                    sender,
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

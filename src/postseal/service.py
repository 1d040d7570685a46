"""The composition root: settings and a way to the database become one running Service.

`serve`, the command line and the tests all enter here. A deployment that brings its own credential verifier, signing
keys or sender passes them; nothing is looked up behind its back.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from postseal.door import Door
from postseal.envelope.kinds import Kinds
from postseal.identity.tokens import TokenVerifier
from postseal.identity.verified import CredentialVerifier
from postseal.inbound.commit import Committer
from postseal.inbound.hints import Hints
from postseal.inbound.inbox import Inbox
from postseal.inbound.lane import Lane
from postseal.inbound.waiting import Waiting
from postseal.limits import Rate
from postseal.metrics import Metrics, Pool
from postseal.outbound.outbox import Outbox
from postseal.outbound.pulling import Pulling
from postseal.outbound.wishes import Sealed
from postseal.postgres.access import Access
from postseal.postgres.database import POOL_SIZE, READ_POOL_SIZE, Database, Part, connect
from postseal.retention import CONNECTIONS as SWEEP_CONNECTIONS
from postseal.sampler import Sampler, sampling
from postseal.senders import Sender
from postseal.settings import Settings
from postseal.signing import SigningKeys
from postseal.worker_service import http_sender, outbox_of, worker_connections

HINT_CONNECTIONS = 2
"""One tells, one hears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The running parts of one process."""

    settings: Settings
    ingest: Database
    admin: Database
    reads: Database
    delivery: Database
    outbox: Outbox
    pulling: Pulling
    sender: Sender
    """For tests of destinations."""
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
    """To how many connections one process's lanes, pools, worker, sweep and hints can grow."""
    worker = worker_connections(settings) if settings.worker else 0
    sweep = SWEEP_CONNECTIONS if settings.sweep else 0
    return settings.commit_lanes + 3 * POOL_SIZE + READ_POOL_SIZE + HINT_CONNECTIONS + worker + sweep


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
    clock, metrics = time.monotonic, Metrics()
    pools = _pools(settings, access)
    ingest, delivery = pools[Pool.INGEST], pools[Pool.DELIVERY]
    outbox, pulling = _outbound(settings, delivery, signing_keys, sealed)
    waiting = Waiting(pools[Pool.READS], most=settings.max_waiting_reads)
    telling = _pool(settings, access, Part.INGEST, 1)
    hints = Hints(telling, waiting)
    new_lane = partial(_lane, settings, access, metrics, hints)
    committer = Committer(new_lane, lanes=settings.commit_lanes, metrics=metrics)
    door = Door(verifier or TokenVerifier(ingest), Rate(settings.peer_permits_per_s, settings.peer_burst), clock)
    inbox = Inbox(
        sync_rate=Rate(settings.sync_permits_per_s, settings.sync_burst),
        database=ingest,
        committer=committer,
        accepting=access.accepting,
        clock=clock,
        max_envelope_bytes=settings.max_envelope_bytes,
        kinds=outbox.kinds,
    )
    sampler = Sampler(metrics, access, pools, door, inbox, committer)
    shipped = http_sender(settings)
    service = Service(
        settings=settings,
        ingest=ingest,
        admin=pools[Pool.ADMIN],
        reads=pools[Pool.READS],
        delivery=delivery,
        outbox=outbox,
        pulling=pulling,
        sender=sender or shipped,
        waiting=waiting,
        door=door,
        inbox=inbox,
        committer=committer,
        accepting=access.accepting,
        kinds=outbox.kinds,
        metrics=metrics,
        sampler=sampler,
    )
    async with AsyncExitStack() as held:
        for part in (*pools.values(), telling, waiting, hints, committer, *([] if sender else [shipped])):
            await held.enter_async_context(part)
        await held.enter_async_context(sampling(sampler))
        held.push_async_callback(inbox.close)
        yield service


def _pools(settings: Settings, access: Access) -> dict[Pool, Database]:
    return {
        Pool.INGEST: _pool(settings, access, Part.INGEST, POOL_SIZE),
        Pool.ADMIN: _pool(settings, access, Part.ADMIN, POOL_SIZE),
        Pool.READS: _pool(settings, access, Part.INGEST, READ_POOL_SIZE),
        Pool.DELIVERY: _pool(settings, access, Part.DELIVERY, POOL_SIZE),
    }


def _pool(settings: Settings, access: Access, part: Part, size: int) -> Database:
    return Database(access.of(part), prepare=settings.prepared_statements, size=size)


def _lane(settings: Settings, access: Access, metrics: Metrics, hints: Hints) -> Lane:
    return Lane(
        lambda: connect(access.of(Part.INGEST), prepare=settings.prepared_statements),
        window=settings.window,
        default_retention_s=settings.payload_retention_s,
        metrics=metrics,
        moved=hints.moved,
    )


def _outbound(
    settings: Settings, database: Database, signing_keys: SigningKeys | None, sealed: Callable[[], None]
) -> tuple[Outbox, Pulling]:
    """Devices that wait here for mail are woken by what is sealed here."""
    pulling = Pulling(
        database,
        Rate(settings.sync_permits_per_s, settings.sync_burst),
        lease_s=settings.lease_s,
        most_waiting=settings.max_waiting_reads,
    )

    def told(tenant: str, new: Sequence[Sealed]) -> None:
        if new:
            sealed()
        for each in new:
            pulling.wake(tenant, each.destination)

    return outbox_of(settings, database, signing_keys, told=told), pulling

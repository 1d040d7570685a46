"""The outbound half, composed: settings and a way to the database become a worker and a sealer.

`postseal worker`, `postseal serve` and the tests all enter here. A deployment that brings its own scheduler, sender or
signing keys passes them; nothing is looked up behind its back.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from postseal.kinds_folder import kinds_of
from postseal.limits import Rate
from postseal.outbound.cycle import CycleReport
from postseal.outbound.means import Pace
from postseal.outbound.outbox import Outbox
from postseal.outbound.scheduler import RoundRobin, TenantScheduler
from postseal.outbound.sealer import Sealer
from postseal.outbound.targets import Targets
from postseal.outbound.wishes import Sealed
from postseal.outbound.worker import SLOTS_A_CYCLE, Worker
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.home import home_of
from postseal.senders import Sender
from postseal.senders.addresses import read_networks
from postseal.senders.http import HttpSender
from postseal.senders.secrets import DeploymentKey, load_deployment_key
from postseal.settings import Settings
from postseal.signing import SigningKeys
from postseal.signing.pem_folder import PemFolder, folder_of

MAX_POOL = 10
SPARE_FILES = 256
"""For the database, look-ups of names, answers that are being read to their end, logs."""

NewScheduler = Callable[[Database], TenantScheduler]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What seals and delivers in one process."""

    database: Database
    outbox: Outbox
    sealer: Sealer
    worker: Worker

    async def once(self) -> CycleReport | None:
        """Seal what waits, then use one turn and report it; None if nothing is due.

        Raises Unavailable, and TimeoutError where the turn was cut off.
        """
        await self.sealer.once()
        return await self.worker.run_once()


def worker_connections(settings: Settings) -> int:
    """To how many connections a worker's pool can grow: one a cycle, one each for the scheduler and the sealer."""
    return min(settings.worker_cycles + 2, MAX_POOL)


def worker_files(settings: Settings) -> int:
    """How many files a worker may have open: a connection a slot, and as many that are idle."""
    return 2 * SLOTS_A_CYCLE * settings.worker_cycles + SPARE_FILES


@asynccontextmanager
async def composed_worker(
    settings: Settings,
    access: Access,
    *,
    scheduler: NewScheduler | None = None,
    sender: Sender | None = None,
    signing_keys: SigningKeys | None = None,
) -> AsyncGenerator[Delivery]:
    """Everything that seals and delivers, ready and idle, until the block ends. Raises StartupError."""
    clock = time.monotonic
    key = deployment_key(settings)
    async with AsyncExitStack() as held:
        database = await held.enter_async_context(
            Database(access.of(Part.DELIVERY), prepare=settings.prepared_statements, size=worker_connections(settings))
        )
        outbox = outbox_of(settings, database, signing_keys)
        worker = Worker(
            database,
            scheduler(database) if scheduler else RoundRobin(database, clock),
            sender or await held.enter_async_context(http_sender(settings)),
            Targets(database, key, clock),
            pace_of(settings),
            clock=clock,
        )
        sealer = Sealer(outbox, database, poll_s=settings.poll_s, sealed=worker.wake)
        yield Delivery(database, outbox, sealer, worker)


@asynccontextmanager
async def running_worker(
    settings: Settings,
    access: Access,
    *,
    scheduler: NewScheduler | None = None,
    sender: Sender | None = None,
    signing_keys: SigningKeys | None = None,
) -> AsyncGenerator[Delivery]:
    """The same, sealing and delivering until the block ends; then what is under way comes to its end."""
    stop = asyncio.Event()
    async with composed_worker(
        settings, access, scheduler=scheduler, sender=sender, signing_keys=signing_keys
    ) as delivery:
        sealing = asyncio.create_task(delivery.sealer.run(stop))
        try:
            async with delivery.worker:
                try:
                    yield delivery
                finally:
                    stop.set()
        finally:
            try:
                await asyncio.wait({sealing})
            finally:
                sealing.cancel()  # if whoever stops has no time


def outbox_of(
    settings: Settings,
    database: Database,
    signing_keys: SigningKeys | None = None,
    *,
    told: Callable[[str, Sequence[Sealed]], None] = lambda _tenant, _sealed: None,
) -> Outbox:
    """An outbox as the settings want it, with the shipped signing keys unless there are others. Raises StartupError."""
    return Outbox(
        database,
        signing_keys or PemFolder(folder_of(settings)),
        kinds=kinds_of(settings),
        attempt_limit=settings.attempt_limit,
        told=told,
    )


def deployment_key(settings: Settings) -> DeploymentKey:
    """The key under which destinations' secrets lie in the database. Raises StartupError.

    It is made where the database is an embedded one; for any other, `postseal migrate` makes it.
    """
    return load_deployment_key(deployment_key_file(settings), make=settings.database_url is None)


def deployment_key_file(settings: Settings) -> Path:
    """Where that key lies."""
    return Path(settings.deployment_key_file) if settings.deployment_key_file else home_of(settings) / "deployment.key"


def pace_of(settings: Settings) -> Pace:
    """How the settings want the worker to go about it."""
    return Pace(
        cycles=settings.worker_cycles,
        lease_s=settings.lease_s,
        destination_concurrency=settings.destination_concurrency,
        cycle_timeout_s=settings.cycle_timeout_s,
        stop_grace_s=settings.stop_grace_s,
        poll_s=settings.poll_s,
        rate=Rate(settings.sync_permits_per_s, settings.sync_burst),
    )


def http_sender(settings: Settings) -> HttpSender:
    """The shipped sender as the settings want it, to be entered."""
    return HttpSender(
        allowed=read_networks(settings.allowed_cidrs),
        allow_http=settings.allow_http,
        proxy=settings.egress_proxy,
        ca_file=Path(settings.ca_file) if settings.ca_file else None,
        timeout_s=settings.send_timeout_s,
    )

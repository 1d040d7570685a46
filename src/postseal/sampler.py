"""What the running parts know of themselves, brought into the metrics.

Every second, so that a process which is not asked itself shows in the sum of all, and again when this one is asked. The
backlog of the database is read only when somebody asks, and at most every BACKLOG_FOR_S.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psycopg
import structlog
from prometheus_client import Counter, ProcessCollector
from structlog.typing import FilteringBoundLogger

from postseal.door import Door
from postseal.errors import Unavailable
from postseal.inbound.commit import Committer
from postseal.inbound.inbox import Inbox
from postseal.limits import RateLimiter
from postseal.metrics import Became, Limiter, Lost, Memory, Metrics, Pool
from postseal.outbound.worker import Worker
from postseal.postgres.access import Access
from postseal.postgres.backlog import Backlog, OutboundBacklog, read_backlog, read_outbound_backlog
from postseal.postgres.database import Database
from postseal.retention import Sweeper

SAMPLE_EVERY_S = 1.0
BACKLOG_FOR_S = 15.0
PROCESS_FOR_S = 15.0
"""Reading /proc takes tens of milliseconds on a busy machine, during which no request is served."""
BACKLOG_DEADLINE_S = 2.0

_log: FilteringBoundLogger = structlog.get_logger("postseal.metrics")


@dataclass(slots=True)
class Sampler:
    """Reads the parts of one process. `sample` costs a fraction of a millisecond and asks no database."""

    metrics: Metrics
    access: Access
    pools: Mapping[Pool, Database]
    door: Door
    inbox: Inbox
    committer: Committer
    _worker: Worker | None = None
    _sweeper: Sweeper | None = None
    _brought: dict[Counter, float] = field(default_factory=dict[Counter, float])
    _process: ProcessCollector = field(default_factory=lambda: ProcessCollector(registry=None))
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _read_at_s: float | None = None
    _process_at_s: float | None = None

    def __post_init__(self) -> None:
        self.metrics.processes.set(1)

    def watch(self, worker: Worker, pool: Database) -> None:
        """Bring what this process's worker knows too, and how the pool stands that it uses."""
        self._worker = worker
        self.pools = {**self.pools, Pool.WORKER: pool}

    def watch_sweep(self, sweeper: Sweeper) -> None:
        """Bring what this process's sweep did too."""
        self._sweeper = sweeper

    def sample(self) -> None:
        """Bring everything that is known without asking."""
        self._sample_flow()
        if self._worker is not None:
            self._sample_worker(self._worker)
        if self._sweeper is not None:
            self._sample_sweep(self._sweeper)
        self._sample_database()
        self._sample_process()

    async def sample_backlog(self) -> None:
        """Read the backlog unless that was tried within the last seconds. What cannot be read stays as it was."""
        async with self._reading:
            now_s = time.monotonic()
            if self._read_at_s is not None and now_s - self._read_at_s < BACKLOG_FOR_S:
                return
            self._read_at_s = now_s
            try:
                async with asyncio.timeout(BACKLOG_DEADLINE_S):
                    backlog = await self.pools[Pool.INGEST].transact(read_backlog)
                    outbound = await self.pools[Pool.DELIVERY].transact(read_outbound_backlog)
            except (Unavailable, TimeoutError, psycopg.Error) as error:
                _log.warning("backlog_not_read", error=type(error).__name__)
                return
        self.metrics.backlog_read_at.set(time.time())
        self._set_backlog(backlog)
        self._set_outbound_backlog(outbound)

    def _set_backlog(self, backlog: Backlog) -> None:
        metrics = self.metrics
        metrics.streams_read.set(backlog.streams)
        metrics.streams_with_holes.set(backlog.streams_with_holes)
        metrics.missing_sequences.set(backlog.missing_sequences)
        metrics.payload_age.set(backlog.oldest_payload_age_s)
        metrics.held_tenants.set(backlog.held_tenants)
        metrics.expired_payloads.set(backlog.expired_payloads)
        metrics.expired_age.set(backlog.expired_age_s)

    def _set_outbound_backlog(self, backlog: OutboundBacklog) -> None:
        metrics = self.metrics
        metrics.pending.set(backlog.pending)
        metrics.held.set(backlog.held)
        metrics.failing.set(backlog.failing_destinations)
        metrics.overdue.set(backlog.overdue_s)
        metrics.dead_letters.set(backlog.dead_letters)
        metrics.intents.set(backlog.intents)
        metrics.intent_age.set(backlog.intent_age_s)

    def _sample_flow(self) -> None:
        metrics = self.metrics
        metrics.queue_entries.set(self.committer.queued_entries)
        self._bring(metrics.signatures, self.inbox.verified)
        self._bring(metrics.signature_seconds, self.inbox.verified_s)
        for memory, lookups in ((Memory.CREDENTIALS, self.door.lookups), (Memory.SIGNERS, self.inbox.lookups)):
            self._bring(metrics.lookups[memory, True], lookups.hits)
            self._bring(metrics.lookups[memory, False], lookups.misses)
        self._sample_limiter(Limiter.PEER, self.door.limiter)
        self._sample_limiter(Limiter.SYNC, self.inbox.limiter)

    def _sample_worker(self, worker: Worker) -> None:
        metrics, counts = self.metrics, worker.totals
        for became in Became:
            self._bring(metrics.deliveries[became], getattr(counts, became))
        self._bring(metrics.leases_renewed, counts.renewed)
        self._bring(metrics.turns, worker.turns)
        self._bring(metrics.turns_lost[Lost.LIMITED], counts.limited)
        self._bring(metrics.turns_lost[Lost.FAILED], worker.failed_turns)
        self._bring(metrics.turns_lost[Lost.CUT_OFF], worker.timed_out_turns)
        metrics.deliveries_out.set(worker.out)

    def _sample_sweep(self, sweeper: Sweeper) -> None:
        metrics = self.metrics
        self._bring(metrics.swept, sweeper.counts.swept)
        self._bring(metrics.dated, sweeper.counts.dated)
        self._bring(metrics.sweeps_failed, sweeper.counts.failed)

    def _sample_limiter(self, name: Limiter, limiter: RateLimiter) -> None:
        for granted, asked in ((True, limiter.granted), (False, limiter.refused)):
            self._bring(self.metrics.limiter_requests[name, granted], asked.requests)
            self._bring(self.metrics.limiter_permits[name, granted], asked.permits)
        self._bring(self.metrics.permits_returned[name], limiter.returned_permits)

    def _sample_database(self) -> None:
        metrics = self.metrics
        metrics.accepting.set(self.access.accepting())
        disk = self.access.disk
        metrics.disk_free.set(math.nan if disk is None else disk.state.free_bytes)
        for name, database in self.pools.items():
            stats = database.stats()
            metrics.pool_in_use[name].set(stats.connections - stats.idle)
            metrics.pool_idle[name].set(stats.idle)
            metrics.pool_waiting[name].set(stats.waiting)
            self._bring(metrics.pool_timeouts[name], stats.timeouts)

    def _sample_process(self) -> None:
        now_s = time.monotonic()
        if self._process_at_s is not None and now_s - self._process_at_s < PROCESS_FOR_S:
            return
        self._process_at_s = now_s
        # Nothing where the system has no /proc.
        known = {sample.name: sample.value for family in self._process.collect() for sample in family.samples}
        metrics = self.metrics
        self._bring(metrics.cpu_seconds, known.get("process_cpu_seconds_total", 0))
        metrics.resident_bytes.set(known.get("process_resident_memory_bytes", 0))
        metrics.open_files.set(known.get("process_open_fds", 0))
        metrics.max_files.set(known.get("process_max_fds", 0))
        metrics.start_time.set(known.get("process_start_time_seconds", 0))

    def _bring(self, counter: Counter, total: float) -> None:
        """Let `counter` grow by what `total` grew since it was brought last."""
        counter.inc(total - self._brought.get(counter, 0))
        self._brought[counter] = total


@asynccontextmanager
async def sampling(sampler: Sampler) -> AsyncGenerator[None]:
    """Sample every second until the block ends, and once more then."""

    async def run() -> None:
        while True:
            sampler.sample()
            await asyncio.sleep(SAMPLE_EVERY_S)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        sampler.sample()

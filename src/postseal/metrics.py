"""Every metric of the service: its name, labels and meaning, as docs/metrics.md lists them.

Labels take the members of closed sets as values, and each series is made at the start: nothing that a caller sends can
make one or stand in one. No tenant, project, device or peer is a label.

On the path of an envelope these are touched once a group. What happens more often its part counts in plain numbers,
which `sampler.py` brings here. Where several processes share a port, each writes its numbers into files of one folder,
and whichever process is asked adds them up.
"""

import os
from enum import StrEnum
from importlib.metadata import version
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    multiprocess,
    values,
)

from postseal.outcomes import Outcome, Reason

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The client library's own name. Where it is set, processes share a folder."""

ENTRIES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

Of = Literal["livesum", "livemax", "livemin", "livemostrecent"]
"""How the gauges of the processes that live become one: queues add up, a disk is the same for all."""


class CommitResult(StrEnum):
    """How one transaction of a group ended."""

    CERTAIN = "certain"
    RETRIED = "retried"
    """A serialisation failure or a deadlock: the group runs once more."""
    RERUN = "rerun"
    """A fault of ours: its entries run again one by one."""
    UNAVAILABLE = "unavailable"


class Limiter(StrEnum):
    """The limiters of checks 0 and 1 (protocol section 4)."""

    PEER = "peer"
    SYNC = "sync"


class Pool(StrEnum):
    """The connection pools of one process."""

    INGEST = "ingest"
    ADMIN = "admin"
    READS = "reads"
    DELIVERY = "delivery"
    WORKER = "worker"


class Became(StrEnum):
    """What came of a delivery that a worker claimed, as `means.Counts` has it."""

    DELIVERED = "delivered"
    RETRIED = "retried"
    DEAD = "dead"
    ENDED = "ended"
    RELEASED = "released"
    FENCED = "fenced"
    LEFT = "left"


class Lost(StrEnum):
    """Why a tenant's turn was not used to its end."""

    LIMITED = "limited"
    FAILED = "failed"
    CUT_OFF = "cut_off"


class Memory(StrEnum):
    """What is remembered of earlier look-ups."""

    CREDENTIALS = "credentials"
    SIGNERS = "signers"


class Metrics:
    """The metrics of one process, each series at its start value."""

    def __init__(self) -> None:
        disable_created_metrics()  # which a shared folder has not, and nobody asks for
        self.registry = CollectorRegistry()
        self._make_inbound()
        self._make_outbound()
        self._make_callers()
        self._make_database()
        self._make_process()

    def exposed(self) -> CollectorRegistry:
        """What a scrape shows: this process, or all that share its folder."""
        if FOLDER_VARIABLE not in os.environ:
            return self.registry
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return registry

    def _make_inbound(self) -> None:
        outcomes = self._counter("envelopes_total", "Envelopes acknowledged, once their commit was certain", "outcome")
        self.envelopes = {outcome: outcomes.labels(outcome) for outcome in Outcome}
        refusals = self._counter(
            "refusals_total",
            "Refusals answered: each line of a batch for itself, a request that was refused whole once",
            "reason",
        )
        self.refusals = {reason: refusals.labels(reason) for reason in Reason}
        self.group_entries = self._histogram(
            "group_entries", "Entries that were committed together; a readiness probe is a group of none", ENTRIES
        )
        self.group_wait = self._histogram(
            "group_wait_seconds", "How long the oldest entry of a group waited until the group began", SECONDS
        )
        self.commit_seconds = self._histogram(
            "commit_seconds", "How long one transaction of a group took, whatever its result", SECONDS
        )
        commits = self._counter(
            "commits_total",
            "Transactions of groups: certain; unavailable (nothing is known); retried (the group ran once more); "
            "rerun (a fault of the service: its entries ran again one by one)",
            "result",
        )
        self.commits = {result: commits.labels(result) for result in CommitResult}
        self.queue_entries = self._gauge("queue_entries", "Entries that wait for a group; a process takes 20,000")
        self.signatures = self._counter("signatures_verified_total", "Signatures verified, good ones and bad ones")
        self.signature_seconds = self._counter("signature_seconds_total", "Seconds spent on verifying signatures")

    def _make_outbound(self) -> None:
        deliveries = self._counter(
            "deliveries_total",
            "What came of deliveries that a worker claimed; ended: expired or out of attempts, nothing was sent; "
            "released: given back unsent; fenced: somebody else's by now; left: to the end of their leases",
            "became",
        )
        self.deliveries = {became: deliveries.labels(became) for became in Became}
        self.leases_renewed = self._counter("leases_renewed_total", "Leases made longer because a push took long")
        self.turns = self._counter("turns_total", "Turns of tenants that a worker began")
        lost = self._counter("turns_lost_total", "Those of them that were not used to their end", "why")
        self.turns_lost = {why: lost.labels(why) for why in Lost}
        self.deliveries_out = self._gauge("deliveries_out", "Deliveries that workers push, or are about to")
        self.pending = self._database_gauge(
            "pending_deliveries", "Deliveries that wait or are out, pulled and held ones among them"
        )
        self.held = self._database_gauge("held_deliveries", "Those of them whose destination is disabled")
        self.failing = self._database_gauge("failing_destinations", "Destinations whose last attempt failed")
        self.overdue = self._database_gauge(
            "overdue_seconds", "How long ago, in seconds, the delivery became due that waits longest for a worker"
        )
        self.dead_letters = self._database_gauge("dead_letters", "Dead letters, counted up to 10,000")
        self.intents = self._database_gauge("intents", "Intents that are not sealed yet, counted up to 10,000")
        self.intent_age = self._database_gauge("intent_age_seconds", "Age in seconds of the oldest of them")

    def _make_callers(self) -> None:
        requests = self._counter("limiter_requests_total", "Requests, by what a limiter answered", "limiter", "answer")
        permits = self._counter(
            "limiter_permits_total",
            "Permits that were asked for; those of the peer limiter are returned where the credential was valid",
            "limiter",
            "answer",
        )
        lookups = self._counter(
            "lookups_total",
            "Look-ups of what may be remembered; what is not is asked of the database",
            "memory",
            "found",
        )
        answers = {True: "granted", False: "refused"}
        found = {True: "yes", False: "no"}
        self.limiter_requests = {(of, yes): requests.labels(of, answers[yes]) for of in Limiter for yes in answers}
        self.limiter_permits = {(of, yes): permits.labels(of, answers[yes]) for of in Limiter for yes in answers}
        self.permits_returned = {of: permits.labels(of, "returned") for of in Limiter}
        self.lookups = {(of, yes): lookups.labels(of, found[yes]) for of in Memory for yes in found}

    def _make_database(self) -> None:
        size = self._gauge("pool_connections", "Connections of a pool, in use and idle", "pool", "state")
        self.pool_in_use = {pool: size.labels(pool, "in_use") for pool in Pool}
        self.pool_idle = {pool: size.labels(pool, "idle") for pool in Pool}
        waiting = self._gauge("pool_waiting", "Requests that wait for a connection of a pool", "pool")
        self.pool_waiting = {pool: waiting.labels(pool) for pool in Pool}
        timeouts = self._counter("pool_timeouts_total", "Requests that got no connection of a pool in time", "pool")
        self.pool_timeouts = {pool: timeouts.labels(pool) for pool in Pool}
        self.accepting = self._gauge(
            "accepting", "1 while the database has room for envelopes, 0 while none are taken in", of="livemin"
        )
        self.disk_free = self._gauge(
            "disk_free_bytes", "Bytes free on the disk of an embedded database; NaN for any other", of="livemostrecent"
        )
        self.backlog_read_at = self._database_gauge(
            "backlog_read_timestamp_seconds", "Unix time at which the figures on streams and payloads were read"
        )
        self.streams_read = self._database_gauge(
            "streams_read", "Streams looked at for holes; from 200,000 on there may be more, and more holes"
        )
        self.streams_with_holes = self._database_gauge(
            "streams_with_holes", "Those that miss a sequence below their highest"
        )
        self.missing_sequences = self._database_gauge("missing_sequences", "Sequences that they miss")
        self.payload_age = self._database_gauge(
            "oldest_payload_age_seconds",
            "Age of the payload that expires next: the oldest, where all are kept equally long",
        )
        self.held_tenants = self._database_gauge("held_tenants", "Tenants of which a hold lets no payload be deleted")
        self.expired_payloads = self._database_gauge(
            "expired_payloads",
            "Payloads that have expired and are not deleted yet, counted up to 10,000; without those that are held",
        )
        self.expired_age = self._database_gauge(
            "expired_payload_age_seconds", "How long ago the first of those expired"
        )
        self.swept = self._counter("payloads_swept_total", "Expired payloads that were deleted")
        self.dated = self._counter(
            "payloads_dated_total", "Payloads of deliveries that ended, which were given their time of expiry"
        )
        self.sweeps_failed = self._counter(
            "sweep_failures_total", "Batches of the sweep that failed; it goes on with a smaller one"
        )

    def _make_process(self) -> None:
        self.processes = self._gauge("processes", "Processes that serve")
        self.cpu_seconds = self._counter("process_cpu_seconds_total", "Seconds of CPU that the processes used")
        self.resident_bytes = self._gauge("process_resident_bytes", "Memory that the processes hold, in bytes")
        self.open_files = self._gauge(
            "process_open_files", "File descriptors of the process that has the most", of="livemax"
        )
        self.max_files = self._gauge("process_max_files", "File descriptors that a process may have", of="livemin")
        self.start_time = self._gauge(
            "process_start_time_seconds", "Unix time at which the last of the processes started", of="livemax"
        )
        build = self._gauge("build_info", "1, under the version of postseal", "version", of="livemax")
        build.labels(version("postseal")).set(1)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"postseal_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"postseal_{name}", meaning, registry=self.registry, buckets=bounds)

    def _gauge(self, name: str, meaning: str, *labels: str, of: Of = "livesum") -> Gauge:
        return Gauge(f"postseal_{name}", meaning, labels, registry=self.registry, multiprocess_mode=of)

    def _database_gauge(self, name: str, meaning: str) -> Gauge:
        return self._gauge(name, meaning, of="livemostrecent")


def share_as(number: int) -> None:
    """Write the metrics made from here on into the shared folder, under `number`.

    The library would name the files by process id, and leave a set of them behind with each process that ends. Under
    a number, the process that takes a dead one's place goes on with its counters, and the files do not grow in number.
    """
    values.ValueClass = values.MultiProcessValue(lambda: number)  # pyright: ignore[reportUnknownMemberType] - untyped there


def mark_dead(number: int, folder: str) -> None:
    """Take the gauges of a process that ended out of those of its folder; its counters stay."""
    multiprocess.mark_process_dead(number, folder)  # pyright: ignore[reportUnknownMemberType] - untyped there

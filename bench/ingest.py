"""`make bench`: how fast envelopes come in over HTTP, beside the bare SQL on the same machine in the same run.

(a) pgbench of `ingest.sql`, one transaction an envelope, the same tables and indexes
(b) `postseal serve --processes 2`, limits on, real signatures, full audit, driven by `load.c` with envelopes signed
    beforehand: batches of 100, and single requests on 64 connections
(c) the same batches, their payloads of the same size and of a kind that the deployment adds by a JSON Schema

The measurements alternate after a warm-up: a-b-c-a-b, each round; the figures are medians over the rounds, the ratios
of medians. `batch_ratio` and `single_ratio` are (b) over (a), `kind_ratio` is (c) over the batches of (b). Then, at
half of the top rate each, how long an acknowledgement takes. Prints everything and writes `bench/results/ingest.json`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from bench.rig import (
    BATCH,
    BATCH_CONNECTIONS,
    HERE,
    TASK_STATUS,
    Device,
    Site,
    enrolled,
    in_order,
    median,
    publish,
    site,
    workplace,
)
from postseal.postgres.access import Access
from postseal.postgres.binaries import find_binaries

PGBENCH_STREAMS = 64
CONNECTIONS = 64
# The most that a round is expected to send a second; signing more beforehand only costs time.
MOST_BATCHED_A_SECOND = 14_000
MOST_SINGLE_A_SECOND = 7_000

KIND = "bench.state"
"""As long as `task-status`, so that the payloads are of the same size."""
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["kind", "taskId", "attempt", "status", "progress"],
    "properties": {
        "kind": {"const": KIND},
        "taskId": {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
        "attempt": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
        "status": {"enum": ["queued", "running", "succeeded", "failed", "cancelled"]},
        "progress": {"type": "integer", "minimum": 0, "maximum": 100},
        "errorCode": {"enum": ["timeout", "invalid-input", "dependency-failed", "resource-exhausted", "internal"]},
        "resultDigest": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
    },
}
"""The rules of `task-status`, as a deployment would write them."""


def main() -> None:
    """Run the benchmark that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is repeated")
    parser.add_argument("--warm-up", type=float, default=5, help="seconds before the first measurement")
    options = parser.parse_args()
    with workplace() as folder:
        results = run(folder, options.seconds, options.rounds, options.warm_up)
    publish("ingest", results)


def run(folder: Path, seconds: float, rounds: int, warm_up: float) -> dict[str, Any]:
    """Measure everything on one site in `folder`."""
    kinds = folder / "kinds"
    kinds.mkdir()
    (kinds / f"{KIND}.json").write_text(json.dumps(SCHEMA))
    with site(folder, "home", {"kinds_dir": kinds}) as measured_site:
        add_pgbench_streams(measured_site.access)
        bench = Bench(measured_site, enrolled(measured_site.access, [f"device-{n}" for n in range(CONNECTIONS)]))
        bench.batches(warm_up)
        bench.batches(warm_up, kind=KIND)
        bench.singles(warm_up)
        bench.pgbench(warm_up)
        measured: dict[str, list[dict[str, float]]] = {"pgbench": [], "batch": [], "kind": [], "single": []}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            measured["pgbench"].append(bench.pgbench(seconds))
            measured["batch"].append(bench.batches(seconds))
            measured["kind"].append(bench.batches(seconds, kind=KIND))
            measured["pgbench"].append(bench.pgbench(seconds))
            measured["single"].append(bench.singles(seconds))
        tps, batch, kind, single = (median(measured[name], "rate") for name in ("pgbench", "batch", "kind", "single"))
        halves: dict[str, list[dict[str, float]]] = {"batch": [], "single": []}
        for number in range(rounds):
            print(f"half of the top rate: round {number + 1} of {rounds}", file=sys.stderr)
            halves["batch"].append(bench.batches(seconds, rate=batch / 2 / BATCH))
            halves["single"].append(bench.singles(seconds, rate=single / 2))
        half = {name: medians(measures) for name, measures in halves.items()}
        rss_mib = measured_site.peak_rss_mib()
        return {
            "command": " ".join(["python -m bench.ingest", *sys.argv[1:]]),
            "cpus": os.cpu_count(),
            "pgbench_tps": round(tps),
            "batch_rate": round(batch),
            "batch_ratio": round(batch / tps, 2),
            "kind_rate": round(kind),
            "kind_ratio": round(kind / batch, 2),
            "single_rate": round(single),
            "single_ratio": round(single / tps, 2),
            "p99_ms_at_half": max(each["p99_ms"] for each in half.values()),
            "server_rss_mib": round(max(rss_mib)),
            "server_rss_mib_total": round(sum(rss_mib)),
            "half_of_top_rate": half,
            "rounds": measured | {f"half_{name}": measures for name, measures in halves.items()},
        }


class Bench:
    """The measurements, each in envelopes a second, on one site."""

    def __init__(self, measured_site: Site, devices: list[Device]) -> None:
        self._site = measured_site
        self._devices = devices

    def pgbench(self, seconds: float) -> dict[str, float]:
        """(a): transactions a second of the bare SQL, prepared, 16 clients, 2 threads."""
        program = find_binaries(None).bin / "pgbench"
        command = [str(program), "-n", "-M", "prepared", "-c", "16", "-j", "2", "-T", str(max(1, round(seconds)))]
        command += ["-D", f"devices={PGBENCH_STREAMS}", "-f", str(HERE / "ingest.sql"), self._site.access.owner]
        environment = os.environ | {"PGOPTIONS": "-c search_path=postseal"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("tps = ")]
        return {"rate": float(line.split()[2])}

    def batches(self, seconds: float, *, rate: float = 0, kind: str = TASK_STATUS) -> dict[str, float]:
        """(b), (c): in batches of 100, one batch at a time on each of 16 connections."""
        most = rate * BATCH if rate else MOST_BATCHED_A_SECOND
        shares = in_order(self._devices[:BATCH_CONNECTIONS], most * seconds, BATCH, kind)
        return self._site.drive(shares, BATCH, seconds, rate=rate)

    def singles(self, seconds: float, *, rate: float = 0) -> dict[str, float]:
        """(b): one a request, on 64 connections."""
        shares = in_order(self._devices, (rate or MOST_SINGLE_A_SECOND) * seconds, 1)
        return self._site.drive(shares, 1, seconds, rate=rate)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {name: round(median(rounds, name), 3) for name in rounds[0]}


def add_pgbench_streams(access: Access) -> None:
    """The streams that `ingest.sql` writes to."""
    with psycopg.connect(access.owner) as owner:
        owner.execute(
            "INSERT INTO postseal.streams (tenant, project, producer) "
            "SELECT 'bench', 'main', 'pgbench-' || n FROM generate_series(1, %s) AS n",
            [PGBENCH_STREAMS],
        )


if __name__ == "__main__":
    main()

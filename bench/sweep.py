"""`make bench-sweep`: how long acknowledgements take while a million expired payloads are deleted beside them.

A pair on one site, `postseal serve --processes 2 --no-sweep`, with a million payloads in it that have expired
(`--expired`), a-b-a-b after a warm-up that finds the top rate; medians over the rounds, `p99_ratio` of the medians, b
over a:

(a) `quiet`: batches of 100 by 16 devices, at half of the top rate
(b) `sweeping`: the same, while `postseal sweep` runs all the time, which is checked

In the end `postseal sweep --once` deletes what is left, and nothing that expired is there any more. The load average
before each measurement stands beside it, since what else runs on the machine shows in a p99 first. Prints everything
and writes `bench/results/sweep.json`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from bench.rig import (
    BATCH,
    BATCH_CONNECTIONS,
    STOP_DEADLINE_S,
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
from postseal.settings import Settings

EXPIRED = 1_000_000
FILL_ROWS = 100_000
MOST_A_SECOND = 15_000
POSTSEAL = Path(sys.executable).with_name("postseal")

FILL: LiteralString = """
WITH retained AS (
    INSERT INTO identities (tenant, stream, sequence, event_id, idempotency_hash, event_identity, keyid, accepted_at)
    SELECT s.tenant, s.stream, n, gen_random_uuid(), gen_random_uuid(), sha256(n::text::bytea), repeat('k', 43),
           clock_timestamp() - interval '91 days'
    FROM streams s CROSS JOIN generate_series(%(first)s::bigint, %(last)s::bigint) AS n
    WHERE s.tenant = 'bench' AND s.project = 'main' AND s.producer = %(device)s
    RETURNING tenant, stream, sequence
)
INSERT INTO payloads (tenant, stream, sequence, expires_at, payload, signature)
SELECT tenant, stream, sequence, clock_timestamp() - interval '1 day', decode(repeat('7b', 430), 'hex'),
       decode(repeat('aa', 64), 'hex')
FROM retained
"""
COUNT: LiteralString = "SELECT count(*) FROM payloads WHERE expires_at <= now()"


def main() -> None:
    """Run the benchmark that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is repeated")
    parser.add_argument("--warm-up", type=float, default=5, help="seconds in which the top rate is found")
    parser.add_argument("--expired", type=int, default=EXPIRED, help="how many payloads have expired")
    options = parser.parse_args()
    with workplace() as folder, site(folder, "sweep", {"sweep": "false"}) as measured_site:
        results = run(measured_site, options.seconds, options.rounds, options.warm_up, options.expired)
    publish("sweep", results)


def run(measured_site: Site, seconds: float, rounds: int, warm_up: float, expired: int) -> dict[str, Any]:
    """Measure the pair on a site."""
    access = measured_site.access
    devices = enrolled(access, [f"device-{number}" for number in range(BATCH_CONNECTIONS)])
    fill(access, enrolled(access, ["old"])[0], expired)
    top = measured_site.drive(in_order(devices, MOST_A_SECOND * warm_up, BATCH), BATCH, warm_up)["rate"]
    quiet: list[dict[str, float]] = []
    sweeping: list[dict[str, float]] = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        quiet.append(half(measured_site, devices, top, seconds))
        with swept_beside(measured_site.home):
            begun, before = time.monotonic(), count(access)
            result = half(measured_site, devices, top, seconds)
            left = count(access)
            result["swept_a_second"] = round((before - left) / (time.monotonic() - begun))
        if not left:
            raise RuntimeError("nothing had expired any more before the measurement ended: --expired is too low")
        sweeping.append(result)
    command = [POSTSEAL, "sweep", "--once", "--json", "--data-dir", str(measured_site.home)]
    rest = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if left := count(access):
        raise RuntimeError(f"{left} expired payloads are left")
    return {
        "command": " ".join(["python -m bench.sweep", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "expired": expired,
        "pause_s": Settings().sweep_pause_s,
        "top_rate": round(top),
        "quiet_p99_ms": round(median(quiet, "p99_ms"), 1),
        "sweeping_p99_ms": round(median(sweeping, "p99_ms"), 1),
        "p99_ratio": round(median(sweeping, "p99_ms") / median(quiet, "p99_ms"), 2),
        "quiet_p50_ms": round(median(quiet, "p50_ms"), 1),
        "sweeping_p50_ms": round(median(sweeping, "p50_ms"), 1),
        "swept_a_second": round(median(sweeping, "swept_a_second")),
        "swept_in_the_end": rest["swept"],
        "rounds": {"quiet": quiet, "sweeping": sweeping},
    }


def half(measured_site: Site, devices: Sequence[Device], top: float, seconds: float) -> dict[str, float]:
    """Batches of 100 at half of the top rate."""
    load = os.getloadavg()[0]
    shares = in_order(devices, top / 2 * seconds, BATCH)
    return measured_site.drive(shares, BATCH, seconds, rate=top / 2 / BATCH) | {"load_average": load}


@contextmanager
def swept_beside(home: Path) -> Generator[None]:
    """A `postseal sweep` that runs until the block ends."""
    command = [POSTSEAL, "sweep", "--json", "--data-dir", str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("the sweep did not begin")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_DEADLINE_S)


def fill(access: Access, device: Device, expired: int) -> None:
    """Retain so many envelopes of a device whose payloads have expired, and tell how far it is."""
    with psycopg.connect(access.owner, autocommit=True) as owner:
        owner.execute("SET search_path = postseal")
        owner.execute("SET synchronous_commit = off")
        for first in range(1, expired + 1, FILL_ROWS):
            last = min(first + FILL_ROWS - 1, expired)
            owner.execute(FILL, {"device": device.name, "first": first, "last": last})
            print(f"{last:,} of {expired:,} payloads are filled in", file=sys.stderr)
        owner.execute("VACUUM (ANALYZE)")
        owner.execute("CHECKPOINT")


def count(access: Access) -> int:
    """How many payloads have expired and are there."""
    with psycopg.connect(access.owner, options="-c search_path=postseal") as owner:
        row = owner.execute(COUNT).fetchone()
    assert row is not None
    return row[0]


if __name__ == "__main__":
    main()

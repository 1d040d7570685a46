"""`make bench-large`: whether ingest slows down with holes, where all goes into one stream, or with what is retained.

Three pairs, each a-b-a-b after a warm-up; the figures are medians over the rounds, a ratio is the one of medians, b
over a:

1. `no_holes`: 16 streams, in order. `holes`: 16 streams whose window is full of alternate holes, 512 of them, and
   stays so: of each two envelopes one fills the lowest hole, and one lies at the window's upper end
2. `many`: 16 streams. `one`: all connections send for one device into one stream. On both sides the requests go out as
   one list, and none goes so far ahead of an unanswered one that it could lie beyond the window
3. `small`: 16 streams that hold ten thousand identities in all, in a database that holds no more when a measurement
   begins: it is emptied and filled anew before each. `large`: 16 streams that hold ten million (`--identities`)

Everything goes over 16 connections, in batches of 100, but of 32 in pair 2. There are two sites, each with its database
and `postseal serve --processes 2`, of which one is driven at a time: `large` is measured on the one, all else on the
other. One device alone may send more than the sync limit lets it by default, so both servers have a higher limit.

What is filled in lies one half in one stream, the other half spread over the other 15. It has identities and audit
events for all, and payloads for the newest tenth of each stream, as if retention had removed the others. Prints
everything and writes `bench/results/large.json`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from bench.rig import (
    BATCH,
    BATCH_CONNECTIONS,
    Device,
    Share,
    Site,
    enrolled,
    in_order,
    median,
    publish,
    requests_each,
    site,
    workplace,
)
from postseal.postgres.access import Access
from postseal.postgres.ingest import bitmap_to_bytes
from postseal.settings import Settings

# The most that is expected to come in a second; signing more beforehand only costs time.
MOST_A_SECOND = 15_000
SMALL_IDENTITIES = 10_000
IDENTITIES = 10_000_000
FILL_ROWS = 100_000
FIRST_FILLED_MS = 1_600_000_000_000
"""The time that the first filled in event id bears: before all that a device will send."""
PAYLOADS_KEPT = 0.1
WINDOW = Settings().window
ALTERNATE_HOLES = sum(1 << place for place in range(1, WINDOW, 2))
"""`streams.above` where every other sequence of the window is retained; the first one above the cursor never is."""
SERVER_SETTINGS = {"sync_permits_per_s": 1_000_000, "sync_burst": 1_000_000}
LISTED_BATCH = 32
LISTED_AHEAD = WINDOW // LISTED_BATCH
"""Requests: what the last of so many carries is within the window while the first of them is not committed."""

Measurement = Callable[[float], dict[str, float]]
"""Measures for so many seconds, and gives what `Site.drive` gives."""

# As a device's, an event id is of version 7, here with a millisecond for each sequence, and the hash of an idempotency
# key is one that an index takes at any place. Random numbers would do as well as hashes, and six a row took PostgreSQL
# half of the time.
FILL: LiteralString = """
WITH retained AS (
    INSERT INTO identities (tenant, stream, sequence, event_id, idempotency_hash, event_identity, keyid, accepted_at)
    SELECT s.tenant, s.stream, n,
           overlay(overlay(md5('event:' || s.producer || ':' || n)
               PLACING lpad(to_hex(%(first_ms)s::bigint + n), 12, '0') || '7' FROM 1) PLACING '8' FROM 17)::uuid,
           md5('key:' || s.producer || ':' || n)::uuid, sha256(convert_to(s.producer || ':' || n, 'UTF8')), k.keyid,
           clock_timestamp()
    FROM streams s
    JOIN keys k ON k.tenant = s.tenant AND k.device = s.producer
    CROSS JOIN generate_series(%(first)s::bigint, %(last)s::bigint, %(step)s::bigint) AS n
    WHERE s.tenant = 'bench' AND s.project = 'main' AND s.producer = %(device)s
    RETURNING tenant, stream, sequence, event_id, idempotency_hash, event_identity
), stored AS (
    INSERT INTO payloads (tenant, stream, sequence, expires_at, payload, signature)
    SELECT tenant, stream, sequence, clock_timestamp() + interval '90 days',
           decode(repeat('7b', 430), 'hex'), decode(repeat('aa', 64), 'hex')
    FROM retained WHERE sequence > %(expired)s
)
INSERT INTO audit_events (tenant, project, account, device, action, outcome, event_identity, correlation_id, salt)
SELECT tenant, 'main', 'bench', %(device)s, 'envelope', 'accepted', event_identity, event_id,
       uuid_send(idempotency_hash)
FROM retained
"""

MOVE: LiteralString = """
UPDATE streams SET contiguous = %(contiguous)s, highest = %(highest)s, above = %(above)s
WHERE tenant = 'bench' AND project = 'main' AND producer = %(device)s
"""

WITH_BITMAP: LiteralString = """
SELECT count(*) FROM streams
WHERE tenant = 'bench' AND project = 'main' AND producer = ANY(%(devices)s) AND above = %(above)s
"""


def main() -> None:
    """Run the benchmark that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is repeated")
    parser.add_argument("--warm-up", type=float, default=5, help="seconds of each before its pair's first round")
    parser.add_argument("--identities", type=int, default=IDENTITIES, help="how many the large database holds")
    options = parser.parse_args()
    with workplace() as folder:
        results = run(folder, options.seconds, options.rounds, options.warm_up, options.identities)
    publish("large", results)


def run(folder: Path, seconds: float, rounds: int, warm_up: float, identities: int) -> dict[str, Any]:
    """Measure the three pairs on two sites in `folder`."""

    def alternate(pair: Mapping[str, Measurement]) -> dict[str, list[dict[str, float]]]:
        for measure in pair.values():
            measure(warm_up)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in pair}
        for number in range(rounds):
            print(f"{' and '.join(pair)}: round {number + 1} of {rounds}", file=sys.stderr)
            for name, measure in pair.items():
                measured[name].append(measure(seconds))
        return measured

    with site(folder, "small", SERVER_SETTINGS) as small, site(folder, "large", SERVER_SETTINGS) as large:
        bench = Bench(small, large)
        holes = alternate({"no_holes": bench.no_holes, "holes": bench.holes})
        streams = alternate({"many": bench.many, "one": bench.one})
        bench.fill_large(identities)
        sizes = alternate({"small": bench.small, "large": bench.large})
    return {
        "command": " ".join(["python -m bench.large", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "identities": identities,
        **figures(sizes),
        **figures(holes),
        **figures(streams),
        "rounds": sizes | holes | streams,
    }


def figures(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Of a pair: envelopes a second, the CPU of one in microseconds, and the ratio, named after the second of them."""
    found: dict[str, float] = {}
    for name, rounds in measured.items():
        found[f"{name}_rate"] = round(median(rounds, "rate"))
        found[f"{name}_server_cpu_us"] = round(median(rounds, "server_cpu_us"), 1)
        found[f"{name}_postgres_cpu_us"] = round(median(rounds, "postgres_cpu_us"), 1)
    first, second = measured
    found[f"{second}_ratio"] = round(median(measured[second], "rate") / median(measured[first], "rate"), 2)
    return found


class Bench:
    """The measurements, each in envelopes a second; all but `large` on the site `small`."""

    def __init__(self, small: Site, large: Site) -> None:
        self._small_site = small
        self._large_site = large
        self._smooth, self._holed, self._many, self._small = (
            sixteen(small.access, name) for name in ("smooth", "holed", "many", "small")
        )
        (self._hot,) = enrolled(small.access, ["hot"])
        self._large = sixteen(large.access, "large")
        make_holes(small.access, self._holed)

    def fill_large(self, identities: int) -> None:
        """Let the streams of `large` hold so many identities in all."""
        fill(self._large_site.access, self._large, identities)
        settle(self._large_site.access)

    def no_holes(self, seconds: float) -> dict[str, float]:
        """16 streams, in order."""
        return batches(self._small_site, self._smooth, seconds)

    def holes(self, seconds: float) -> dict[str, float]:
        """16 streams full of holes, which are still there in the end."""
        each = requests_each(self._holed, MOST_A_SECOND * seconds, BATCH) * BATCH
        shares = [Share(device, among_holes(device.sequence, each)) for device in self._holed]
        result = self._small_site.drive(shares, BATCH, seconds)
        require_holes(self._small_site.access, self._holed)
        return result

    def many(self, seconds: float) -> dict[str, float]:
        """16 streams, from one list."""
        shares = in_order(self._many, MOST_A_SECOND * seconds, LISTED_BATCH)
        return self._small_site.drive(shares, LISTED_BATCH, seconds, ahead=LISTED_AHEAD)

    def one(self, seconds: float) -> dict[str, float]:
        """One stream, from one list."""
        (whole,) = in_order([self._hot], MOST_A_SECOND * seconds, LISTED_BATCH)
        shares = dealt(whole, BATCH_CONNECTIONS, LISTED_BATCH)
        return self._small_site.drive(shares, LISTED_BATCH, seconds, ahead=LISTED_AHEAD)

    def small(self, seconds: float) -> dict[str, float]:
        """16 streams with ten thousand identities in all, alone in their database."""
        empty(self._small_site.access)
        fill(self._small_site.access, self._small, SMALL_IDENTITIES)
        settle(self._small_site.access)
        return batches(self._small_site, self._small, seconds)

    def large(self, seconds: float) -> dict[str, float]:
        """16 streams with all that `fill_large` filled in."""
        return batches(self._large_site, self._large, seconds)


def sixteen(access: Access, name: str) -> list[Device]:
    """As many devices as there are connections."""
    return enrolled(access, [f"{name}-{number}" for number in range(BATCH_CONNECTIONS)])


def batches(measured_site: Site, devices: Sequence[Device], seconds: float) -> dict[str, float]:
    """In batches of 100, one at a time on each device's connection."""
    return measured_site.drive(in_order(devices, MOST_A_SECOND * seconds, BATCH), BATCH, seconds)


def dealt(whole: Share, parts: int, lines: int) -> list[Share]:
    """The requests of one share dealt to several: whoever takes one of each in turn has the share's order again."""
    first, last = whole.sequences[0], whole.sequences[-1]
    requests = range(first, last + 1 - (last + 1 - first) % (parts * lines), lines)
    return [
        Share(whole.device, [request + line for request in requests[part::parts] for line in range(lines)])
        for part in range(parts)
    ]


def among_holes(contiguous: int, count: int) -> list[int]:
    """An even number of sequences that leave a window of alternate holes as it is, two places further on each time.

    The first of two fills the hole above the cursor, which moves by two; the second is then the window's last.
    """
    return [
        sequence
        for cursor in range(contiguous, contiguous + count, 2)
        for sequence in (cursor + 1, cursor + 2 + WINDOW)
    ]


def make_holes(access: Access, devices: Sequence[Device]) -> None:
    """Retain every other sequence of the window, and nothing else, in streams that are empty."""
    with psycopg.connect(access.owner) as owner:
        owner.execute("SET LOCAL search_path = postseal")
        for device in devices:
            names = {
                "device": device.name,
                "first": 2,
                "last": WINDOW,
                "step": 2,
                "expired": 0,
                "first_ms": FIRST_FILLED_MS,
            }
            owner.execute(FILL, names)
            cursor = {"contiguous": 0, "highest": WINDOW, "above": bitmap_to_bytes(ALTERNATE_HOLES)}
            owner.execute(MOVE, names | cursor)


def require_holes(access: Access, devices: Sequence[Device]) -> None:
    """Raise RuntimeError unless all streams have a window of alternate holes."""
    with psycopg.connect(access.owner) as owner:
        owner.execute("SET LOCAL search_path = postseal")
        wanted = {"devices": [device.name for device in devices], "above": bitmap_to_bytes(ALTERNATE_HOLES)}
        row = owner.execute(WITH_BITMAP, wanted).fetchone()
    if row != (len(devices),):
        raise RuntimeError("the holes were not there all the time")


def fill(access: Access, devices: Sequence[Device], identities: int) -> None:
    """Let streams that retain nothing hold so many identities in all, without a hole, and tell how far it is."""
    done = 0
    with psycopg.connect(access.owner, autocommit=True) as owner:
        owner.execute("SET search_path = postseal")
        owner.execute("SET synchronous_commit = off")
        for device, count in zip(devices, spread(identities, len(devices)), strict=True):
            expired = count - round(count * PAYLOADS_KEPT)
            for first in range(1, count + 1, FILL_ROWS):
                last = min(first + FILL_ROWS - 1, count)
                fill_range(owner, device, range(first, last + 1), expired)
                done += last + 1 - first
                if last % FILL_ROWS == 0:
                    print(f"{done:,} of {identities:,} identities are filled in", file=sys.stderr)
            owner.execute(MOVE, {"device": device.name, "contiguous": count, "highest": count, "above": b""})
            device.sequence = count


def fill_range(owner: psycopg.Connection, device: Device, sequences: range, expired: int) -> None:
    """Retain these sequences in the device's stream; those up to `expired` have no payload any more."""
    names = {"device": device.name, "expired": expired, "first_ms": FIRST_FILLED_MS}
    owner.execute(FILL, names | {"first": sequences[0], "last": sequences[-1], "step": sequences.step})


def spread(identities: int, streams: int) -> list[int]:
    """How many each stream holds: the first one half of them, the others as good as the same."""
    others, rest = streams - 1, identities - identities // 2
    return [identities // 2] + [rest // others + (number < rest % others) for number in range(others)]


def empty(access: Access) -> None:
    """Retain nothing. No stream but those that are filled next can be used after it."""
    with psycopg.connect(access.owner) as owner:
        owner.execute("TRUNCATE postseal.identities, postseal.payloads, postseal.audit_events")


def settle(access: Access) -> None:
    """Do now what would otherwise be done beside the measurement."""
    with psycopg.connect(access.owner, autocommit=True) as owner:
        owner.execute("VACUUM (ANALYZE)")
        owner.execute("CHECKPOINT")


if __name__ == "__main__":
    main()

"""`make bench-outbox`: how fast mail is enqueued, claimed and settled, beside other queues on the same server.

One embedded PostgreSQL server, one run, the same payload of 600 bytes. Each contender has a fresh database in each
round; contenders take turns, and the figures are medians over the rounds, in jobs a second:

* `enqueue_single`: one a transaction, one after the other, over one connection (a tenth of the jobs)
* `enqueue_batch`: 1,000 a transaction, one after the other, over one connection. postseal takes 100 a transaction at
  most: 10 callers at once have as many under way. It signs each, and audits it
* `claim_settle`: one worker process with a handler that returns at once, which takes 100 at a time where it can, from
  the first claim until all are settled for certain. postseal's mail is for 64 destinations of 4 tenants

The others are driven as their authors do it (`bench/peers/`); all connect over the same socket, with the same
durability. Of postseal also, in deliveries and requests a second:

* `http_rate`: the worker with its real sender, to a receiver on this machine that answers at once
* `http_client_rate`: the HTTP client alone with the same bodies, over as many connections, to the same receiver

and the time of one claim of 100 until it is committed, in milliseconds. Between two claims the first one's mail is
settled and as much comes in; medians over the rounds of the median of each one's last half:

* `claim_ms_empty`: nothing else is pending
* `claim_ms_million`: a million is pending, a tenth of it due in a month, and a tenth as many are dead letters
* `claim_ms_held`: the same, while another connection keeps a transaction open all the time

Prints everything and writes `bench/results/outbox.json`.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import psycopg
import uvloop
from psycopg.conninfo import conninfo_to_dict

from bench.outbound import Outbound, Receiver, fresh, receiving
from bench.peers import PEERS, Installed, Peer
from bench.rig import database, median, publish, workplace
from postseal.postgres.access import Access

PAYLOAD_BYTES = 600
BATCH = 1_000
"""Jobs come in whole ones."""
FAR = DEAD = 0.1
"""Of what is pending."""

Round = dict[str, float]


def main() -> None:
    """Run the benchmark that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=50_000, help="that are enqueued in batches, and settled, each time")
    parser.add_argument("--rounds", type=int, default=3, help="how often each measurement is repeated")
    parser.add_argument("--pending", type=int, default=1_000_000, help="that wait while claims are timed")
    parser.add_argument("--claims", type=int, default=1_000, help="that are timed in each round")
    parser.add_argument("--peers", type=Path, default=Path("/var/tmp/postseal-bench-peers"), help="their folder")  # noqa: S108 - kept for the next run
    options = parser.parse_args()
    installed = Installed(options.peers.resolve())
    with workplace() as folder, database(folder / "home") as access, receiving(folder) as receiver:
        bench = Bench(access, folder, receiver, installed)
        results = bench.run(options.jobs, options.rounds)
        claims = bench.claims(options.pending, options.claims, options.rounds)
        server = bench.server_version()
    ours, peers = results.pop("postseal"), results
    publish(
        "outbox",
        {
            "command": " ".join(["python -m bench.outbox", *sys.argv[1:]]),
            "cpus": os.cpu_count(),
            "jobs": options.jobs,
            "pending": options.pending,
            "versions": {
                "postseal": version("postseal"),
                "python": platform.python_version(),
                "postgresql": server,
                **installed.versions(),
            },
            "ours": figures(ours) | {name: round(median(claims, name), 2) for name in claims[0]},
            "peers": {name: figures(rounds) for name, rounds in peers.items()},
            "rounds": {"postseal": ours, **peers, "claims": claims},
        },
    )


def figures(rounds: list[Round]) -> dict[str, int]:
    """The medians."""
    return {name: round(median(rounds, name)) for name in rounds[0]}


class Bench:
    """The measurements on one server."""

    def __init__(self, access: Access, folder: Path, receiver: Receiver, installed: Installed) -> None:
        self._access = access
        self._folder = folder
        self._receiver = receiver
        self._installed = installed

    def server_version(self) -> str:
        """Of PostgreSQL."""
        with psycopg.connect(self._access.owner) as owner:
            return str(owner.info.parameter_status("server_version"))

    def run(self, jobs: int, rounds: int) -> dict[str, list[Round]]:
        """Every contender in turn, so many rounds, by name."""
        measured: dict[str, list[Round]] = {name: [] for name in ("postseal", *(peer.name for peer in PEERS))}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            measured["postseal"].append(self._ours(whole(jobs), number))
            for peer in PEERS:
                measured[peer.name].append(self._peer(peer, whole(jobs * peer.part)))
        return measured

    def _ours(self, jobs: int, number: int) -> Round:
        with fresh(self._access, "bench_postseal") as access:
            outbound = Outbound(access, self._folder / f"round-{number}", self._receiver)

            def timed(action: Callable[[int], Awaitable[float]], count: int) -> float:
                self._checkpoint()
                return count / uvloop.run(once(action, count))

            singles = jobs // 10
            found = {
                "enqueue_single": timed(outbound.enqueue_single, singles),
                "enqueue_batch": timed(outbound.enqueue_batch, jobs),
                "claim_settle": timed(outbound.claim_settle, jobs + singles),
            }
            if abs(outbound.payload_bytes() - PAYLOAD_BYTES) > PAYLOAD_BYTES / 100:
                raise RuntimeError(f"payloads have {outbound.payload_bytes()} bytes")
            mail = jobs // 5
            uvloop.run(once(outbound.enqueue_batch, mail))
            found["http_rate"] = timed(outbound.http, mail)
            found["http_client_rate"] = timed(outbound.http_client, mail)
        return report("postseal", found)

    def _peer(self, peer: Peer, jobs: int) -> Round:
        with fresh(self._access, "bench_peer") as access:
            environment = libpq_environment(access) | {"BENCH_PAYLOAD": peer_payload()}

            def timed(action: str, count: int, left: int) -> float:
                self._checkpoint()
                seconds = self._installed.drive(peer, action, count, environment)
                with psycopg.connect(access.owner) as owner:
                    row = owner.execute(peer.pending).fetchone()
                if row != (left,):
                    raise RuntimeError(f"{peer.name}: {row} jobs are pending after {action}, not {left}")
                return count / seconds

            singles = jobs // 10
            self._installed.drive(peer, "install", 0, environment)
            found = {
                "enqueue_single": timed("single", singles, singles),
                "enqueue_batch": timed("batch", jobs, jobs + singles),
                "claim_settle": timed("claim", jobs + singles, 0),
            }
        return report(peer.name, found)

    def claims(self, pending: int, count: int, rounds: int) -> list[Round]:
        """How long claims take, on two databases in turn."""
        with fresh(self._access, "bench_empty") as one, fresh(self._access, "bench_million") as other:
            empty = Outbound(one, self._folder / "empty", self._receiver)
            million = Outbound(other, self._folder / "million", self._receiver)
            print(f"filling in {pending:,} deliveries", file=sys.stderr)
            million.fill(pending, far=round(pending * FAR), dead=round(pending * DEAD))

            def timed(outbound: Outbound, *, held: bool) -> float:
                taken = uvloop.run(outbound.claims(count, held=held))
                return statistics.median(taken[count // 2 :])

            measured: list[Round] = []
            for number in range(rounds):
                print(f"claims: round {number + 1} of {rounds}", file=sys.stderr)
                found = {
                    "claim_ms_empty": timed(empty, held=False),
                    "claim_ms_million": timed(million, held=False),
                    "claim_ms_held": timed(million, held=True),
                }
                measured.append(report("claims", found))
        return measured

    def _checkpoint(self) -> None:
        """Let none pay for what was written before it."""
        with psycopg.connect(self._access.owner, autocommit=True) as owner:
            owner.execute("CHECKPOINT")


def whole(jobs: float) -> int:
    """The same in whole batches, at least one."""
    return max(1, int(jobs) // BATCH) * BATCH


async def once(action: Callable[[int], Awaitable[float]], count: int) -> float:
    """The action as a coroutine of its own."""
    return await action(count)


def report(name: str, found: Round) -> Round:
    """Tell what a round found, and give it."""
    print(name, {key: round(value, 2) for key, value in found.items()}, file=sys.stderr)
    return found


def libpq_environment(access: Access) -> dict[str, str]:
    """How the peers find a database; its password stays in the file."""
    parts = conninfo_to_dict(access.owner)
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE", "passfile": "PGPASSFILE"}
    return {variable: str(parts[name]) for name, variable in names.items()}


def peer_payload() -> str:
    """A JSON object of 600 bytes."""
    text = json.dumps({"kind": "task-status", "text": ""}, separators=(",", ":"))
    return text[:-2] + "x" * (PAYLOAD_BYTES - len(text)) + text[-2:]


if __name__ == "__main__":
    main()

"""pgqueuer as its authors' own benchmark drives it: asyncpg and uvloop, one producer, five consumers in one process.

`drive_pgqueuer.py install|single|batch|claim JOBS` prints the seconds that the jobs took. The consumers fetch 100 at a
time.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

PAYLOAD = os.environ["BENCH_PAYLOAD"].encode()
CONSUMERS = 5
FETCHED = 100
BATCH = 1_000


def install() -> None:
    """Its schema, and the settings for autovacuum that its documents recommend."""
    program = str(Path(sys.executable).with_name("pgq"))
    for command in ("install", "autovac"):
        subprocess.run([program, command], check=True, stdout=subprocess.DEVNULL)


async def single(jobs: int) -> float:
    """One a transaction."""
    queries = Queries(AsyncpgDriver(await asyncpg.connect()))
    began = time.perf_counter()
    for _ in range(jobs):
        await queries.enqueue("bench", PAYLOAD)
    return time.perf_counter() - began


async def batch(jobs: int) -> float:
    """A thousand a transaction."""
    queries = Queries(AsyncpgDriver(await asyncpg.connect()))
    began = time.perf_counter()
    for _ in range(jobs // BATCH):
        await queries.enqueue(["bench"] * BATCH, [PAYLOAD] * BATCH, [0] * BATCH)
    return time.perf_counter() - began


async def claim() -> float:
    """Until the queue is empty and its buffers are written."""
    consumers = [PgQueuer(AsyncpgDriver(await asyncpg.connect())) for _ in range(CONSUMERS)]
    for consumer in consumers:

        @consumer.entrypoint("bench")
        async def returns_at_once(_: Job) -> None:
            pass

    began = time.perf_counter()
    runs = [consumer.run(batch_size=FETCHED, mode=QueueExecutionMode.drain) for consumer in consumers]
    await asyncio.gather(*runs)
    return time.perf_counter() - began


def main() -> None:
    """Do what the arguments say."""
    action, jobs = sys.argv[1], int(sys.argv[2])
    if action == "install":
        install()
    else:
        print(uvloop.run({"single": single, "batch": batch}[action](jobs) if action != "claim" else claim()))


if __name__ == "__main__":
    main()

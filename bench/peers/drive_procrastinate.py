"""procrastinate as its documents drive it: psycopg, and one worker that runs 20 jobs at once and deletes what is done.

`drive_procrastinate.py install|single|batch|claim JOBS` prints the seconds that the jobs took. The worker fetches one a
time: it knows no batches.
"""

import asyncio
import json
import os
import sys
import time

from procrastinate import App, PsycopgConnector

PAYLOAD = json.loads(os.environ["BENCH_PAYLOAD"])
BATCH = 1_000
CONCURRENCY = 20

app = App(connector=PsycopgConnector())


@app.task(name="bench")
async def returns_at_once(**_: object) -> None:
    """The handler."""


async def run(action: str, jobs: int) -> float:
    """Do what is asked for; gives the seconds."""
    async with app.open_async():
        began = time.perf_counter()
        match action:
            case "install":
                await app.schema_manager.apply_schema_async()
            case "single":
                for _ in range(jobs):
                    await returns_at_once.defer_async(**PAYLOAD)
            case "batch":
                for _ in range(jobs // BATCH):
                    await returns_at_once.batch_defer_async(*[PAYLOAD] * BATCH)
            case "claim":
                await app.run_worker_async(
                    wait=False, concurrency=CONCURRENCY, listen_notify=False, delete_jobs="always"
                )
            case _:
                raise ValueError(action)
        return time.perf_counter() - began


if __name__ == "__main__":
    print(asyncio.run(run(sys.argv[1], int(sys.argv[2]))))

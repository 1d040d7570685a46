"""pgmq, its SQL installed without the extension, by its functions: send, send_batch, read 100, delete 100; asyncpg.

`drive_pgmq.py install|single|batch|claim JOBS` prints the seconds that the jobs took. Its authors' client for Python
brings the SQL; the calls go without it, since it takes longer.
"""

import os
import sys
import time

import asyncpg
import psycopg
import uvloop
from pgmq import install_pgmq_from_sql

PAYLOAD = os.environ["BENCH_PAYLOAD"]
QUEUE = "bench"
READ = 100
VISIBLE_AGAIN_S = 30
BATCH = 1_000


def install() -> None:
    """Its functions, and one queue."""
    with psycopg.connect() as connection:
        install_pgmq_from_sql(conn=connection)
        connection.execute("SELECT pgmq.create(%s)", [QUEUE])


async def run(action: str, jobs: int) -> float:
    """Do what is asked for; gives the seconds."""
    connection = await asyncpg.connect()
    began = time.perf_counter()
    match action:
        case "single":
            for _ in range(jobs):
                await connection.fetch("SELECT * FROM pgmq.send($1, $2)", QUEUE, PAYLOAD)
        case "batch":
            for _ in range(jobs // BATCH):
                await connection.fetch("SELECT * FROM pgmq.send_batch($1, $2::jsonb[])", QUEUE, [PAYLOAD] * BATCH)
        case "claim":
            while found := await connection.fetch("SELECT * FROM pgmq.read($1, $2, $3)", QUEUE, VISIBLE_AGAIN_S, READ):
                done = [message["msg_id"] for message in found]
                await connection.fetch("SELECT * FROM pgmq.delete($1, $2::bigint[])", QUEUE, done)
        case _:
            raise ValueError(action)
    return time.perf_counter() - began


if __name__ == "__main__":
    if sys.argv[1] == "install":
        install()
    else:
        print(uvloop.run(run(sys.argv[1], int(sys.argv[2]))))

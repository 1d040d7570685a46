"""Processes that hold an embedded database, and the folders that their homes are in."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import structlog
from psycopg.conninfo import make_conninfo

from postseal.postgres.embedded import EmbeddedServer, start_or_join
from postseal.postgres.home import Home, server_lives
from postseal.postgres.postmaster import stop_postmaster

WAIT_SECONDS = 30

HOLDER = """
import pathlib, structlog, sys
from postseal.postgres.embedded import start_or_join
log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
server = start_or_join(pathlib.Path(sys.argv[1]), log=log)
print("holding", flush=True)
sys.stdin.read()
print(server.release(), flush=True)
"""


@contextmanager
def own_folder() -> Generator[Path]:
    """Make a folder that the server's account can pass through; pytest's own are 0700."""
    folder = Path(tempfile.mkdtemp(prefix="postseal-", dir="/tmp")).resolve()
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        stop_servers_in(folder)
        shutil.rmtree(folder)


def stop_servers_in(folder: Path) -> None:
    """Stop what a failed test left running in the homes of `folder`."""
    for lock in folder.glob("*/lock/server"):
        home = Home(lock.parents[1])
        if server_lives(home):
            stop_postmaster(home)


def start(home: Path) -> EmbeddedServer:
    """Start or join without logging."""
    return start_or_join(home, log=structlog.wrap_logger(structlog.ReturnLogger()))


def query(server: EmbeddedServer, statement: str, **changes: str) -> list[tuple[Any, ...]]:
    """Run one statement over a connection of its own, whose parameters `changes` alters."""
    with psycopg.connect(make_conninfo(server.dsn, **changes), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@contextmanager
def process_on(home: Path) -> Generator[subprocess.Popen[str]]:
    """Run another process that holds the home until its input ends; it is killed at the latest at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, home],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """Wait for the next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()

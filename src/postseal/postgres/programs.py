"""PostgreSQL's client programs, run beside this process: pg_dump and pg_restore."""

import os
import signal
import subprocess
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postseal.ending import end_if_asked
from postseal.errors import ArchiveError
from postseal.postgres.binaries import Binaries

POLL_SECONDS = 0.1
STOP_SECONDS = 10
WORKER_DIED = "a worker process died unexpectedly"


class Program:
    """One program that runs."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process

    def finish(self) -> None:
        """Wait for its end. ArchiveError with its own words where it failed; SystemExit if a signal came meanwhile."""
        while True:
            try:
                output, _ = self._process.communicate(timeout=POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                end_if_asked()
        if self._process.returncode != 0:
            raise ArchiveError(f"{self._name} failed: {self._first_error(output)}")

    def stop(self) -> None:
        """End it, and what it started."""
        for step in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, step)
                with suppress(subprocess.TimeoutExpired):
                    self._process.communicate(timeout=STOP_SECONDS)

    def _first_error(self, output: str) -> str:
        # Not any line: those that follow quote rows.
        mark = f"{self._name}: error: "
        errors = [line.partition(mark)[2] for line in output.splitlines() if mark in line]  # one line in another
        errors.sort(key=WORKER_DIED.__eq__)  # the worker says why, before or after
        return errors[0] if errors else f"it ended with {self._process.returncode}"


@contextmanager
def running(
    programs: Binaries, name: str, arguments: Sequence[str | Path], conninfo: str, *, keep_fds: Sequence[int] = ()
) -> Generator[Program]:
    """Run a program on a database, as this process's account; it is stopped where the block ends before it does.

    What it makes is for this account alone. No password stands on its command line: ArchiveError if the connection has
    another secret than libpq's own password.
    """
    parameters = conninfo_to_dict(conninfo)
    password = parameters.pop("password", None)
    _require_no_secret(name, parameters.keys())
    # A password of the URL's goes before PGPASSWORD, as it does for this process; the words of errors are looked for.
    environment = {"LC_ALL": "C"} | ({"PGPASSWORD": str(password)} if password else {})
    with subprocess.Popen(
        [programs.bin / name, "--no-password", f"--dbname={make_conninfo('', **parameters)}", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | environment,
        pass_fds=keep_fds,
        umask=0o077,
        process_group=0,
    ) as process:
        program = Program(name, process)
        try:
            yield program
        finally:
            program.stop()


def _require_no_secret(name: str, parameters: Iterable[str]) -> None:
    """Of libpq's secrets only the password has another way to a program than its command line."""
    secrets = {option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*"}
    if found := sorted(secrets.intersection(parameters)):
        raise ArchiveError(f"{found[0]} would be seen on the command line of {name}: take it out of the database's URL")

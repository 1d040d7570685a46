"""The disk under an embedded database: when to stop taking envelopes, and the ballast that a recovery can use.

A full disk ends PostgreSQL with a PANIC, and the recovery after it needs room for more write-ahead log. Hence two
lines of defence:

* the process stops accepting while less than `min_free_bytes` is free, and accepts again from a quarter more
* <home>/ballast takes up space for nothing. When the server does not answer and the disk is full, it is removed before
  the server is started; it is made again once there is room beside it
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from postseal.postgres.home import Home

MIB = 1024 * 1024

FULL_BYTES = 32 * MIB
"""Two segments of write-ahead log: with less, a recovery may not get to its end."""
RESUME_FACTOR = 1.25
"""Accepting again at the bound itself would flicker, since each acceptance takes space."""


@dataclass(frozen=True, slots=True)
class DiskState:
    """What was last measured: bytes free for the server's account, and why nothing is accepted, if so."""

    free_bytes: int
    reason: str | None = None

    @property
    def accepting(self) -> bool:
        """Whether envelopes may be taken in."""
        return self.reason is None


class Disk:
    """Watches one home's disk for one process. `check` is called every second, off the path of requests."""

    def __init__(self, home: Home, *, min_free_bytes: int, ballast_bytes: int, log: FilteringBoundLogger) -> None:
        self._home = home
        self._min_free_bytes = min_free_bytes
        self._ballast_bytes = ballast_bytes
        self._log = log
        self.state = DiskState(free_bytes=0)
        self.check()

    def accepting(self) -> bool:
        """Whether envelopes may be taken in, as last measured."""
        return self.state.accepting

    def check(self) -> None:
        """Measure, and log a change of mind. Never raises: a disk that cannot be measured accepts nothing."""
        try:
            free_bytes = free_on(self._home.root)
        except OSError as error:
            state = DiskState(0, f"the disk of the database cannot be measured: {error.strerror}")
        else:
            state = DiskState(free_bytes, self._why_not(free_bytes))
        if state.accepting != self.state.accepting:
            event = "embedded_database_disk_has_room" if state.accepting else "embedded_database_disk_low"
            self._log.warning(event, free_mb=state.free_bytes // MIB, min_free_mb=self._min_free_bytes // MIB)
        self.state = state

    def keep_ballast(self) -> None:
        """Make the ballast if it is missing or of another size, and there is room beside it."""
        ballast = self._home.ballast
        kept_bytes = ballast.stat().st_size if ballast.exists() else 0
        if kept_bytes == self._ballast_bytes:
            return
        left_bytes = free_on(self._home.root) + kept_bytes - self._ballast_bytes
        if left_bytes < max(self._min_free_bytes * RESUME_FACTOR, FULL_BYTES):
            return
        try:
            ballast.unlink(missing_ok=True)
            if self._ballast_bytes > 0:
                _allocate(ballast, self._ballast_bytes)
        except OSError as error:  # such as a quota
            self._log.warning("embedded_database_ballast_not_made", error=error.strerror)
            self._ballast_bytes = 0  # asked for no more by this process
        else:
            self._log.info("embedded_database_ballast_made", size_mb=self._ballast_bytes // MIB)

    def make_room_if_full(self) -> bool:
        """For a server that does not answer: whether the disk is full; then the ballast is given up. OSError."""
        return make_room_if_full(self._home, self._log)

    def _why_not(self, free_bytes: int) -> str | None:
        bound_bytes = self._min_free_bytes * (1 if self.state.accepting else RESUME_FACTOR)
        if free_bytes >= bound_bytes:
            return None
        return f"less than {int(bound_bytes) // MIB} MiB are free on the disk of the database"


def make_room_if_full(home: Home, log: FilteringBoundLogger) -> bool:
    """Give the ballast up where the disk has no room for a recovery; whether it had none. OSError."""
    full = free_on(home.root) < FULL_BYTES
    if full and home.ballast.exists():
        home.ballast.unlink()
        log.warning("embedded_database_ballast_released", free_mb=free_on(home.root) // MIB)
    return full


def free_on(folder: Path) -> int:
    """Bytes that an unprivileged account may still write on the file system of `folder`. OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _allocate(path: Path, size_bytes: int) -> None:
    """Make a file whose every block is really taken; never one of a smaller size at `path`."""
    unfinished = path.with_suffix(".new")
    try:
        with unfinished.open("wb") as file:
            if sys.platform == "darwin":  # which has no posix_fallocate
                file.write(bytes(size_bytes))
            else:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

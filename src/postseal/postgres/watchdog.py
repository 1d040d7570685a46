"""The watchdog of an embedded database: it brings the server back, and no process has to be restarted for it.

A thread of each process that holds the server for long; the one that has the watch lock acts, at each check:

1. ask      a server that answers needs nothing but its ballast, and a log that does not fill the disk
2. room     on a full disk, the ballast is given up
3. wait     a recovery that works is left alone; what ended is not waited for
4. pause    restarts come ever more slowly, and only so many in a while
5. restart  under the change lock: end what is stuck, start anew

A server gets stuck in two ways that it does not leave by itself: frozen, it says nothing; and a recovery that panicked
leaves it "in recovery mode" for ever (`signs.py`).
"""

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from psycopg import pq
from structlog.typing import FilteringBoundLogger

from postseal.errors import StartupError
from postseal.postgres.disk import Disk
from postseal.postgres.embedded import EmbeddedServer, start_server
from postseal.postgres.home import Home, changing, server_lives, try_lock, unless_server_lives
from postseal.postgres.postmaster import data_major, keep_log_short, ping, stop_postmaster
from postseal.postgres.signs import STUCK_SECONDS, LogSigns

CHECK_SECONDS = 1.0
SILENT_SECONDS = 30.0  # nothing answers; a machine that is only busy answers in the end
RECOVERING_SECONDS = 300.0  # without a word of progress; the checkpoint at a recovery's end has none
PAUSE_SECONDS = 1.0  # after the first restart; doubled by each further one
LONGEST_PAUSE_SECONDS = 60.0
WINDOW_SECONDS = 600.0
RESTARTS_A_WINDOW = 10
CHANGE_WAIT_SECONDS = 1.0  # who else has the lock starts the server, or is about to
JOIN_SECONDS = 60.0  # a restart that has begun is not cut short


class Watchdog:
    """Restarts the server of one home. `check` is called every second, by one thread; `close` ends the watch."""

    def __init__(self, home: Home, disk: Disk, log: FilteringBoundLogger) -> None:
        self._home = home
        self._disk = disk
        self._log = log
        self._watch = home.lock("watch")
        self._leading = False
        self._signs = LogSigns(home)
        self._moved_at = 0.0  # when the server last showed that it works
        self._silent_since: float | None = None
        self._restarts = Restarts()

    def close(self) -> None:
        """Leave the watch to another process."""
        os.close(self._watch)

    def check(self) -> None:
        """Take one look, and act on it. Raises StartupError or OSError when a restart fails."""
        if not self._leads():
            return
        answer = ping(self._home)
        now = time.monotonic()
        if answer == pq.Ping.OK:
            keep_log_short(self._home)
            self._note_answer(now)
            self._disk.keep_ballast()
            return
        if self._silent_since is None:
            self._silent_since = now
            self._log.warning("embedded_database_does_not_answer", answer=answer.name, home=str(self._home.root))
        if self._signs.progressed():
            self._moved_at = now
        if self._disk.make_room_if_full():
            self._signs.panicked = True  # the log had no room for the line that tells so
        ended = not server_lives(self._home)
        stuck = now - self._moved_at >= self._patience_seconds(answer)
        if (ended or stuck) and now >= self._restarts.next_at():
            self._restarts.note(now)
            self._restart(ended=ended)
            self._moved_at = time.monotonic()

    def _leads(self) -> bool:
        if not self._leading and try_lock(self._watch, fcntl.LOCK_EX):
            self._leading = True
            self._moved_at = time.monotonic()  # what was before was another's to judge
        return self._leading

    def _note_answer(self, now: float) -> None:
        self._signs.skip()
        self._moved_at = now
        if self._silent_since is not None:
            seconds = round(now - self._silent_since, 1)
            self._log.warning("embedded_database_answers_again", seconds=seconds, home=str(self._home.root))
            self._silent_since = None

    def _patience_seconds(self, answer: pq.Ping) -> float:
        if answer != pq.Ping.REJECT:
            return SILENT_SECONDS
        return STUCK_SECONDS if self._signs.panicked else RECOVERING_SECONDS

    def _restart(self, *, ended: bool) -> None:
        home = self._home
        with changing(home, wait_seconds=CHANGE_WAIT_SECONDS):
            if ping(home) == pq.Ping.OK:
                return
            if data_major(home) is None:
                raise StartupError(f"{home.data} is gone")  # a new and empty database would only hide that
            pause_seconds = round(self._restarts.pause_seconds())
            self._log.warning("embedded_database_restarting", ended=ended, pause_seconds=pause_seconds)
            if not stop_postmaster(home):
                raise StartupError(f"PostgreSQL does not stop: see {home.log_file}")
            with unless_server_lives(home) as server_lock:
                if server_lock is not None:
                    start_server(home, server_lock, self._log)


class Restarts:
    """The times of the last restarts, in seconds, and when the next one may be."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RESTARTS_A_WINDOW)

    def note(self, now: float) -> None:
        """A restart begins. Forget those whose window is over."""
        while self._times and now - self._times[0] >= WINDOW_SECONDS:
            self._times.popleft()
        self._times.append(now)

    def pause_seconds(self) -> float:
        """How long after the last restart the next one may be."""
        if not self._times:
            return 0.0
        if len(self._times) == RESTARTS_A_WINDOW:
            return self._times[0] + WINDOW_SECONDS - self._times[-1]
        return min(PAUSE_SECONDS * 2 ** (len(self._times) - 1), LONGEST_PAUSE_SECONDS)

    def next_at(self) -> float:
        """The time from which on the next restart may be."""
        return self._times[-1] + self.pause_seconds() if self._times else 0.0


@contextmanager
def watching(server: EmbeddedServer, disk: Disk, *, log: FilteringBoundLogger) -> Generator[None]:
    """Check disk and server every second until the block ends; call it before the server is released."""
    watchdog = Watchdog(Home(server.home), disk, log)
    ending = threading.Event()

    def watch() -> None:
        while not ending.wait(CHECK_SECONDS):
            disk.check()
            try:
                watchdog.check()
            except (StartupError, OSError) as error:
                log.error("embedded_database_restart_failed", error=str(error))  # noqa: TRY400 - the message says all
            except Exception:  # a fault of ours must not end the watch
                log.exception("embedded_database_watch_failed")

    thread = threading.Thread(target=watch, name="embedded-database-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(JOIN_SECONDS)
        watchdog.close()

"""The embedded PostgreSQL: the first process to need it starts it, later ones join, the last one stops it.

start_or_join, in this order:

1. home      make and check the folder
2. change    take the change lock: one start, join or stop at a time
3. hold      take a share of the holders lock; the kernel drops it with this process, however that ends
4. answer    a server that answers is joined, whoever started it
5. start     if nothing of a server lives, start one (after initdb for a new home); if something lives that
             does not answer yet, wait for it to answer or to end; if its recovery panicked, replace it
6. database  make the database `postseal` where it is missing

release drops the share; where nobody else has one, it stops the server. A killed process keeps no share: the
server that it leaves behind is joined by the next start and stopped by the last release.
"""

import fcntl
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo
from structlog.typing import FilteringBoundLogger

from postseal.ending import end_if_asked
from postseal.errors import StartupError
from postseal.postgres.account import account_for
from postseal.postgres.binaries import find_binaries, within_reach
from postseal.postgres.disk import make_room_if_full
from postseal.postgres.home import (
    DATABASE,
    Home,
    changing,
    open_home,
    require_passage,
    try_lock,
    unless_server_lives,
)
from postseal.postgres.postmaster import (
    Postmaster,
    data_major,
    make_data,
    ping,
    start_postmaster,
    stop_postmaster,
    why_it_ended,
)
from postseal.postgres.signs import STUCK_SECONDS, LogSigns

READY_DEADLINE_SECONDS = 60
# While the server says that it is recovering it works; a WAL of 2 GB takes minutes on a slow disk.
RECOVERY_DEADLINE_SECONDS = 900
CHANGE_WAIT_SECONDS = 960  # another process's start may be a recovery
RELEASE_WAIT_SECONDS = 60  # another's stop is shorter; another's start is a holder, who stops the server later
CONNECT_SECONDS = 10
POLL_SECONDS = 0.02

SESSION_VARIABLES = {"PGTZ", "PGDATESTYLE", "PGGEQO"}
"""Of libpq's variables those that no connection string can overrule."""


class EmbeddedServer:
    """A running PostgreSQL that belongs to one home folder; the last process that holds it stops it.

    `dsn` is the superuser's, over the unix socket, and holds no secret: the password is in a 0600 passfile.
    """

    def __init__(self, home: Home, hold: int, log: FilteringBoundLogger) -> None:
        self.home = home.root
        self.dsn = home.dsn
        self._home = home
        self._hold: int | None = hold
        self._log = log
        self._releasing = threading.Lock()

    def release(self) -> bool:
        """Drop this hold; True if it was the last and the server is stopped. A second call does nothing.

        The hold is dropped even where StartupError tells that another process blocks the home.
        """
        with self._releasing:
            hold, self._hold = self._hold, None
        if hold is None:
            return False
        try:
            with changing(self._home, wait_seconds=RELEASE_WAIT_SECONDS):
                return _stop_if_last(self._home, hold, self._log)
        finally:
            os.close(hold)


def start_or_join(home: Path, *, log: FilteringBoundLogger) -> EmbeddedServer:
    """Hold the server of the home folder `home`, started if it does not run. Blocks until it answers.

    Takes libpq's variables (PGPASSWORD and so on) out of this process's environment: they mean another server, and
    libpq would prefer them to what stands in a passfile.

    Raises StartupError, one line that says what to do, when the folder, the programs or the server cannot be
    used; then nothing that this call started still runs.

        server = start_or_join(default_home(), log=log)
        try:
            psycopg.connect(server.dsn)
        finally:
            server.release()
    """
    try:
        opened = open_home(home)
        with changing(opened, wait_seconds=CHANGE_WAIT_SECONDS, meanwhile=end_if_asked), ExitStack() as undo:
            hold = opened.lock("holders")
            undo.callback(os.close, hold)
            fcntl.flock(hold, fcntl.LOCK_SH)  # never waits: it is taken exclusively under the change lock only
            undo.callback(_stop_if_last, opened, hold, log)
            _forget_libpq_variables()
            _bring_up(opened, log)
            _make_database(opened)
            undo.pop_all()
            return EmbeddedServer(opened, hold, log)
    except OSError as error:
        raise StartupError(f"cannot use {home}: {error}; free it or choose another --data-dir") from None


def _forget_libpq_variables() -> None:
    # Out of the environment and not overruled by the connection string: for PGSERVICE and some others that is too late.
    named = {option.envvar.decode() for option in pq.Conninfo.get_defaults() if option.envvar}
    for name in (named | SESSION_VARIABLES) & os.environ.keys():
        del os.environ[name]


def _bring_up(home: Home, log: FilteringBoundLogger) -> None:
    began = time.monotonic()
    postmaster: Postmaster | None = None
    signs = LogSigns(home)
    with ExitStack() as undo:
        while (answer := ping(home)) != pq.Ping.OK:
            limit_seconds = RECOVERY_DEADLINE_SECONDS if answer == pq.Ping.REJECT else READY_DEADLINE_SECONDS
            if time.monotonic() - began > limit_seconds:
                raise StartupError(f"PostgreSQL is not ready after {limit_seconds} s: see {home.log_file}")
            with unless_server_lives(home) as server_lock:
                if server_lock is not None:
                    if postmaster is not None:
                        raise StartupError(f"PostgreSQL did not start: {why_it_ended(home, postmaster)}")
                    make_room_if_full(home, log)
                    postmaster = start_server(home, server_lock, log)
                    undo.callback(stop_postmaster, home, postmaster.pid)
            end_if_asked()
            signs.progressed()
            if signs.panicked and postmaster is None and time.monotonic() - began > STUCK_SECONDS:
                log.warning("embedded_database_is_stuck", home=str(home.root))
                stop_postmaster(home)
            time.sleep(POLL_SECONDS)
        undo.pop_all()
    seconds = round(time.monotonic() - began, 3)
    log.info("embedded_database_ready", home=str(home.root), started=postmaster is not None, seconds=seconds)


def start_server(home: Home, server_lock: int, log: FilteringBoundLogger) -> Postmaster:
    """Start the server, after initdb for a new home, and do not wait; under the change lock. StartupError."""
    account = account_for(home.data)
    require_passage(home, account)
    major = data_major(home)
    binaries = within_reach(find_binaries(major), account, home)
    log.info("embedded_database_starting", home=str(home.root), version=binaries.version, new=major is None)
    if major is None:
        make_data(home, binaries, account, server_lock)
    return start_postmaster(home, binaries, account, server_lock)


def _stop_if_last(home: Home, hold: int, log: FilteringBoundLogger) -> bool:
    """Under the change lock: stop the server unless another process has a share of the holders lock."""
    if not try_lock(hold, fcntl.LOCK_EX):
        return False
    stopped = stop_postmaster(home)
    if not stopped:
        log.error("embedded_database_does_not_stop", home=str(home.root), log_file=str(home.log_file))
    return stopped


def _make_database(home: Home) -> None:
    dsn = make_conninfo(home.dsn, dbname="postgres", connect_timeout=CONNECT_SECONDS)
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            there = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).rowcount
            if not there:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
    except psycopg.Error as error:
        line = str(error).strip().splitlines()[-1]
        raise StartupError(f"the server refuses the password in {home.passfile} or its database: {line}") from None

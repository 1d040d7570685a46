"""One PostgreSQL server of a home folder: making its data folder, starting it, asking it, stopping it.

Nothing here decides whether to start or stop: `embedded.py` does, and holds the home's change lock for it.
"""

import os
import re
import secrets
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from psycopg import pq
from psycopg.conninfo import make_conninfo

from postseal.errors import StartupError
from postseal.postgres.account import Account
from postseal.postgres.binaries import Binaries
from postseal.postgres.disk import MIB
from postseal.postgres.home import PORT, SUPERUSER, Home, server_lives, staging_folder
from postseal.private_files import sync_folder, write_private

INITDB_SECONDS = 120
PING_SECONDS = 2
POLL_SECONDS = 0.02
LOG_BYTES_KEPT = 16 * 1024 * 1024
"""Of the log, and of the older file beside it."""
LOG_READ_BYTES = 256 * 1024
_ERROR = re.compile(r"FATAL:|PANIC:|error:")
# "… starting up", "… shutting down": said to a client that came too early, such as our ping.
_TURNED_AWAY = "the database system is "

BUILTIN_LOCALE_MAJOR = 17

# A fast shutdown ends all sessions and writes a checkpoint; past that, an immediate one leaves a recovery to
# the next start, and a kill ends a frozen postmaster, whose children then end by themselves. SIGTERM is not
# among them: it waits for clients for ever.
STUCK_STEPS_SECONDS = ((signal.SIGQUIT, 10), (signal.SIGKILL, 10))
STOP_STEPS_SECONDS = ((signal.SIGINT, 30), *STUCK_STEPS_SECONDS)

MAX_CONNECTIONS = 500
"""Enough for many processes (service.connections_a_process). 500 take 22 MB more of shared memory than 100."""

# Given on the command line, over postgresql.conf and ALTER SYSTEM: they must not weaken an acknowledgement.
SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "listen_addresses": "",
    "port": str(PORT),
    "password_encryption": "scram-sha-256",
    "max_connections": str(MAX_CONNECTIONS),
    "max_wal_size": "2GB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # The statement and the detail of an error would put passwords and payloads into the log.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
}
LEAST_BUFFERS_MB, MOST_BUFFERS_MB = 128, 1024
BUFFERS_VARIABLE = "POSTSEAL_PG_BUFFERS_MB"
"""Says how much memory the server keeps pages in; else it is a quarter of the machine's, within these."""
SMALLEST_BUFFERS_MB, LARGEST_BUFFERS_MB = 16, 1 << 20
"""Of a quarter of the machine's memory. The indexes of event ids and idempotency keys are touched all over: what of
them does not lie in these buffers is copied in, and written out again, for each envelope."""


@dataclass(frozen=True, slots=True)
class Postmaster:
    """A server that was started here: its process id and where its part of the log begins, in bytes."""

    pid: int
    log_start: int


def data_major(home: Home) -> int | None:
    """Return the major version of the data folder; None where there is none yet. Raises StartupError."""
    if not home.data.exists():
        return None
    try:
        return int((home.data / "PG_VERSION").read_text(encoding="ascii"))
    except (OSError, ValueError):
        raise StartupError(
            f"{home.data} is no data folder of PostgreSQL: move it away or choose another --data-dir"
        ) from None


def make_data(home: Home, binaries: Binaries, account: Account, server_lock: int) -> None:
    """Make the data folder and the superuser's passfile, whole or not at all.

    initdb works in a staging folder; the rename out of it is the last step. It inherits `server_lock`: the
    next start waits for an initdb that outlived its parent. Raises StartupError with the line that tells why.
    """
    with staging_folder(home) as staging:
        password = secrets.token_urlsafe(32)
        for name, text in (("password", password), ("pgpass", f"*:*:*:{SUPERUSER}:{password}\n")):
            write_private(staging / name, text.encode())
        for path in (staging, staging / "password"):
            os.chown(path, account.uid, account.gid)
        code, output = account.run(
            [
                binaries.bin / "initdb",
                f"--pgdata={staging / 'data'}",
                f"--username={SUPERUSER}",
                f"--pwfile={staging / 'password'}",
                "--auth=scram-sha-256",
                "--data-checksums",
                "--encoding=UTF8",
                *_locale(binaries.major),
            ],
            limit_seconds=INITDB_SECONDS,
            keep_fds=[server_lock],
        )
        if code != 0:
            raise StartupError(f"initdb failed: {telling_line(output)}")
        (staging / "pgpass").replace(home.passfile)
        (staging / "data").rename(home.data)
        sync_folder(home.root)


def start_postmaster(home: Home, binaries: Binaries, account: Account, server_lock: int) -> Postmaster:
    """Start the server and do not wait. It inherits `server_lock` and holds it while any of it lives."""
    home.run.mkdir(mode=0o700, exist_ok=True)
    os.chown(home.run, account.uid, account.gid)
    if _log_is_long(home):
        home.log_file.replace(home.older_log_file)
    command = [binaries.bin / "postgres", "-D", home.data, *_options(home, binaries, account)]
    # The server lock is ours, so the process that a left-over postmaster.pid names is not this server. If it
    # is a zombie or another program of this user, PostgreSQL gives up, unless told that it is an ancestor.
    stale = recorded_pid(home)
    environment = {} if stale is None else {"PG_GRANDPARENT_PID": str(stale)}
    with home.log_file.open("ab") as log:
        log_start = log.tell()
        process = account.start(command, output=log, keep_fds=[server_lock], environment=environment)
    # Reaps it whenever it ends, so that a crashed server stays no zombie while we live.
    threading.Thread(target=process.wait, name="postmaster-reaper", daemon=True).start()
    return Postmaster(process.pid, log_start)


def keep_log_short(home: Home) -> None:
    """Make what the log of a server that runs has grown to the older file. OSError.

    The server goes on appending to the file that it has open, so that one is copied and emptied. What is written
    between the two is lost.
    """
    if _log_is_long(home):
        with suppress(OSError):  # on a full disk, room is worth more than what was said
            shutil.copyfile(home.log_file, home.older_log_file)
        os.truncate(home.log_file, 0)


def _log_is_long(home: Home) -> bool:
    return home.log_file.exists() and home.log_file.stat().st_size > LOG_BYTES_KEPT


def ping(home: Home) -> pq.Ping:
    """Ask the server: OK, REJECT while it starts, recovers or stops, or NO_RESPONSE."""
    dsn = make_conninfo(home.dsn, dbname="postgres", connect_timeout=PING_SECONDS)
    return pq.Ping(pq.PGconn.ping(dsn.encode()))


def stop_postmaster(home: Home, pid: int | None = None) -> bool:
    """Stop the server and wait for its last process; False if some of it still lives.

    `pid` is its postmaster's where the caller knows it; else it is found out, as soon as it is recorded.
    """
    # A server that does not answer has no sessions to end in good order, and stuck in a recovery it ignores SIGINT.
    steps = STOP_STEPS_SECONDS if ping(home) == pq.Ping.OK else STUCK_STEPS_SECONDS
    for step, wait_seconds in steps:
        signalled = None
        give_up = time.monotonic() + wait_seconds
        while time.monotonic() < give_up:
            if not server_lives(home):
                return True
            postmaster = pid or living_pid(home)
            if postmaster != signalled and postmaster is not None:
                with suppress(ProcessLookupError):  # killed: its orphans end by themselves
                    os.kill(postmaster, step)
                signalled = postmaster
            time.sleep(POLL_SECONDS)
    return False


def living_pid(home: Home) -> int | None:
    """Return the recorded postmaster if that process has the home's server lock open.

    A stale number may be anybody's by now, who must not be stopped. Without /proc the record is believed.
    """
    pid = recorded_pid(home)
    if pid is None or not Path("/proc/self/fd").exists():
        return pid
    lock = (home.root / "lock" / "server").stat()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed in the meantime
                if os.path.samestat(descriptor.stat(), lock):
                    return pid
    except OSError:  # it ended, or it is another account's
        pass
    return None


def recorded_pid(home: Home) -> int | None:
    """Return the process id in the data folder's postmaster.pid, which may be stale; None without one."""
    try:
        return int((home.data / "postmaster.pid").read_text(encoding="utf-8").split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None


def why_it_ended(home: Home, postmaster: Postmaster) -> str:
    """Return the line of the server's log that tells why `postmaster` ended."""
    with home.log_file.open("rb") as log:
        log.seek(postmaster.log_start)
        return telling_line(log.read(LOG_READ_BYTES).decode(errors="replace"))


def telling_line(output: str) -> str:
    """Return the last line that PostgreSQL marked as an error of its own, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marked = [line for line in lines if _ERROR.search(line) and _TURNED_AWAY not in line]
    return (marked or lines or ["it said nothing"])[-1]


def _options(home: Home, binaries: Binaries, account: Account) -> list[str]:
    quoted = str(home.run).replace('"', '""')
    settings = SETTINGS | {"unix_socket_directories": f'"{quoted}"', "shared_buffers": f"{_buffers_mb()}MB"}
    if binaries.has_library("pg_stat_statements"):
        settings["shared_preload_libraries"] = "pg_stat_statements"
    lz4 = ["-c", "wal_compression=lz4"]
    built_with_lz4, _ = account.run([binaries.bin / "postgres", "-D", home.data, "-C", "wal_compression", *lz4])
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return options + (lz4 if built_with_lz4 == 0 else [])


def _buffers_mb() -> int:
    chosen = os.environ.get(BUFFERS_VARIABLE)
    if chosen:
        if not (chosen.isdecimal() and SMALLEST_BUFFERS_MB <= int(chosen) <= LARGEST_BUFFERS_MB):
            raise StartupError(f"{BUFFERS_VARIABLE} is a number of MB from {SMALLEST_BUFFERS_MB} on")
        return int(chosen)
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (4 * MIB)
    return min(max(quarter, LEAST_BUFFERS_MB), MOST_BUFFERS_MB)


def _locale(major: int) -> tuple[str, ...]:
    """Sort by code point, alike on every system and release where PostgreSQL brings that itself."""
    if major >= BUILTIN_LOCALE_MAJOR:
        return ("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
    return ("--locale=C.UTF-8", "--lc-messages=C")

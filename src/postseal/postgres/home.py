"""The home folder of an embedded database: its layout, who may use it, and its locks.

    <home>/data               PGDATA, of the server's account
    <home>/run                the socket's folder, 0700, of the server's account
    <home>/pgpass             the superuser's password in libpq's passfile format, 0600
    <home>/log/postgres.log   what the server writes; beside it, what it wrote before
    <home>/lock/change        held exclusively by whoever starts, joins or stops the server
    <home>/lock/holders       held shared by every process that uses the server, for as long as it does
    <home>/lock/watch         held exclusively by the process whose watchdog brings a dead server back
    <home>/lock/server        held by the server itself: every process of it inherits the descriptor
    <home>/ballast            space for a recovery on a full disk, see `disk.py`
    <home>/pgsql-<version>    the programs, only where the server's account cannot reach the installed ones

The locks are flock(2): the kernel drops them with the last descriptor, so a `kill -9` leaves none behind. The
server's own answers "does anything of it still live?" without process numbers, which are reused, belong to
zombies, or mean nothing in another container. The home belongs to whoever runs postseal, so that root never
writes in a folder that the server's account could fill with symbolic links.
"""

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import make_conninfo

from postseal.errors import StartupError
from postseal.postgres.account import Account
from postseal.settings import Settings

SUPERUSER = "postgres"
DATABASE = "postseal"
PORT = 5432

# sun_path without its closing NUL: 107 bytes on Linux, 103 on macOS. The smaller: a home then works on both.
SOCKET_PATH_BYTES = 103

LOCK_POLL_SECONDS = 0.03
STAGING_PREFIX = "staging-"


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one home folder; `root` is absolute and free of symbolic links."""

    root: Path

    @property
    def data(self) -> Path:
        """PGDATA."""
        return self.root / "data"

    @property
    def run(self) -> Path:
        """The folder of the server's socket; outside the data, all of which goes into base backups."""
        return self.root / "run"

    @property
    def passfile(self) -> Path:
        """The superuser's password, as libpq reads it."""
        return self.root / "pgpass"

    @property
    def log_file(self) -> Path:
        """The server's log."""
        return self.root / "log" / "postgres.log"

    @property
    def older_log_file(self) -> Path:
        """What the server's log was before it was begun anew."""
        return self.root / "log" / "postgres.log.1"

    @property
    def ballast(self) -> Path:
        """Space that is given up when the disk is full."""
        return self.root / "ballast"

    @property
    def dsn(self) -> str:
        """The superuser's connection string; it names the passfile and holds no secret."""
        return make_conninfo(
            host=str(self.run), port=PORT, user=SUPERUSER, dbname=DATABASE, passfile=str(self.passfile)
        )

    def lock(self, name: str) -> int:
        """Open the lock file `name`; the caller closes the descriptor, which also drops its lock."""
        return os.open(self.root / "lock" / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def home_of(settings: Settings) -> Path:
    """The deployment's data folder, absolute: the embedded database's home, and where its files lie by default."""
    return (Path(settings.data_dir) if settings.data_dir else default_home()).expanduser().resolve()


def default_home() -> Path:
    """Return the folder for data of the user's, or /var/lib/postseal for root.

    Root's own home is closed to others, hence to the server's account.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/postseal")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "postseal"
    stated = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (stated if stated.is_absolute() else Path.home() / ".local" / "share") / "postseal"


def make_data_folder(folder: Path) -> None:
    """Make the deployment's data folder where it is missing; one that is there keeps its mode. Raises OSError."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    # The server's account passes through root's folder; a user's folder is the user's alone.
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)


def open_home(folder: Path) -> Home:
    """Make the home where it is missing and check that this process may use it. StartupError or OSError."""
    home = Home(folder.expanduser().resolve())
    socket = os.fsencode(home.run / f".s.PGSQL.{PORT}")
    if len(socket) > SOCKET_PATH_BYTES:
        limit = SOCKET_PATH_BYTES - (len(socket) - len(os.fsencode(home.root)))
        raise StartupError(f"{home.root} is too long for a socket path: choose a --data-dir of {limit} bytes at most")
    if b"," in socket:
        raise StartupError(f"{home.root} has a comma, which separates hosts for PostgreSQL: choose another --data-dir")
    make_data_folder(home.root)
    found = home.root.stat()
    if found.st_uid != os.geteuid():
        raise StartupError(f"{home.root} belongs to user id {found.st_uid}: run as it or choose another --data-dir")
    if found.st_mode & 0o002:
        raise StartupError(f"anybody may write in {home.root}: take that away or choose another --data-dir")
    for name in ("lock", "log"):
        (home.root / name).mkdir(mode=0o700, exist_ok=True)
    return home


@contextmanager
def staging_folder(home: Home) -> Generator[Path]:
    """Make a folder for what is not whole yet, removed at the end, as is what a killed process left."""
    for left_over in home.root.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=home.root) as folder:
        yield Path(folder)


def require_passage(home: Home, account: Account) -> None:
    """Raise StartupError naming the first folder on the way to the home that `account` may not enter."""
    if account.can_enter(home.root):
        return
    way = [*reversed(home.root.parents), home.root]
    closed = next((folder for folder in way if not account.can_enter(folder)), home.root)
    raise StartupError(
        f"PostgreSQL runs as user id {account.uid}, which may not enter {closed}: let it pass through "
        "(chmod o+x), or choose another --data-dir"
    )


def try_lock(descriptor: int, operation: int) -> bool:
    """Take LOCK_SH or LOCK_EX on an open lock file without waiting; whether it was granted."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def changing(home: Home, *, wait_seconds: float, meanwhile: Callable[[], None] = lambda: None) -> Generator[None]:
    """Be the only one that starts, joins or stops this home's server. StartupError after `wait_seconds`.

    `meanwhile` is called again and again while another one does; what it raises ends the wait.
    """
    descriptor = home.lock("change")
    try:
        give_up = time.monotonic() + wait_seconds
        while not try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > give_up:
                raise StartupError(f"another process has been starting or stopping {home.root} for too long")
            meanwhile()
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def unless_server_lives(home: Home) -> Generator[int | None]:
    """Take the server's lock and yield its descriptor, for a server to inherit; None while one lives."""
    descriptor = home.lock("server")
    try:
        yield descriptor if try_lock(descriptor, fcntl.LOCK_EX) else None
    finally:
        os.close(descriptor)


def server_lives(home: Home) -> bool:
    """Tell whether any process of the home's server is alive, were it an orphan of a killed postmaster."""
    with unless_server_lives(home) as server_lock:
        return server_lock is None

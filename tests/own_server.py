"""A PostgreSQL of one test's own, to be stopped, killed and frozen."""

import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import structlog

from postseal.postgres.access import Access
from postseal.postgres.database import conninfo_for
from postseal.postgres.embedded import EmbeddedServer, start_or_join
from postseal.postgres.home import Home, server_lives
from postseal.postgres.postmaster import recorded_pid, stop_postmaster


@dataclass
class OwnServer:
    """The server of one home folder; `access` holds whether it runs or not."""

    home: Home
    access: Access
    held: list[EmbeddedServer]

    @property
    def postmaster(self) -> int:
        """Its process id."""
        pid = recorded_pid(self.home)
        assert pid is not None
        return pid

    def start(self) -> None:
        """Start it, or start it again; returns when it answers."""
        self.held.append(start_or_join(self.home.root, log=structlog.wrap_logger(structlog.ReturnLogger())))

    def stop(self) -> None:
        """Stop it as an administrator would: sessions are ended, everything is written."""
        assert stop_postmaster(self.home, recorded_pid(self.home))

    def processes(self) -> list[int]:
        """The postmaster and all that serve clients."""
        with psycopg.connect(self.access.owner) as owner:
            rows = owner.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()").fetchall()
        return [self.postmaster, *(pid for (pid,) in rows)]

    @contextmanager
    def frozen(self) -> Generator[None]:
        """It keeps its connections, takes new ones, and answers nothing."""
        stopped = self.processes()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


@contextmanager
def own_server() -> Generator[OwnServer]:
    """Make, migrate and start one; at the end nothing of it lives and its folder is gone."""
    folder = Path(tempfile.mkdtemp(prefix="postseal-own-", dir="/tmp")).resolve()
    folder.chmod(0o711)
    home = Home(folder / "home")
    server = OwnServer(home, Access(conninfo_for(home.dsn), folder / "roles.pgpass", "postseal"), [])
    try:
        server.start()
        server.access.migrate()
        yield server
    finally:
        for held in server.held:
            held.release()
        left_running = server_lives(home)
        shutil.rmtree(folder)
        assert not left_running

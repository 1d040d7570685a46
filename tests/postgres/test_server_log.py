"""The log of an embedded server stays within its bound while the server runs."""

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
import structlog
from holders import own_folder, query, start

from postseal.postgres import postmaster
from postseal.postgres.disk import MIB, Disk
from postseal.postgres.embedded import EmbeddedServer
from postseal.postgres.home import Home
from postseal.postgres.watchdog import Watchdog

LOG = structlog.wrap_logger(structlog.ReturnLogger())
LEAST_BYTES = 10


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server that runs."""
    with own_folder() as folder:
        server = start(folder / "home")
        try:
            yield server
        finally:
            server.release()


@pytest.fixture
def watchdog(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """One that looks only when it is told to, and for which any log is long."""
    monkeypatch.setattr(postmaster, "LOG_BYTES_KEPT", LEAST_BYTES)
    home = Home(server.home)
    with closing(Watchdog(home, Disk(home, min_free_bytes=0, ballast_bytes=0, log=LOG), LOG)) as watchdog:
        yield watchdog


def make_it_say(server: EmbeddedServer, word: str) -> None:
    """Let the server log an error with `word` in it."""
    with pytest.raises(psycopg.errors.UndefinedColumn):
        query(server, f"SELECT {word}")


def test_a_log_that_has_grown_is_begun_anew(server: EmbeddedServer, watchdog: Watchdog):
    """What it was is kept beside it, and the server goes on in the emptied file, from its beginning."""
    home = Home(server.home)
    make_it_say(server, "earlier")
    watchdog.check()
    make_it_say(server, "later")
    older, newer = home.older_log_file.read_text(), home.log_file.read_text()
    assert '"earlier" does not exist' in older
    assert '"earlier" does not exist' not in newer
    assert '"later" does not exist' in newer
    assert "\0" not in newer


def test_a_log_that_cannot_be_kept_is_emptied_all_the_same(server: EmbeddedServer, watchdog: Watchdog):
    """On a full disk, the log must not take what room is left."""
    home = Home(server.home)
    home.older_log_file.unlink(missing_ok=True)
    home.older_log_file.mkdir()
    make_it_say(server, "earlier")
    watchdog.check()
    assert '"earlier" does not exist' not in home.log_file.read_text()
    home.older_log_file.rmdir()


def test_a_log_within_its_bound_is_left_alone(
    server: EmbeddedServer, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is lost as long as there is no need."""
    monkeypatch.setattr(postmaster, "LOG_BYTES_KEPT", MIB)
    home = Home(server.home)
    make_it_say(server, "earlier")
    watchdog.check()
    assert '"earlier" does not exist' in home.log_file.read_text()

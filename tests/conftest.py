"""Real PostgreSQL for every test: one embedded server a run, one migrated template, one clone of it a test."""

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
import structlog
from psycopg import sql
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from postseal.postgres.access import Access
from postseal.postgres.database import conninfo_for
from postseal.postgres.embedded import start_or_join
from postseal.postgres.postmaster import BUFFERS_VARIABLE

TEMPLATE = "template_postseal"
CONFORMANCE = "tests/conformance/"
ROOT_VARIABLE = "POSTSEAL_TEST_ROOT"
"""Names the run's folder; the workers inherit it. pytest's own folders are 0700, and PostgreSQL must reach its data."""


class FoldersTogether(LoadScopeScheduling):
    """Each test goes to whichever worker is free, but those of one service to one worker, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        return CONFORMANCE if nodeid.startswith(CONFORMANCE) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FoldersTogether:
    """How tests are dealt to workers. tests/conformance starts one service, which takes long."""
    return FoldersTogether(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Make the run's folder, before there are workers; and let the programs that tests start hear SIGINT.

    A shell starts what runs in the background with SIGINT ignored, and so would everything that this run starts be.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        root = Path(tempfile.mkdtemp(prefix="postseal-tests-", dir="/tmp"))
        root.chmod(0o711)
        os.environ[ROOT_VARIABLE] = str(root)
        # Each process of a server maps this memory: tests start thousands.
        os.environ.setdefault(BUFFERS_VARIABLE, "64")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove it when the workers have ended, and stop the server that a killed one left."""
    if not hasattr(config, "workerinput"):
        root = Path(os.environ.pop(ROOT_VARIABLE))
        if (root / "home").exists():
            start_or_join(root / "home", log=structlog.get_logger()).release()
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def run_folder() -> Path:
    """One folder that all workers of this run share."""
    return Path(os.environ[ROOT_VARIABLE])


@pytest.fixture(scope="session")
def cluster(run_folder: Path) -> Iterator[Access]:
    """The owner's way to the run's embedded server, whose template database is migrated."""
    server = start_or_join(run_folder / "home", log=structlog.get_logger())
    try:
        access = Access(conninfo_for(server.dsn), run_folder / "roles.pgpass", "postseal")
        with only_one(run_folder / "template.lock"):
            make_template(access)
        yield access
    finally:
        server.release()


@pytest.fixture
def access(cluster: Access) -> Iterator[Access]:
    """A database of this test alone, up to date and empty."""
    with cloned(cluster) as clone:
        yield clone


@pytest.fixture(scope="module")
def shared_access(cluster: Access) -> Iterator[Access]:
    """A database that the tests of one module share."""
    with cloned(cluster) as clone:
        yield clone


@contextmanager
def cloned(cluster: Access) -> Iterator[Access]:
    """A clone of the template, dropped at the end whoever is still connected."""
    name = f"test_{uuid4().hex}"
    with psycopg.connect(cluster.owner, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(TEMPLATE)))
        try:
            yield in_database(cluster, name)
        finally:
            owner.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def in_database(cluster: Access, name: str) -> Access:
    """The same cluster, another database."""
    return replace(cluster, owner=psycopg.conninfo.make_conninfo(cluster.owner, dbname=name))


def make_template(cluster: Access) -> None:
    """Migrate the template database unless another worker has."""
    with psycopg.connect(cluster.owner, autocommit=True) as owner:
        if owner.execute("SELECT 1 FROM pg_database WHERE datname = %s", [TEMPLATE]).fetchone():
            return
        name = sql.Identifier(TEMPLATE)
        owner.execute(sql.SQL("CREATE DATABASE {}").format(name))
        in_database(cluster, TEMPLATE).migrate()
        owner.execute(sql.SQL("ALTER DATABASE {} IS_TEMPLATE true ALLOW_CONNECTIONS false").format(name))


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Hold `lock` among the workers of this run."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run's random tests: POSTSEAL_TEST_SEED, or a new one; shown with every failure."""
    value = int(os.environ.get("POSTSEAL_TEST_SEED") or time.time_ns() % 2**32)
    print(f"POSTSEAL_TEST_SEED={value}")
    return value


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skipped test is a failed run: nothing hides behind a skip."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and exitstatus == 0 and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

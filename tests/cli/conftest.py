"""The command line, run in this process on one test's database."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from ran import Cli, Ran
from typer.testing import CliRunner

from postseal.cli import program
from postseal.postgres.access import Access


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Runs `postseal` with arguments; the environment says nothing of a database."""
    for variable in ("CONFIG", "DATA_DIR", "DATABASE_URL", "ROLES_FILE"):
        monkeypatch.delenv(f"POSTSEAL_{variable}", raising=False)
    # As wide as it gets: no help text breaks in the middle of what a test looks for.
    monkeypatch.setenv("COLUMNS", "200")
    handlers, level = logging.root.handlers[:], logging.root.level

    def run(*arguments: object) -> Ran:
        words = [str(argument) for argument in arguments]
        result = CliRunner().invoke(program(words), words)
        # A bug, or an exception that pytest has to see.
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    yield run
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def on_database(cli: Cli, access: Access, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The same, on this test's database."""
    monkeypatch.setenv("POSTSEAL_DATABASE_URL", access.owner)
    monkeypatch.setenv("POSTSEAL_ROLES_FILE", str(access.passfile))
    return cli

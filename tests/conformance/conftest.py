"""One service under its default settings for all conformance tests of a worker."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import Program
from world import World, populated


@pytest.fixture(scope="session")
def world(run_folder: Path) -> Iterator[World]:
    """The service and all that lives in it; PostgreSQL's own user has to reach the home."""
    folder = Path(tempfile.mkdtemp(prefix="conformance-", dir=run_folder))
    folder.chmod(0o711)
    program = Program(folder / "home")
    with program.serve() as address:
        yield populated(program, address)

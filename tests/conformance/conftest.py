"""One service under its default settings for all conformance tests of a worker."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import Program
from world import World, populated


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep this folder's tests on one worker: they share one service, and the last compares its whole trail."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("conformance"))


@pytest.fixture(scope="session")
def world(run_folder: Path) -> Iterator[World]:
    """The service and all that lives in it; PostgreSQL's own user has to reach the home."""
    folder = Path(tempfile.mkdtemp(prefix="conformance-", dir=run_folder))
    folder.chmod(0o711)
    program = Program(folder / "home")
    with program.serve() as address:
        yield populated(program, address)

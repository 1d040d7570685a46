"""Databases to back up and to restore into."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Target, new_target

from postseal.admin.actor import Actor
from postseal.postgres.access import Access


@pytest.fixture
def target(cluster: Access) -> Iterator[Target]:
    """An empty database, dropped at the end with all that a restore made of it."""
    with new_target(cluster) as target:
        yield target


@pytest.fixture
def actor() -> Actor:
    """Whoever restores."""
    return Actor("os:tester")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where an archive is to be."""
    return tmp_path / "archive"

"""The administrators' part of one database, and somebody who acts on it."""

from collections.abc import AsyncIterator

import pytest

from postseal.admin.actor import Actor
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part


@pytest.fixture
def anyio_backend() -> str:
    """Psycopg needs asyncio."""
    return "asyncio"


@pytest.fixture
async def database(access: Access) -> AsyncIterator[Database]:
    """The administrators' part."""
    async with Database(access.of(Part.ADMIN), prepare=True) as database:
        yield database


@pytest.fixture
def actor() -> Actor:
    """Who does the acts."""
    return Actor("os:ada")

"""What the tests of delivering share."""

from collections.abc import AsyncIterator

import pytest
from mailing import StillClock, delivering

from postseal.postgres.access import Access
from postseal.postgres.database import Database


@pytest.fixture
def anyio_backend() -> str:
    """Let tests run on asyncio, which psycopg needs."""
    return "asyncio"


@pytest.fixture
async def database(access: Access) -> AsyncIterator[Database]:
    """The part that delivers."""
    async with delivering(access) as database:
        yield database


@pytest.fixture
def clock() -> StillClock:
    """One that stands still."""
    return StillClock()

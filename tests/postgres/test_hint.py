"""Hints between processes: told only where somebody listens, and heard."""

import asyncio

import pytest

from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.hint import MAX_HINT_BYTES, listen, tell

pytestmark = pytest.mark.anyio

DEADLINE_S = 15


@pytest.fixture
def anyio_backend() -> str:
    """Let tests run on asyncio, which psycopg needs."""
    return "asyncio"


async def test_a_hint_is_told_while_somebody_listens(access: Access) -> None:
    """A listener hears first an empty hint, for what it may have missed, and then each as it was told."""
    heard = asyncio.Queue[str]()
    async with Database(access.of(Part.INGEST), prepare=True, size=2) as database, asyncio.timeout(DEADLINE_S):
        assert not await tell(database, "1:1")
        listening = asyncio.create_task(listen(database, heard.put_nowait))
        assert await heard.get() == ""
        longest = "1" * MAX_HINT_BYTES
        for hint in ("1:2", longest):
            assert await tell(database, hint)
            assert await heard.get() == hint
        listening.cancel()
        await asyncio.wait({listening})
        while await tell(database, "1:3"):  # until the server has seen the end of the session
            pass
    assert heard.empty()


async def test_nobody_listens_where_connections_keep_no_session(access: Access) -> None:
    """Behind PgBouncer in transaction mode listening ends at once, without a connection."""
    async with Database(access.of(Part.INGEST), prepare=False, size=1) as database:
        await asyncio.wait_for(listen(database, pytest.fail), DEADLINE_S)

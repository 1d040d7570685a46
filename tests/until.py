"""Waiting for what another process or task does, for so long and no longer."""

import asyncio
import time
from collections.abc import Callable

from fleet import as_owner
from postseal.postgres.access import Access

PATIENCE_S = 40.0
PAUSE_S = 0.01


def until(holds: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    """Return once something holds."""
    give_up_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(PAUSE_S)


async def until_async(holds: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    """The same, while the loop goes on."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(PAUSE_S)


def waits_for_lock(access: Access) -> bool:
    """Whether some transaction of this database waits for a lock."""
    with as_owner(access) as owner:
        row = owner.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    return row is not None and row[0] > 0

"""How much of a pool one tenant may have at once, so that waiting for one tenant's locks costs no other one theirs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from postseal.errors import Unavailable


@dataclass(eq=False, slots=True)
class _Share:
    places: asyncio.Semaphore
    users: int = 0
    """How many have a place or wait for one."""


class Shares:
    """At most `most` places at once for each tenant, given out in the order in which they were asked for."""

    def __init__(self, most: int, *, wait_s: float) -> None:
        self._most = most
        self._wait_s = wait_s
        self._shares: dict[str, _Share] = {}

    @asynccontextmanager
    async def place(self, tenant: str | None) -> AsyncGenerator[None]:
        """A place until the block ends; None needs none. Raises Unavailable when there is none within `wait_s`."""
        if tenant is None:
            yield
            return
        share = self._shares.setdefault(tenant, _Share(asyncio.Semaphore(self._most)))
        share.users += 1
        try:
            await self._take(share)
            try:
                yield
            finally:
                share.places.release()
        finally:
            share.users -= 1
            if not share.users:
                del self._shares[tenant]

    async def _take(self, share: _Share) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await share.places.acquire()
        except TimeoutError:
            raise Unavailable("the tenant has its share of the connections in use") from None

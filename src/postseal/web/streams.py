"""What devices and consumers read: `GET /v1/projects/…`."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from postseal.door import Door
from postseal.envelope.canonical import MAX_INTEGER
from postseal.identity.verified import VerifiedIdentity
from postseal.postgres.database import Database
from postseal.reading import MAX_PAGE_ITEMS, Page, read_keys, read_page, read_stream, read_streams
from postseal.web import documents, query
from postseal.web.head import read_head
from postseal.web.peer import TrustedProxies

DEFAULT_PAGE_ITEMS = 100
MAX_WAIT_S = 30
POLL_S = 0.5
"""How long a waiting reader may miss what arrived."""


class StreamCalls:
    """Reads for one process. `stopping` ends every wait."""

    def __init__(
        self,
        *,
        database: Database,
        door: Door,
        proxies: TrustedProxies,
        stopping: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._door = door
        self._proxies = proxies
        self._stopping = stopping
        self._clock = clock

    async def list_streams(self, request: Request) -> Response:
        """The streams of a project that the caller may see; `next` is null at the end."""
        caller = await self._identify(request)
        project = query.path_id(request, "project")
        limit = _limit(request)
        after = query.id_or_empty(request, "after")
        streams = await read_streams(self._database, caller, project, after=after, limit=limit)
        return documents.json_response(
            {
                "items": [documents.of_stream(project, stream) for stream in streams],
                "next": streams[-1].producer if len(streams) == limit else None,
            }
        )

    async def get_stream(self, request: Request) -> Response:
        """Where one stream stands."""
        caller = await self._identify(request)
        project, producer = query.path_id(request, "project"), query.path_id(request, "producer")
        stream = await read_stream(self._database, caller, project, producer)
        return documents.json_response(documents.of_stream(project, stream))

    async def list_envelopes(self, request: Request) -> Response:
        """A page of a stream; with `wait` it may come empty only after so many seconds."""
        caller = await self._identify(request)
        wait_s = query.whole_number(request, "wait", default=0, least=0, most=MAX_WAIT_S)
        until_s = self._clock() + wait_s
        page = await self._read_page(request, caller)
        while not page.items and await self._waits_on(request, until_s):
            page = await self._read_page(request, caller)
        return documents.json_response(documents.of_page(page))

    async def list_keys(self, request: Request) -> Response:
        """The keys with which a producer's envelopes are verified."""
        caller = await self._identify(request)
        project, producer = query.path_id(request, "project"), query.path_id(request, "producer")
        keys = await read_keys(self._database, caller, project, producer)
        return documents.json_response({"items": [documents.of_key(key) for key in keys]})

    async def _identify(self, request: Request) -> VerifiedIdentity:
        head = read_head(request.scope, self._proxies)
        return await self._door.identify(head.peer, head.credential)

    async def _read_page(self, request: Request, caller: VerifiedIdentity) -> Page:
        project, producer = query.path_id(request, "project"), query.path_id(request, "producer")
        after = query.whole_number(request, "after", default=0, least=0, most=MAX_INTEGER)
        return await read_page(self._database, caller, project, producer, after=after, limit=_limit(request))

    async def _waits_on(self, request: Request, until_s: float) -> bool:
        """Wait for a moment; whether the caller still waits for more after it."""
        left_s = until_s - self._clock()
        if left_s <= 0 or await request.is_disconnected():
            return False
        try:
            async with asyncio.timeout(min(POLL_S, left_s)):
                await self._stopping.wait()
        except TimeoutError:
            return True
        return False


def _limit(request: Request) -> int:
    return query.whole_number(request, "limit", default=DEFAULT_PAGE_ITEMS, least=1, most=MAX_PAGE_ITEMS)

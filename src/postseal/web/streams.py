"""What devices and consumers read: `GET /v1/projects/…`."""

import asyncio
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request

from postseal.identity.verified import Role
from postseal.postgres.database import Database
from postseal.reading import read_keys, read_page, read_stream, read_streams
from postseal.web import documents
from postseal.web.calls import Asked, Call, Reception
from postseal.web.documents import EnvelopePage, Nothing, ProducerKeyList, StreamList, StreamStanding
from postseal.web.query import IdOrEmpty, Limit, Sequence

STREAMS = "/v1/projects/{project}/streams"
READERS = (Role.DEVICE, Role.CONSUMER)
DEFAULT_PAGE_ITEMS = 100
MAX_WAIT_S = 30
POLL_S = 0.5
"""How long a waiting reader may miss what arrived."""


class StreamsQuery(Struct, frozen=True):
    """Which streams."""

    after: IdOrEmpty = ""
    limit: Limit = DEFAULT_PAGE_ITEMS


class EnvelopesQuery(Struct, frozen=True):
    """Which envelopes, and for how many seconds to wait for the first."""

    after: Sequence = 0
    limit: Limit = DEFAULT_PAGE_ITEMS
    wait: Annotated[int, Meta(ge=0, le=MAX_WAIT_S)] = 0


class StreamCalls:
    """Reads for one process. `stopping` ends every wait."""

    def __init__(self, *, database: Database, stopping: asyncio.Event, clock: Callable[[], float]) -> None:
        self._database = database
        self._stopping = stopping
        self._clock = clock

    def calls(self, reception: Reception) -> list[Call]:
        """All of them."""
        stream, consumers = STREAMS + "/{producer}", (Role.CONSUMER,)
        keys = "/v1/projects/{project}/producers/{producer}/keys"
        read = reception.read
        return [
            read(STREAMS, self.list_streams, roles=READERS, query=StreamsQuery, answer=StreamList),
            read(stream, self.get_stream, roles=READERS, query=Nothing, answer=StreamStanding),
            read(
                stream + "/envelopes",
                self.list_envelopes,
                roles=consumers,
                query=EnvelopesQuery,
                answer=EnvelopePage,
            ),
            read(keys, self.list_keys, roles=consumers, query=Nothing, answer=ProducerKeyList),
        ]

    async def list_streams(self, asked: Asked[StreamsQuery, Nothing]) -> StreamList:
        """The streams of a project that the caller may see; a device sees its own."""
        project, limit = asked.path["project"], asked.query.limit
        streams = await read_streams(self._database, asked.caller, project, after=asked.query.after, limit=limit)
        items = [documents.of_stream(project, stream) for stream in streams]
        return StreamList(items, streams[-1].producer if len(streams) == limit else None)

    async def get_stream(self, asked: Asked[Nothing, Nothing]) -> StreamStanding:
        """Where one stream stands."""
        project = asked.path["project"]
        stream = await read_stream(self._database, asked.caller, project, asked.path["producer"])
        return documents.of_stream(project, stream)

    async def list_envelopes(self, asked: Asked[EnvelopesQuery, Nothing]) -> EnvelopePage:
        """A page of a stream; with `wait` it comes empty only after so many seconds."""
        until_s = self._clock() + asked.query.wait
        page = await self._read_page(asked)
        while not page.items and await self._waits_on(asked.request, until_s):
            page = await self._read_page(asked)
        return page

    async def list_keys(self, asked: Asked[Nothing, Nothing]) -> ProducerKeyList:
        """The public keys with which a producer's envelopes are verified."""
        keys = await read_keys(self._database, asked.caller, asked.path["project"], asked.path["producer"])
        return ProducerKeyList([documents.of_key(key) for key in keys])

    async def _read_page(self, asked: Asked[EnvelopesQuery, Nothing]) -> EnvelopePage:
        page = await read_page(
            self._database,
            asked.caller,
            asked.path["project"],
            asked.path["producer"],
            after=asked.query.after,
            limit=asked.query.limit,
        )
        return documents.of_page(page)

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

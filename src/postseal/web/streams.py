"""What devices and consumers read: `GET /v1/projects/…`."""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from postseal.door import Door
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.inbound.reading import Page, read_keys, read_page, read_stream, read_streams
from postseal.inbound.waiting import Place, Waiting
from postseal.postgres.database import Database
from postseal.web import documents
from postseal.web.calls import Asked, Call, Reception
from postseal.web.documents import EnvelopePage, Nothing, ProducerKeyList, StreamList, StreamStanding
from postseal.web.head import read_head
from postseal.web.peer import TrustedProxies
from postseal.web.query import IdOrEmpty, Limit, Sequence

STREAMS = "/v1/projects/{project}/streams"
READERS = (Role.DEVICE, Role.CONSUMER)
DEFAULT_PAGE_ITEMS = 100
MAX_WAIT_S = 30
IDENTIFY_EVERY_S = 1.0
"""How often a waiting reader's credential is looked at again, and whether the reader is still there."""


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
    """Reads for one process."""

    def __init__(
        self,
        database: Database,
        waiting: Waiting,
        *,
        door: Door,
        proxies: TrustedProxies,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._waiting = waiting
        self._door = door
        self._proxies = proxies
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
        return documents.of_streams(streams, limit)

    async def get_stream(self, asked: Asked[Nothing, Nothing]) -> StreamStanding:
        """Where one stream stands."""
        return documents.of_stream(
            await read_stream(self._database, asked.caller, asked.path["project"], asked.path["producer"])
        )

    async def list_envelopes(self, asked: Asked[EnvelopesQuery, Nothing]) -> EnvelopePage:
        """A page of a stream; with `wait` it comes empty only after so many seconds."""
        until_s = self._clock() + asked.query.wait
        page = await self._read_page(asked, asked.caller)
        if asked.query.wait and not page.items:
            with self._waiting.place(page.stream, asked.query.after) as place:
                page = await self._wait(asked, page, place, until_s)
        return documents.of_page(page)

    async def list_keys(self, asked: Asked[Nothing, Nothing]) -> ProducerKeyList:
        """The public keys with which a producer's envelopes are verified."""
        keys = await read_keys(self._database, asked.caller, asked.path["project"], asked.path["producer"])
        return ProducerKeyList([documents.of_key(key) for key in keys])

    async def _read_page(self, asked: Asked[EnvelopesQuery, Nothing], caller: VerifiedIdentity) -> Page:
        return await read_page(
            self._database,
            caller,
            asked.path["project"],
            asked.path["producer"],
            after=asked.query.after,
            limit=asked.query.limit,
        )

    async def _wait(
        self, asked: Asked[EnvelopesQuery, Nothing], page: Page, place: Place | None, until_s: float
    ) -> Page:
        """The page once it has something, or as it was when there is no more waiting."""
        head = read_head(asked.request.scope, self._proxies)
        while place is not None and not page.items and (left_s := until_s - self._clock()) > 0:
            went_on = await place.goes_on(min(IDENTIFY_EVERY_S, left_s))
            if self._waiting.ended or await asked.request.is_disconnected():
                break
            # Whose credential was revoked meanwhile gets nothing more.
            caller = await self._door.identify(head.peer, head.credential)
            if went_on:
                page = await self._read_page(asked, caller)
        return page

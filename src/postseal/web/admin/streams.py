"""`/v1/admin/projects/{project}/streams`: list, show, raise the floor."""

from typing import Annotated

from msgspec import Meta, Struct

from postseal.admin import streams
from postseal.admin.names import MAX_REASON_CHARACTERS
from postseal.admin.operator import Operator
from postseal.envelope.canonical import MAX_INTEGER
from postseal.outcomes import Reason
from postseal.postgres.database import Connection
from postseal.postgres.streams import Stream
from postseal.web.admin.office import ADMIN, DEFAULT_PAGE_ITEMS, OPERATORS, Office
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, StreamList, StreamStanding, of_stream, of_streams
from postseal.web.query import IdOrEmpty, Limit

STREAMS = f"{ADMIN}/projects/{{project}}/streams"


class ProjectStreamsQuery(Struct, frozen=True):
    """Which streams."""

    after: IdOrEmpty = ""
    limit: Limit = DEFAULT_PAGE_ITEMS


class NewFloor(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a replay floor is raised, and why; `force` lets it rise above the highest sequence."""

    floor: Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
    reason: Annotated[str, Meta(min_length=1, max_length=MAX_REASON_CHARACTERS)]
    force: bool = False


class StreamCalls:
    """The streams of an operator's projects."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def calls(self) -> list[Call]:
        """All of them."""
        reception, stream = self._office.reception, f"{STREAMS}/{{producer}}"
        return [
            reception.read(STREAMS, self.list_all, roles=OPERATORS, query=ProjectStreamsQuery, answer=StreamList),
            reception.read(stream, self.show, roles=OPERATORS, query=Nothing, answer=StreamStanding),
            reception.change(
                f"{stream}/raise-floor",
                self.raise_floor,
                roles=OPERATORS,
                body=NewFloor,
                answer=StreamStanding,
                reasons=(Reason.CONFLICT,),
            ),
        ]

    async def list_all(self, asked: Asked[ProjectStreamsQuery, Nothing]) -> StreamList:
        """Where each stream of a project stands, for an operator of it."""
        project, after, limit = asked.path["project"], asked.query.after, asked.query.limit

        async def work(connection: Connection, operator: Operator) -> list[Stream]:
            operator.require_projects([project])
            return await streams.page(connection, operator.tenant, project, after=after, rows=limit)

        return of_streams(await self._office.act(asked, work), limit)

    async def show(self, asked: Asked[Nothing, Nothing]) -> StreamStanding:
        """Where one stream stands, for an operator of its project."""
        project, producer = asked.path["project"], asked.path["producer"]

        async def work(connection: Connection, operator: Operator) -> Stream:
            operator.require_projects([project])
            return await streams.show(connection, operator.tenant, project, producer)

        return of_stream(await self._office.act(asked, work))

    async def raise_floor(self, asked: Asked[Nothing, NewFloor]) -> StreamStanding:
        """Close for ever what is missing in a stream up to a sequence."""
        project, producer, wanted = asked.path["project"], asked.path["producer"], asked.body

        async def work(connection: Connection, operator: Operator) -> Stream:
            operator.require_projects([project])
            return await streams.raise_floor(
                connection,
                operator.actor,
                operator.tenant,
                project,
                producer,
                floor=wanted.floor,
                reason=wanted.reason,
                force=wanted.force,
            )

        return of_stream(await self._office.act(asked, work))

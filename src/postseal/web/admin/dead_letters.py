"""`/v1/admin/projects/{project}/dead-letters`: list, count, redrive one or all of a filter."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from postseal.admin import dead_letters
from postseal.admin.dead_letters import MAX_COUNTED
from postseal.admin.operator import Operator
from postseal.outcomes import Reason
from postseal.postgres.database import Connection
from postseal.postgres.dead_letters import MAX_PAGE_ROWS, POSITION_PATTERN, DeadFilter, DeadLetter, Position
from postseal.settings import MAX_ATTEMPTS
from postseal.web.admin.office import ADMIN, OPERATORS, Office
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, TimeMs, milliseconds, time_of
from postseal.web.query import Id, IdOrEmpty, uuid_in

DEAD_LETTERS = f"{ADMIN}/projects/{{project}}/dead-letters"

Place = Annotated[str, Meta(pattern=f"^({POSITION_PATTERN})?$", max_length=52)]
"""Where a page begins: the `next` of the one before."""
Code = Annotated[str, Meta(pattern="^[a-z0-9_]+$", min_length=1, max_length=40)]
CodeOrEmpty = Annotated[str, Meta(pattern="^[a-z0-9_]*$", max_length=40)]


class DeadLetterItem(Struct, frozen=True, rename="camel"):
    """A delivery that was given up, and why."""

    delivery: str
    destination: str
    sequence: int
    event_identity: str
    code: str
    attempt: int
    attempt_limit: int
    sealed_at_ms: int
    expires_at_ms: int | None
    dead_since_ms: int


class DeadLetterList(Struct, frozen=True):
    """Dead letters, the earliest given up first; `next` is the `after` of the next page, null at the end."""

    items: list[DeadLetterItem]
    next: str | None


class CountQuery(Struct, frozen=True, rename="camel"):
    """Which dead letters: of one destination, with one code, given up from `sinceMs` on and before `untilMs`."""

    destination: IdOrEmpty = ""
    code: CodeOrEmpty = ""
    since_ms: TimeMs | UnsetType = UNSET
    until_ms: TimeMs | UnsetType = UNSET

    def filter(self) -> DeadFilter:
        """What they are found by."""
        return DeadFilter(self.destination or None, self.code or None, time_of(self.since_ms), time_of(self.until_ms))


class DeadLettersQuery(CountQuery, frozen=True, rename="camel"):
    """The same, a page at a time."""

    after: Place = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_ROWS)] = MAX_PAGE_ROWS


class DeadLetterCount(Struct, frozen=True):
    """How many there are; 100,000 stands for that many or more."""

    count: Annotated[int, Meta(ge=0, le=MAX_COUNTED)]


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """How many further attempts it gets; by default as many as a new delivery."""

    budget: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] | UnsetType = UNSET


class Redrive(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which dead letters are sent again: all of the project, or those that a list with the same filter shows."""

    destination: Id | UnsetType = UNSET
    code: Code | UnsetType = UNSET
    since_ms: TimeMs | UnsetType = UNSET
    until_ms: TimeMs | UnsetType = UNSET
    budget: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)] | UnsetType = UNSET


class Redriven(Struct, frozen=True):
    """How many are sent again."""

    redriven: int


class DeadLetterCalls:
    """The dead letters of an operator's projects. `attempt_limit` is what a redriven one gets by default."""

    def __init__(self, office: Office, attempt_limit: int) -> None:
        self._office = office
        self._attempt_limit = attempt_limit

    def calls(self) -> list[Call]:
        """All of them."""
        reception = self._office.reception
        return [
            reception.read(
                DEAD_LETTERS, self.list_page, roles=OPERATORS, query=DeadLettersQuery, answer=DeadLetterList
            ),
            reception.read(
                f"{DEAD_LETTERS}/count", self.count, roles=OPERATORS, query=CountQuery, answer=DeadLetterCount
            ),
            reception.change(
                f"{DEAD_LETTERS}/{{delivery}}/redrive",
                self.redrive,
                roles=OPERATORS,
                body=Budget,
                answer=Redriven,
                reasons=(Reason.CONFLICT,),
            ),
            reception.change(
                f"{DEAD_LETTERS}/redrive", self.redrive_all, roles=OPERATORS, body=Redrive, answer=Redriven
            ),
        ]

    async def list_page(self, asked: Asked[DeadLettersQuery, Nothing]) -> DeadLetterList:
        """A project's dead letters."""
        project, query = asked.path["project"], asked.query
        wanted = query.filter()
        after = Position.read(query.after) if query.after else None

        async def work(connection: Connection, operator: Operator) -> list[DeadLetter]:
            operator.require_projects([project])
            return await dead_letters.page(connection, operator.tenant, project, wanted, after=after, rows=query.limit)

        found = await self._office.act(asked, work)
        last = str(found[-1].position) if len(found) == query.limit else None
        return DeadLetterList([_item(row) for row in found], last)

    async def count(self, asked: Asked[CountQuery, Nothing]) -> DeadLetterCount:
        """How many dead letters a project has."""
        project, query = asked.path["project"], asked.query
        wanted = query.filter()

        async def work(connection: Connection, operator: Operator) -> int:
            operator.require_projects([project])
            return await dead_letters.count(connection, operator.tenant, project, wanted)

        return DeadLetterCount(await self._office.act(asked, work))

    async def redrive(self, asked: Asked[Nothing, Budget]) -> Redriven:
        """Send one dead letter again."""
        project, delivery = asked.path["project"], uuid_in(asked.path, "delivery")

        async def work(connection: Connection, operator: Operator) -> None:
            operator.require_projects([project])
            await dead_letters.redrive(
                connection, operator.actor, operator.tenant, project, delivery, budget=self._budget(asked.body.budget)
            )

        await self._office.act(asked, work)
        return Redriven(1)

    async def redrive_all(self, asked: Asked[Nothing, Redrive]) -> Redriven:
        """Send all dead letters of a filter again, 100,000 at most; count them first."""
        project, body = asked.path["project"], asked.body
        operator = Operator.of(asked.caller)
        operator.require_projects([project])
        wanted = DeadFilter(
            destination=None if body.destination is UNSET else body.destination,
            code=None if body.code is UNSET else body.code,
            since=time_of(body.since_ms),
            until=time_of(body.until_ms),
        )
        redriven = await dead_letters.redrive_all(
            self._office.database, operator.actor, operator.tenant, project, wanted, budget=self._budget(body.budget)
        )
        return Redriven(redriven)

    def _budget(self, wanted: int | UnsetType) -> int:
        return self._attempt_limit if wanted is UNSET else wanted


def _item(row: DeadLetter) -> DeadLetterItem:
    return DeadLetterItem(
        str(row.delivery),
        row.destination,
        row.sequence,
        row.event_identity.hex(),
        row.code,
        row.attempt,
        row.attempt_limit,
        milliseconds(row.sealed_at),
        None if row.expires_at is None else milliseconds(row.expires_at),
        milliseconds(row.settled_at),
    )

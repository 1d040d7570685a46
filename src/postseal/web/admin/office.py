"""What all operators' calls have in common."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from postseal.admin.operator import Operator
from postseal.identity.verified import Role
from postseal.postgres.database import Connection, Database
from postseal.postgres.page import ListPart
from postseal.web.calls import Asked, Reception

T = TypeVar("T")

ADMIN = "/v1/admin"
OPERATORS = (Role.OPERATOR,)
DEFAULT_PAGE_ITEMS = 100


@dataclass(frozen=True, slots=True)
class Office:
    """Does operators' acts. `database` is the administrators' part."""

    reception: Reception
    database: Database
    invitation_lifetime_s: int
    credential_lifetime_s: int
    key_window_s: int

    async def act(self, asked: Asked[Any, Any], work: Callable[[Connection, Operator], Awaitable[T]]) -> T:
        """The result of `work` for whoever asked, in one transaction, committed for certain."""
        operator = Operator.of(asked.caller)
        return await self.database.transact(lambda connection: work(connection, operator))


def page_of(operator: Operator, after: str, limit: int) -> ListPart:
    """The rows of a list that the operator asked for and may see."""
    return ListPart(sorted(operator.projects), after or None, limit)

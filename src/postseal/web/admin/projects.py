"""`/v1/admin/projects`: list."""

from msgspec import Struct

from postseal.admin import tenants
from postseal.admin.operator import Operator
from postseal.postgres.database import Connection
from postseal.web.admin.office import ADMIN, OPERATORS, Office
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, milliseconds


class Project(Struct, frozen=True, rename="camel"):
    """A project of the operator's."""

    project: str
    created_at_ms: int


class ProjectList(Struct, frozen=True):
    """Projects by name."""

    items: list[Project]


class ProjectCalls:
    """The projects of a credential."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def calls(self) -> list[Call]:
        """The one there is."""
        read = self._office.reception.read
        return [read(f"{ADMIN}/projects", self.list_all, roles=OPERATORS, query=Nothing, answer=ProjectList)]

    async def list_all(self, asked: Asked[Nothing, Nothing]) -> ProjectList:
        """The operator's projects."""

        async def work(connection: Connection, operator: Operator) -> ProjectList:
            rows = await tenants.list_projects(connection, operator.tenant)
            own = [row for row in rows if row.project in operator.projects]
            return ProjectList([Project(row.project, milliseconds(row.created_at)) for row in own])

        return await self._office.act(asked, work)

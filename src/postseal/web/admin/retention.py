"""`/v1/admin/retention` and `/v1/admin/holds`: show and set how long payloads are kept; place, release, list holds.

What concerns the whole tenant is for an operator of all its projects.
"""

from typing import Annotated

from msgspec import Meta, Struct

from postseal.admin import holds, retention
from postseal.admin.names import MAX_REASON_CHARACTERS
from postseal.admin.operator import Operator
from postseal.outcomes import Reason
from postseal.postgres.database import Connection
from postseal.settings import MAX_RETENTION_DAYS
from postseal.web.admin.office import ADMIN, OPERATORS, Office
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, milliseconds
from postseal.web.query import Id

RETENTION = f"{ADMIN}/retention"
HOLDS = f"{ADMIN}/holds"

Days = Annotated[int, Meta(ge=1, le=MAX_RETENTION_DAYS)]
ReasonText = Annotated[str, Meta(min_length=1, max_length=MAX_REASON_CHARACTERS)]


class ProjectRetention(Struct, frozen=True):
    """The days of a project's own; null where the tenant's hold."""

    project: str
    days: int | None


class TenantRetention(Struct, frozen=True, rename="camel"):
    """For how many days payloads are kept: a project's own, else the tenant's, else the default."""

    days: int | None
    default_days: int
    projects: list[ProjectRetention]


class NewRetention(Struct, frozen=True, forbid_unknown_fields=True):
    """For how many days payloads are kept from now on; null takes the own setting away."""

    days: Days | None


class Hold(Struct, frozen=True, rename="camel"):
    """What keeps all payloads of the tenant."""

    hold: str
    reason: str
    account: str
    placed_at_ms: int


class HoldList(Struct, frozen=True):
    """All holds of the tenant, by name."""

    items: list[Hold]


class NewHold(Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a hold, and why it is placed."""

    hold: Id
    reason: ReasonText


class PlacedHold(Struct, frozen=True):
    """The hold that now keeps the payloads."""

    hold: str


class Release(Struct, frozen=True, forbid_unknown_fields=True):
    """Why a hold is released."""

    reason: ReasonText


class ReleasedHold(Struct, frozen=True):
    """The hold that is no more."""

    hold: str


class RetentionCalls:
    """Retention and holds of an operator's tenant. `default_days` is the deployment's."""

    def __init__(self, office: Office, default_days: int) -> None:
        self._office = office
        self._default_days = default_days

    def calls(self) -> list[Call]:
        """All of them."""
        reception = self._office.reception
        return [
            reception.read(RETENTION, self.show, roles=OPERATORS, query=Nothing, answer=TenantRetention),
            reception.change(
                RETENTION, self.change_of_tenant, roles=OPERATORS, body=NewRetention, answer=TenantRetention
            ),
            reception.change(
                f"{ADMIN}/projects/{{project}}/retention",
                self.change_of_project,
                roles=OPERATORS,
                body=NewRetention,
                answer=TenantRetention,
            ),
            reception.read(HOLDS, self.list_holds, roles=OPERATORS, query=Nothing, answer=HoldList),
            reception.change(
                HOLDS,
                self.place,
                roles=OPERATORS,
                body=NewHold,
                answer=PlacedHold,
                status=201,
                reasons=(Reason.CONFLICT,),
            ),
            reception.change(
                f"{HOLDS}/{{hold}}/release", self.release, roles=OPERATORS, body=Release, answer=ReleasedHold
            ),
        ]

    async def show(self, asked: Asked[Nothing, Nothing]) -> TenantRetention:
        """For how many days payloads of the tenant and of the operator's projects are kept."""
        return await self._office.act(asked, self._shown)

    async def change_of_tenant(self, asked: Asked[Nothing, NewRetention]) -> TenantRetention:
        """Set how long new payloads of the tenant are kept, where their project sets nothing."""

        async def work(connection: Connection, operator: Operator) -> TenantRetention:
            await operator.require_tenant(connection)
            await retention.change(connection, operator.actor, operator.tenant, None, asked.body.days)
            return await self._shown(connection, operator)

        return await self._office.act(asked, work)

    async def change_of_project(self, asked: Asked[Nothing, NewRetention]) -> TenantRetention:
        """Set how long new payloads of a project are kept."""
        project = asked.path["project"]

        async def work(connection: Connection, operator: Operator) -> TenantRetention:
            operator.require_projects([project])
            await retention.change(connection, operator.actor, operator.tenant, project, asked.body.days)
            return await self._shown(connection, operator)

        return await self._office.act(asked, work)

    async def list_holds(self, asked: Asked[Nothing, Nothing]) -> HoldList:
        """The holds of the tenant, for an operator of all its projects."""

        async def work(connection: Connection, operator: Operator) -> HoldList:
            await operator.require_tenant(connection)
            rows = await holds.list_of(connection, operator.tenant)
            return HoldList([Hold(row.hold, row.reason, row.account, milliseconds(row.placed_at)) for row in rows])

        return await self._office.act(asked, work)

    async def place(self, asked: Asked[Nothing, NewHold]) -> PlacedHold:
        """Keep all payloads of the tenant until the hold is released."""
        wanted = asked.body

        async def work(connection: Connection, operator: Operator) -> None:
            await operator.require_tenant(connection)
            await holds.place(connection, operator.actor, operator.tenant, wanted.hold, reason=wanted.reason)

        await self._office.act(asked, work)
        return PlacedHold(wanted.hold)

    async def release(self, asked: Asked[Nothing, Release]) -> ReleasedHold:
        """Let payloads of the tenant be deleted again, once no other hold keeps them."""
        hold = asked.path["hold"]

        async def work(connection: Connection, operator: Operator) -> None:
            await operator.require_tenant(connection)
            await holds.release(connection, operator.actor, operator.tenant, hold, reason=asked.body.reason)

        await self._office.act(asked, work)
        return ReleasedHold(hold)

    async def _shown(self, connection: Connection, operator: Operator) -> TenantRetention:
        of_tenant, *of_projects = await retention.show(connection, operator.tenant)
        own = [ProjectRetention(row.project, row.days) for row in of_projects if row.project in operator.projects]
        return TenantRetention(of_tenant.days, self._default_days, own)

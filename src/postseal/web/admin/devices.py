"""`/v1/admin/devices`: list, invite, retire."""

from typing import Annotated

from msgspec import Meta, Struct

from postseal.admin import devices
from postseal.admin.names import MAX_PROJECTS
from postseal.admin.operator import Operator
from postseal.outbound.holding import move_mail
from postseal.outcomes import Reason
from postseal.postgres.database import Connection
from postseal.postgres.devices import ListedDevice
from postseal.web.admin.office import ADMIN, DEFAULT_PAGE_ITEMS, OPERATORS, Office, page_of
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, milliseconds
from postseal.web.query import Id, IdOrEmpty, Limit

DEVICES = f"{ADMIN}/devices"


class Device(Struct, frozen=True, rename="camel"):
    """A device, and in which of the operator's projects it has a stream; `retiredAtMs` is null until it is retired."""

    device: str
    account: str
    projects: list[str]
    created_at_ms: int
    retired_at_ms: int | None


class DeviceList(Struct, frozen=True):
    """Devices by id; `next` is the `after` of the next page, null at the end."""

    items: list[Device]
    next: str | None


class DevicesQuery(Struct, frozen=True):
    """Which devices."""

    after: IdOrEmpty = ""
    limit: Limit = DEFAULT_PAGE_ITEMS


class NewInvitation(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A new device, or with `addsKey` a further key or further projects of an old one.

    The account of a new device is its own id where none is given.
    """

    device: Id
    projects: Annotated[list[Id], Meta(min_length=1, max_length=MAX_PROJECTS)]
    account: Id | None = None
    adds_key: bool = False


class DeviceInvitation(Struct, frozen=True, rename="camel"):
    """A one-time code; it is shown this once."""

    device: str
    projects: list[str]
    code: str
    expires_at_ms: int


class DeviceCalls:
    """The devices of an operator's projects."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def calls(self) -> list[Call]:
        """All of them."""
        reception = self._office.reception
        return [
            reception.read(DEVICES, self.list_all, roles=OPERATORS, query=DevicesQuery, answer=DeviceList),
            reception.change(
                DEVICES,
                self.invite,
                roles=OPERATORS,
                body=NewInvitation,
                answer=DeviceInvitation,
                status=201,
                reasons=(Reason.NOT_FOUND, Reason.CONFLICT),
            ),
            reception.order(f"{DEVICES}/{{device}}/retire", self.retire, roles=OPERATORS, reasons=(Reason.CONFLICT,)),
        ]

    async def list_all(self, asked: Asked[DevicesQuery, Nothing]) -> DeviceList:
        """The devices that have a stream in one of the operator's projects, retired ones included."""
        after, limit = asked.query.after, asked.query.limit

        async def work(connection: Connection, operator: Operator) -> list[ListedDevice]:
            return await devices.list_of_tenant(connection, operator.tenant, page_of(operator, after, limit))

        rows = await self._office.act(asked, work)
        return DeviceList([_device(row) for row in rows], rows[-1].device if len(rows) == limit else None)

    async def invite(self, asked: Asked[Nothing, NewInvitation]) -> DeviceInvitation:
        """Make a one-time code with which a device enrols itself."""
        wanted = asked.body

        async def work(connection: Connection, operator: Operator) -> devices.Invitation:
            operator.require_projects(wanted.projects)
            if wanted.adds_key:
                await operator.require_device(connection, wanted.device)
            return await devices.invite(
                connection,
                operator.actor,
                operator.tenant,
                wanted.device,
                projects=wanted.projects,
                lifetime_s=self._office.invitation_lifetime_s,
                account=wanted.account,
                adds_key=wanted.adds_key,
            )

        made = await self._office.act(asked, work)
        return DeviceInvitation(made.device, made.projects, made.code, milliseconds(made.expires_at))

    async def retire(self, asked: Asked[Nothing, Nothing]) -> None:
        """Take nothing new from a device, for ever, and hold what is for it; its id is never used again."""
        device, tenant = asked.path["device"], asked.caller.tenant

        async def work(connection: Connection, operator: Operator) -> list[int]:
            await operator.require_device(connection, device)
            return await devices.retire(connection, operator.actor, operator.tenant, device)

        for stream in await self._office.act(asked, work):
            await move_mail(self._office.database, tenant, stream)


def _device(row: ListedDevice) -> Device:
    retired_at_ms = None if row.retired_at is None else milliseconds(row.retired_at)
    return Device(row.device, row.account, row.projects, milliseconds(row.created_at), retired_at_ms)

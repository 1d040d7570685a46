"""`/v1/admin/keys`: list, retire, revoke."""

from msgspec import Struct

from postseal.admin import keys
from postseal.admin.operator import Operator
from postseal.outcomes import Reason
from postseal.postgres.database import Connection
from postseal.postgres.keys import ListedKey
from postseal.web.admin.office import ADMIN, DEFAULT_PAGE_ITEMS, OPERATORS, Office, page_of
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, milliseconds
from postseal.web.query import IdOrEmpty, KeyidOrEmpty, Limit

KEYS = f"{ADMIN}/keys"


class DeviceKey(Struct, frozen=True, rename="camel"):
    """A device's key; `acceptUntilMs` is null unless it retires."""

    keyid: str
    device: str
    state: str
    age_s: int
    registered_at_ms: int
    changed_at_ms: int
    accept_until_ms: int | None


class DeviceKeyList(Struct, frozen=True):
    """Keys by device, oldest first; `next` is the `after` of the next page, null at the end."""

    items: list[DeviceKey]
    next: str | None


class KeysQuery(Struct, frozen=True):
    """Which keys: those of one device, or all; `after` is an id."""

    device: IdOrEmpty = ""
    after: KeyidOrEmpty = ""
    limit: Limit = DEFAULT_PAGE_ITEMS


class KeyCalls:
    """The keys of the devices of an operator's projects."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def calls(self) -> list[Call]:
        """All of them."""
        reception, key, conflict = self._office.reception, f"{KEYS}/{{keyid}}", (Reason.CONFLICT,)
        return [
            reception.read(
                KEYS, self.list_all, roles=OPERATORS, query=KeysQuery, answer=DeviceKeyList, reasons=(Reason.NOT_FOUND,)
            ),
            reception.order(f"{key}/retire", self.retire, roles=OPERATORS, reasons=conflict),
            reception.order(f"{key}/revoke", self.revoke, roles=OPERATORS, reasons=conflict),
        ]

    async def list_all(self, asked: Asked[KeysQuery, Nothing]) -> DeviceKeyList:
        """The keys of the devices that have a stream in one of the operator's projects."""
        wanted, limit = asked.query, asked.query.limit

        async def work(connection: Connection, operator: Operator) -> list[ListedKey]:
            if wanted.device:
                await operator.require_seen_device(connection, wanted.device)
            part = page_of(operator, wanted.after, limit)
            return await keys.list_of_tenant(connection, operator.tenant, wanted.device or None, part)

        rows = await self._office.act(asked, work)
        return DeviceKeyList([_key(row) for row in rows], rows[-1].keyid if len(rows) == limit else None)

    async def retire(self, asked: Asked[Nothing, Nothing]) -> None:
        """Let a key bring nothing new; what it signed still verifies."""
        keyid = asked.path["keyid"]

        async def work(connection: Connection, operator: Operator) -> None:
            await operator.require_key(connection, keyid)
            await keys.retire(connection, operator.actor, operator.tenant, keyid)

        await self._office.act(asked, work)

    async def revoke(self, asked: Asked[Nothing, Nothing]) -> None:
        """Revoke a key that may be in wrong hands: from now on it brings nothing new."""
        keyid = asked.path["keyid"]

        async def work(connection: Connection, operator: Operator) -> None:
            await operator.require_key(connection, keyid)
            await keys.revoke(connection, operator.actor, operator.tenant, keyid)

        await self._office.act(asked, work)


def _key(row: ListedKey) -> DeviceKey:
    return DeviceKey(
        row.keyid,
        row.device,
        row.state,
        row.age_s,
        milliseconds(row.registered_at),
        milliseconds(row.changed_at),
        None if row.accept_until is None else milliseconds(row.accept_until),
    )

"""`/v1/admin/keys`: list, register or rotate, retire, revoke, remove."""

from typing import Annotated

from msgspec import Meta, Struct

from postseal.admin import keys
from postseal.admin.keys import ListedKey, Rotation
from postseal.admin.operator import Operator
from postseal.envelope import base64url
from postseal.errors import Refused
from postseal.outcomes import Reason
from postseal.postgres.database import Connection
from postseal.web.admin.office import ADMIN, DEFAULT_PAGE_ITEMS, OPERATORS, Office, page_of
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, milliseconds
from postseal.web.query import Id, IdOrEmpty, KeyidOrEmpty, Limit

KEYS = f"{ADMIN}/keys"
MAX_OVERLAP_S = 365 * 86_400


class DeviceKey(Struct, frozen=True, rename="camel"):
    """A device's key; `acceptUntilMs` is null unless it retires.

    `lastAcceptedAtMs` is noted once a minute, and null where the key brought nothing yet. What holds a key, so that it
    cannot be removed now, stands in `obstacles`: `active`, `retiring`, `window` (its last envelope is too recent),
    `payload` (payloads that it signed are kept), `holes` (sequences are missing in a stream that it signed), `on-hold`
    (so are all payloads of its tenant). All of that ends at `freeAtMs` as things stand; null where nothing holds it,
    and where that cannot be told.
    """

    keyid: str
    device: str
    state: str
    age_s: int
    registered_at_ms: int
    changed_at_ms: int
    accept_until_ms: int | None
    last_accepted_at_ms: int | None
    free_at_ms: int | None
    obstacles: list[str]


class NewKey(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A further key of a device: its public half, 32 bytes in base64url.

    With `overlapS` the device's other active keys bring something new for so many seconds more; without, they stay.
    """

    device: Id
    public_key: Annotated[str, Meta(min_length=43, max_length=43)]
    overlap_s: Annotated[int, Meta(ge=0, le=MAX_OVERLAP_S)] | None = None


class AddedKey(Struct, frozen=True, rename="camel"):
    """A key that is active now; those that were before it bring something new until `acceptUntilMs`."""

    keyid: str
    retiring: list[str]
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
            reception.change(
                KEYS,
                self.add,
                roles=OPERATORS,
                body=NewKey,
                answer=AddedKey,
                status=201,
                reasons=(Reason.NOT_FOUND, *conflict),
            ),
            reception.order(f"{key}/retire", self.retire, roles=OPERATORS, reasons=conflict),
            reception.order(f"{key}/revoke", self.revoke, roles=OPERATORS, reasons=conflict),
            reception.order(f"{key}/remove", self.remove, roles=OPERATORS, reasons=conflict),
        ]

    async def list_all(self, asked: Asked[KeysQuery, Nothing]) -> DeviceKeyList:
        """The keys of the devices that have a stream in one of the operator's projects."""
        wanted, limit = asked.query, asked.query.limit

        async def work(connection: Connection, operator: Operator) -> list[ListedKey]:
            if wanted.device:
                await operator.require_seen_device(connection, wanted.device)
            part = page_of(operator, wanted.after, limit)
            window_s = self._office.key_window_s
            return await keys.list_of_tenant(
                connection, operator.tenant, wanted.device or None, part, window_s=window_s
            )

        rows = await self._office.act(asked, work)
        return DeviceKeyList([_key(row) for row in rows], rows[-1].keyid if len(rows) == limit else None)

    async def add(self, asked: Asked[Nothing, NewKey]) -> AddedKey:
        """Give a device a further key, or one in place of those that are active; an operator speaks for it."""
        wanted, overlap_s = asked.body, asked.body.overlap_s
        public_key = _public_key(wanted.public_key)

        async def work(connection: Connection, operator: Operator) -> Rotation:
            await operator.require_device(connection, wanted.device)
            place = (connection, operator.actor, operator.tenant, wanted.device, public_key)
            if overlap_s is None:
                return Rotation(await keys.register(*place), [], None)
            return await keys.rotate(*place, overlap_s=overlap_s)

        added = await self._office.act(asked, work)
        until = added.accept_until
        return AddedKey(added.keyid, added.retiring, None if until is None else milliseconds(until))

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

    async def remove(self, asked: Asked[Nothing, Nothing]) -> None:
        """Remove a key that nothing holds: what it signed is `key_unknown` from now on. Its public half stays."""
        keyid = asked.path["keyid"]

        async def work(connection: Connection, operator: Operator) -> None:
            await operator.require_key(connection, keyid)
            window_s = self._office.key_window_s
            await keys.remove(connection, operator.actor, operator.tenant, keyid, window_s=window_s)

        await self._office.act(asked, work)


def _public_key(text: str) -> bytes:
    try:
        return base64url.decode(text)
    except ValueError:
        raise Refused(Reason.REQUEST_INVALID, "publicKey must be in base64url without padding") from None


def _key(row: ListedKey) -> DeviceKey:
    return DeviceKey(
        row.keyid,
        row.device,
        row.state,
        row.age_s,
        milliseconds(row.registered_at),
        milliseconds(row.changed_at),
        None if row.accept_until is None else milliseconds(row.accept_until),
        None if row.last_accepted_at is None else milliseconds(row.last_accepted_at),
        None if row.free_at is None else milliseconds(row.free_at),
        row.obstacles,
    )

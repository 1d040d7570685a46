"""What senders do: `POST /v1/projects/{project}/deliveries`, one or many, and what became of one.

A delivery is sealed before it is answered: what was answered with 200 or 201 is sent, however often the service dies.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from postseal.admin import deliveries
from postseal.admin.actor import Actor
from postseal.correlation import new_correlation_id
from postseal.errors import Refused, Unavailable
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.outbound.outbox import MAX_SEALED, Outbox
from postseal.outbound.wishes import DestinationFull, Sealed, Unsealed, Wish
from postseal.outcomes import Reason
from postseal.postgres.database import Database
from postseal.postgres.mail import ShownDelivery, ShownIntent
from postseal.rules.delivery import SealCode, State
from postseal.settings import MAX_ATTEMPTS
from postseal.verdicts import Refusal
from postseal.web import answers
from postseal.web.calls import Asked, Call, Reception, decode_body
from postseal.web.documents import SCHEMAS, Nothing, TimeMs, milliseconds
from postseal.web.query import Id, IdempotencyKey, read_headers, uuid_in
from postseal.web.refusals import Refusals

DELIVERIES = "/v1/projects/{project}/deliveries"
SENDERS = (Role.SENDER,)
MAX_KIND_CHARACTERS = 63
MAX_DELIVERIES_BYTES = 1024 * 1024

AttemptLimit = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]


class NewDelivery(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """What is to be sent, to which destination; `data` are the members of that kind beside `kind` itself."""

    destination: Id
    kind: Annotated[str, Meta(min_length=1, max_length=MAX_KIND_CHARACTERS)]
    data: dict[str, Any]
    attempt_limit: AttemptLimit | UnsetType = UNSET
    expires_at_ms: TimeMs | UnsetType = UNSET


class KeyedDelivery(NewDelivery, frozen=True, kw_only=True, rename="camel"):
    """One of many, with its own idempotency key."""

    idempotency_key: IdempotencyKey


class NewDeliveries(Struct, frozen=True, forbid_unknown_fields=True):
    """Many at once, for any destinations of the project; one result each."""

    deliveries: Annotated[list[KeyedDelivery], Meta(min_length=1, max_length=MAX_SEALED)]


class KeyOfOne(Struct, frozen=True):
    """What makes one delivery one; with many, each has its own."""

    idempotency_key: IdempotencyKey | UnsetType = field(default=UNSET, name="Idempotency-Key")


class SealedDelivery(Struct, frozen=True, kw_only=True, rename="camel"):
    """A delivery that is sealed, in the state in which it is; `status` is there in the results of many only."""

    status: int | UnsetType = UNSET
    delivery: str
    destination: str
    sequence: int
    event_identity: str
    state: State


class DeliveryResults(Struct, frozen=True):
    """For each delivery, in order, what it would have been answered alone, with its `status`."""

    items: list[
        Annotated[
            Any,
            Meta(extra_json_schema={"anyOf": [{"$ref": f"{SCHEMAS}SealedDelivery"}, {"$ref": f"{SCHEMAS}Problem"}]}),
        ]
    ]


class Why(Struct, frozen=True):
    """Why a delivery was not sent yet: a stable word, and a sentence."""

    code: deliveries.Wait
    sentence: str


class FailedAttempt(Struct, frozen=True, rename="camel"):
    """One attempt that failed."""

    attempt: int
    ended_at_ms: int
    code: str


class Delivery(Struct, frozen=True, kw_only=True, rename="camel"):
    """How a delivery stands. `unsealed` is what an application left as an intent; what it has not yet is null.

    `code` says why it is dead, why its last attempt failed, or why it cannot be sealed.
    """

    delivery: str
    destination: str
    idempotency_key: str
    state: Literal["unsealed", "pending", "delivering", "delivered", "dead", "expired", "cancelled"]
    why: Why | None
    code: str | None
    sequence: int | None
    event_identity: str | None
    attempt: int
    attempt_limit: int | None
    next_attempt_at_ms: int | None
    created_at_ms: int
    expires_at_ms: int | None
    settled_at_ms: int | None
    attempts: list[FailedAttempt]


class DeliveryCalls:
    """Deliveries for one process. `database` is the administrators' part."""

    def __init__(
        self,
        outbox: Outbox,
        database: Database,
        *,
        accepting: Callable[[], bool],
        refusals: Refusals,
    ) -> None:
        self._outbox = outbox
        self._database = database
        self._accepting = accepting
        self._refusals = refusals

    def calls(self, reception: Reception) -> list[Call]:
        """All of them."""
        one = DELIVERIES + "/{delivery}"
        return [
            reception.answer(
                DELIVERIES,
                self.enqueue,
                roles=SENDERS,
                headers=KeyOfOne,
                takes=(NewDelivery, NewDeliveries),
                decode=_decode,
                cap_bytes=MAX_DELIVERIES_BYTES,
                answers={200: (SealedDelivery, DeliveryResults), 201: (SealedDelivery,)},
                reasons=(
                    Reason.IDEMPOTENCY_KEY_MISSING,
                    Reason.PAYLOAD_INVALID,
                    Reason.IDEMPOTENCY_CONFLICT,
                    Reason.DESTINATION_FULL,
                    Reason.SIGNING_UNAVAILABLE,
                ),
            ),
            reception.read(one, self.show, roles=SENDERS, query=Nothing, answer=Delivery),
            reception.order(f"{one}/cancel", self.cancel, roles=SENDERS, reasons=(Reason.CONFLICT,)),
        ]

    async def enqueue(self, asked: Asked[Nothing, NewDelivery | NewDeliveries]) -> tuple[int, Struct]:
        """Send one delivery, or up to 100."""
        project = _own_project(asked)
        if isinstance(asked.body, NewDeliveries):
            wishes = [_wish(wanted, wanted.idempotency_key) for wanted in asked.body.deliveries]
            results = await self._seal(asked.caller, project, wishes)
            return 200, DeliveryResults([self._item(asked, result) for result in results])
        key = read_headers(asked.request, KeyOfOne).idempotency_key
        if key is UNSET:
            raise Refused(Reason.IDEMPOTENCY_KEY_MISSING, "one delivery needs the header Idempotency-Key")
        [result] = await self._seal(asked.caller, project, [_wish(asked.body, key)])
        if isinstance(result, Unsealed):
            raise _refused(result)
        return _status(result), _sealed(result)

    async def show(self, asked: Asked[Nothing, Nothing]) -> Delivery:
        """How a delivery stands: its attempts, and why it was not sent yet."""
        project, delivery, tenant = _own_project(asked), uuid_in(asked.path, "delivery"), asked.caller.tenant
        found = await self._database.transact(
            lambda connection: deliveries.show_in(connection, tenant, project, delivery)
        )
        return shown(found)

    async def cancel(self, asked: Asked[Nothing, Nothing]) -> None:
        """Never send a delivery that waits (any more)."""
        project, delivery, caller = _own_project(asked), uuid_in(asked.path, "delivery"), asked.caller
        await self._database.transact(
            lambda connection: deliveries.cancel(connection, Actor(caller.account), caller.tenant, project, delivery)
        )

    async def _seal(self, caller: VerifiedIdentity, project: str, wishes: list[Wish]) -> list[Sealed | Unsealed]:
        if not self._accepting():
            raise Unavailable("the database has no room for more")
        return await self._outbox.enqueue(caller.tenant, project, wishes, caller.account)

    def _item(self, asked: Asked[Nothing, Any], result: Sealed | Unsealed) -> Struct:
        if isinstance(result, Sealed):
            return _sealed(result, _status(result))
        refusal = Refusal(result.reason, new_correlation_id(), result.detail)
        self._refusals.note(refusal, asked.caller, asked.peer)
        return answers.problem(refusal)


class _Many(Struct, frozen=True):
    deliveries: msgspec.Raw | UnsetType = UNSET


def _decode(raw: bytes) -> NewDelivery | NewDeliveries:
    """Whichever of both it is: the many have the member `deliveries`."""
    if decode_body(raw, _Many).deliveries is UNSET:
        return decode_body(raw, NewDelivery)
    return decode_body(raw, NewDeliveries)


def _own_project(asked: Asked[Any, Any]) -> str:
    project = asked.path["project"]
    if project not in asked.caller.projects:
        raise Refused(Reason.NOT_FOUND, "there is no such thing, or it is not the caller's")
    return project


def _wish(wanted: NewDelivery, idempotency_key: str) -> Wish:
    kind = wanted.data.get("kind", wanted.kind)
    if kind != wanted.kind:
        raise Refused(Reason.REQUEST_INVALID, "data.kind is another one than kind")
    return Wish(
        destination=wanted.destination,
        data=wanted.data | {"kind": kind},
        idempotency_key=idempotency_key,
        attempt_limit=None if wanted.attempt_limit is UNSET else wanted.attempt_limit,
        expires_at_ms=None if wanted.expires_at_ms is UNSET else wanted.expires_at_ms,
    )


def _refused(unsealed: Unsealed) -> Refused:
    if unsealed.code is SealCode.DESTINATION_FULL and unsealed.max_pending is not None:
        return DestinationFull(unsealed.detail, unsealed.max_pending)
    return Refused(unsealed.reason, unsealed.detail)


def _status(sealed: Sealed) -> int:
    return 201 if sealed.new else 200


def _sealed(sealed: Sealed, status: int | UnsetType = UNSET) -> SealedDelivery:
    return SealedDelivery(
        status=status,
        delivery=str(sealed.delivery),
        destination=sealed.destination,
        sequence=sealed.sequence,
        event_identity=sealed.event_identity.hex(),
        state=sealed.state,
    )


def shown(found: ShownDelivery | ShownIntent) -> Delivery:
    """A delivery, or the intent of one, as it is shown."""
    reason = deliveries.why(found)
    why = None if reason is None else Why(reason.code, reason.sentence)
    expires_at_ms = None if found.expires_at is None else milliseconds(found.expires_at)
    if isinstance(found, ShownIntent):
        return Delivery(
            delivery=str(found.delivery),
            destination=found.destination,
            idempotency_key=found.idempotency_key,
            state="unsealed",
            why=why,
            code=found.code,
            sequence=None,
            event_identity=None,
            attempt=0,
            attempt_limit=None,
            next_attempt_at_ms=None,
            created_at_ms=milliseconds(found.created_at),
            expires_at_ms=expires_at_ms,
            settled_at_ms=None,
            attempts=[],
        )
    return Delivery(
        delivery=str(found.delivery),
        destination=found.destination,
        idempotency_key=found.idempotency_key,
        state=found.state.value,
        why=why,
        code=found.code,
        sequence=found.sequence,
        event_identity=found.event_identity.hex(),
        attempt=found.attempt,
        attempt_limit=found.attempt_limit,
        next_attempt_at_ms=None if found.due_at is None else milliseconds(found.due_at),
        created_at_ms=milliseconds(found.sealed_at),
        expires_at_ms=expires_at_ms,
        settled_at_ms=None if found.settled_at is None else milliseconds(found.settled_at),
        attempts=[FailedAttempt(each.attempt, milliseconds(each.ended_at), each.code) for each in found.attempts],
    )

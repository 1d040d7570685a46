"""What the control plane sends: wishes become sealed deliveries, in the order of their stream (protocol section 7).

In one transaction, in this order:

1. lock the destinations, in stream order; read the tenant's active signing key, and what each idempotency key brought
   before
2. judge one wish after the other (`_Sealing`): a key that comes again with the same content is the delivery that it
   was, whatever has become of that, and takes no number
3. a new one takes the next sequence of its destination and is signed; where it cannot be signed the number stays free
4. write all that is new, with an audit event each

Whoever asks over HTTP is answered after that commit. What an application left as an intent in a transaction of its own,
the sealer (`sealer.py`) seals a moment later in the same way.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog
from msgspec import Struct
from structlog.typing import FilteringBoundLogger

from postseal.correlation import new_correlation_id
from postseal.envelope import canonical, dsse, ed25519, v1
from postseal.envelope.kinds import Kinds
from postseal.errors import Refused
from postseal.outcomes import Reason
from postseal.postgres.database import Connection, Database
from postseal.postgres.sealing import (
    Found,
    Locked,
    LockedDestination,
    SealedBefore,
    SealedNames,
    SealedRow,
    SigningKey,
    active_signing_key,
    find_sealed,
    insert_sealed,
    lock_destinations,
)
from postseal.rules.delivery import SealCode, State
from postseal.settings import MAX_ATTEMPTS
from postseal.signing import SigningFailed, SigningKeys

PRODUCER: Final = "controlplane"
MAX_SEALED = 100
"""Of one transaction."""
LATEST_MS: Final = 4_102_444_800_000
"""The year 2100: no time on the wire lies behind it."""
SIGN_S = 2.0
"""How long one signature may take, while the destination's lock is held."""

ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_IDEMPOTENCY_KEY = re.compile(r"[A-Za-z0-9._:-]{8,128}", re.ASCII)

_log: FilteringBoundLogger = structlog.get_logger("postseal.outbox")

_REASON_OF_CODE = {
    SealCode.DESTINATION_UNKNOWN: Reason.NOT_FOUND,
    SealCode.DESTINATION_FULL: Reason.DESTINATION_FULL,
    SealCode.IDEMPOTENCY_CONFLICT: Reason.IDEMPOTENCY_CONFLICT,
    SealCode.PAYLOAD_INVALID: Reason.PAYLOAD_INVALID,
    SealCode.SIGNING_KEY_MISSING: Reason.SIGNING_UNAVAILABLE,
    SealCode.SIGNING_FAILED: Reason.SIGNING_UNAVAILABLE,
    SealCode.EXPIRED: Reason.REQUEST_INVALID,
}


def new_id() -> UUID:
    """A new UUID version 7, for a delivery or an event: those of one time lie beside each other in an index."""
    return UUID(bytes=new_correlation_id())


class Intent(Struct, frozen=True, kw_only=True):
    """What is to be sent. Its `repr` does not show the data.

    `data` is one of the payload's kinds, its member `kind` included. `idempotency_key` makes it one. Of `attempt_limit`
    (1 to 100) and `expires_at_ms` (since 1970) None leaves the choice to the service, which lets nothing expire.
    """

    destination: str
    data: dict[str, Any]
    idempotency_key: str
    attempt_limit: int | None = None
    expires_at_ms: int | None = None
    delivery: UUID = msgspec.field(default_factory=new_id)

    def __repr__(self) -> str:
        return f"Intent({self.delivery})"


class Wish(Struct, frozen=True):
    """An intent, for which project it is, and whom the trail names."""

    project: str
    account: str
    intent: Intent


class Sealed(Struct, frozen=True):
    """A delivery that is sealed for certain, in the state in which it is. Not `new`: its key had come before."""

    delivery: UUID
    destination: str
    sequence: int
    event_identity: bytes
    state: State
    new: bool


class Unsealed(Struct, frozen=True):
    """Why an intent was not sealed; `detail` is one sentence for people, `max_pending` that of a full destination."""

    delivery: UUID
    code: SealCode
    detail: str
    max_pending: int | None = None

    @property
    def reason(self) -> Reason:
        """The same in the words of an answer."""
        return _REASON_OF_CODE[self.code]


class DestinationFull(Refused):
    """Refused for want of room; `max_pending` is how much there is."""

    def __init__(self, detail: str, max_pending: int) -> None:
        super().__init__(Reason.DESTINATION_FULL, detail)
        self.max_pending = max_pending


def content_hash(intent: Intent) -> bytes:
    """The 32 bytes by which a key that comes again is known to bring the same. ValueError if that cannot be sent."""
    content = {"destination": intent.destination, "kind": intent.data.get("kind"), "data": intent.data}
    return hashlib.sha256(canonical.encode(content)).digest()


class Outbox:
    """Seals for a deployment. `database` is the part that delivers; `told` hears what is sealed for certain."""

    def __init__(
        self,
        database: Database,
        keys: SigningKeys,
        *,
        kinds: Kinds,
        attempt_limit: int,
        told: Callable[[str, Sequence[Sealed]], None] = lambda _tenant, _sealed: None,
    ) -> None:
        self._database = database
        self._told = told
        self.keys = keys
        self.kinds = kinds
        self.attempt_limit = attempt_limit

    async def enqueue(
        self, tenant: str, project: str, intents: Sequence[Intent], account: str
    ) -> list[Sealed | Unsealed]:
        """Seal 1 to 100 intents in one transaction; one result each, in order. Project and account are verified ones.

        One that is not sealed keeps none of the others from it. Raises Unavailable: then nothing is known to be sealed,
        and the same call may be made again.
        """
        wishes = [Wish(project, account, intent) for intent in intents]
        results = await self._database.transact(lambda connection: self.seal(connection, tenant, wishes))
        self._told(tenant, [each for each in results if isinstance(each, Sealed) and each.new])
        return results

    async def seal(self, connection: Connection, tenant: str, wishes: Sequence[Wish]) -> list[Sealed | Unsealed]:
        """The same inside the caller's transaction: what is sealed is so once that has committed."""
        if not 1 <= len(wishes) <= MAX_SEALED:
            raise ValueError(f"1 to {MAX_SEALED} are sealed at once")
        names = {(wish.project, wish.intent.destination) for wish in wishes if ID.fullmatch(wish.intent.destination)}
        locked = await lock_destinations(connection, tenant, names)
        key = await active_signing_key(connection, tenant)
        sealing = _Sealing(self, tenant, locked, key, await _found(connection, tenant, locked, wishes))
        results = [await sealing.judge(wish) for wish in wishes]
        if sealing.rows:
            await insert_sealed(connection, tenant, sealing.rows)
        return results


async def _found(connection: Connection, tenant: str, locked: Locked, wishes: Sequence[Wish]) -> Found:
    names = [
        SealedNames(destination.stream, wish.intent.idempotency_key, wish.intent.delivery, wish.intent.delivery)
        for wish in wishes
        if (destination := locked.destinations.get((wish.project, wish.intent.destination)))
        and _IDEMPOTENCY_KEY.fullmatch(wish.intent.idempotency_key)
    ]
    return await find_sealed(connection, tenant, names) if names else Found({}, {}, {})


@dataclass(slots=True)
class _Sealing:
    """One transaction's steps 2 and 3; `rows` is what is to be written."""

    outbox: Outbox
    tenant: str
    locked: Locked
    key: SigningKey | None
    found: Found
    rows: list[SealedRow] = field(default_factory=list[SealedRow])
    _given_out: dict[int, int] = field(default_factory=dict[int, int])
    """How many numbers of each stream."""
    _failed: SigningFailed | None = None

    async def judge(self, wish: Wish) -> Sealed | Unsealed:
        """What becomes of one wish, after the earlier ones. The first that holds decides."""
        intent = wish.intent
        destination = self.locked.destinations.get((wish.project, intent.destination))
        if destination is None:
            return _unsealed(intent, SealCode.DESTINATION_UNKNOWN, "the project has no such destination")
        try:
            content = content_hash(_checked(intent))
        except ValueError as error:
            return _unsealed(intent, SealCode.PAYLOAD_INVALID, str(error))
        before = self.found.by_key.get((destination.stream, intent.idempotency_key))
        if before is not None:
            return self._known(wish, before, content)
        if intent.delivery in self.found.by_delivery:
            return _unsealed(intent, SealCode.IDEMPOTENCY_CONFLICT, "another delivery has this id")
        return await self._new(wish, destination, content)

    def _known(self, wish: Wish, before: SealedBefore, content: bytes) -> Sealed | Unsealed:
        if before.content_hash != content:
            detail = "this idempotency key was used for other content"
            return _unsealed(wish.intent, SealCode.IDEMPOTENCY_CONFLICT, detail)
        return _sealed(wish, before, new=False)

    async def _new(self, wish: Wish, destination: LockedDestination, content: bytes) -> Sealed | Unsealed:
        intent = wish.intent
        given_out = self._given_out.get(destination.stream, 0)
        sequence, event_id = destination.highest + given_out + 1, new_id()
        try:
            payload = v1.encode_payload(self._payload(wish, event_id, sequence), self.outbox.kinds)
        except ValueError as error:
            return _unsealed(intent, SealCode.PAYLOAD_INVALID, str(error))
        if intent.expires_at_ms is not None and intent.expires_at_ms <= self.locked.now_ms:
            return _unsealed(intent, SealCode.EXPIRED, "its expiry has passed")
        if destination.pending + given_out >= destination.max_pending:
            detail = f"{destination.max_pending} deliveries are pending for this destination"
            return Unsealed(intent.delivery, SealCode.DESTINATION_FULL, detail, destination.max_pending)
        try:
            keyid, signature = await self._sign(payload)
        except SigningFailed as failed:
            return _unsealed(intent, failed.code, "the tenant's signing key is missing or cannot be used")
        identity = hashlib.sha256(dsse.pae(dsse.PAYLOAD_TYPE, payload)).digest()
        self._given_out[destination.stream] = given_out + 1
        self.rows.append(
            SealedRow(
                destination.stream,
                sequence,
                intent.delivery,
                event_id,
                intent.idempotency_key,
                content,
                identity,
                keyid,
                payload,
                signature,
                destination.lane,
                intent.attempt_limit or self.outbox.attempt_limit,
                intent.expires_at_ms,
                wish.project,
                wish.account,
                new_id(),
            )
        )
        return _sealed(wish, self._remember(self.rows[-1]), new=True)

    def _remember(self, row: SealedRow) -> SealedBefore:
        """Let the wishes behind this one find what it brought."""
        sealed = SealedBefore(
            row.stream,
            row.sequence,
            row.delivery,
            row.event_id,
            row.idempotency_key,
            row.content_hash,
            row.event_identity,
            State.PENDING,
        )
        self.found.by_key[row.stream, row.idempotency_key] = sealed
        self.found.by_delivery[row.delivery] = sealed
        return sealed

    def _payload(self, wish: Wish, event_id: UUID, sequence: int) -> v1.DeploymentPayload:
        # Its bytes are held against the built-in kinds too.
        return v1.DeploymentPayload(
            protocol=v1.PROTOCOL,
            schema_version=v1.SCHEMA_VERSION,
            route=v1.Route(
                tenant=self.tenant, project=wish.project, producer=PRODUCER, audience=wish.intent.destination
            ),
            event_id=event_id,
            idempotency_key=wish.intent.idempotency_key,
            sequence=sequence,
            issued_at_ms=self.locked.now_ms,
            data=wish.intent.data,
        )

    async def _sign(self, payload: bytes) -> tuple[str, bytes]:
        """Key id and signature. What failed once is not tried again in this transaction, which holds locks."""
        if self._failed is not None:
            raise self._failed
        try:
            return await self._sign_with(self.key, dsse.pae(dsse.PAYLOAD_TYPE, payload))
        except SigningFailed as failed:
            self._failed = failed
            _log.warning("not_signed", tenant=self.tenant, code=failed.code.value, why=str(failed))
            raise

    async def _sign_with(self, key: SigningKey | None, signed_bytes: bytes) -> tuple[str, bytes]:
        if key is None:
            raise SigningFailed(SealCode.SIGNING_KEY_MISSING, "the tenant has no active signing key")
        try:
            async with asyncio.timeout(SIGN_S):
                signature = await self.outbox.keys.sign(self.tenant, key.keyid, signed_bytes)
        except TimeoutError:
            raise SigningFailed(SealCode.SIGNING_FAILED, f"no signature within {SIGN_S:g} s") from None
        # What is sealed stays as it is for ever: a wrong signature would be a hole that nothing fills.
        if not ed25519.verify(key.public_key, signed_bytes, signature):
            raise SigningFailed(SealCode.SIGNING_FAILED, "the signature is not that of the registered key")
        return key.keyid, signature


def _checked(intent: Intent) -> Intent:
    if not _IDEMPOTENCY_KEY.fullmatch(intent.idempotency_key):
        raise ValueError("the idempotency key breaks its rule")
    if intent.attempt_limit is not None and not 1 <= intent.attempt_limit <= MAX_ATTEMPTS:
        raise ValueError(f"an attempt limit is 1 to {MAX_ATTEMPTS}")
    if intent.expires_at_ms is not None and not 0 <= intent.expires_at_ms <= LATEST_MS:
        raise ValueError("the expiry lies outside of 1970 to 2100")
    return intent


def _sealed(wish: Wish, sealed: SealedBefore, *, new: bool) -> Sealed:
    destination = wish.intent.destination
    return Sealed(sealed.delivery, destination, sealed.sequence, sealed.event_identity, sealed.state, new)


def _unsealed(intent: Intent, code: SealCode, detail: str) -> Unsealed:
    return Unsealed(intent.delivery, code, detail)

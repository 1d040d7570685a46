"""What the control plane sends: wishes become sealed deliveries, in the order of their stream (protocol section 7).

In one transaction, in this order:

1. lock the destinations, in stream order; read the tenant's active signing key, and what each idempotency key brought
   before
2. judge one wish after the other (`_Sealing`): a key that comes again with the same content is the delivery that it
   was, whatever has become of that, and takes no number
3. a new one takes the next sequence of its destination and is signed (`signer.py`); where it cannot be signed the
   number stays free
4. write all that is new, with an audit event each

Whoever asks over HTTP is answered after that commit. What an application left as an intent in a transaction of its own,
the sealer (`sealer.py`) seals a moment later in the same way.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from postseal.envelope import dsse, v1
from postseal.envelope.kinds import Kinds
from postseal.envelope.names import ID, IDEMPOTENCY_KEY
from postseal.outbound.signer import SIGNING_S, OutOfTime, Signer
from postseal.outbound.wishes import (
    PRODUCER,
    OwnedWish,
    Sealed,
    Unsealed,
    Wish,
    check_options,
    content_hash,
    new_id,
)
from postseal.postgres.database import Connection, Database
from postseal.postgres.sealed import Found, SealedBefore, SealedNames, find_sealed
from postseal.postgres.sealing import Locked, LockedDestination, SealedRow, insert_sealed, lock_destinations
from postseal.rules.delivery import SealCode, State
from postseal.signing import SigningFailed, SigningKeys

MAX_SEALED = 100
"""Of one transaction."""


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

    async def enqueue(self, tenant: str, project: str, wishes: Sequence[Wish], account: str) -> list[Sealed | Unsealed]:
        """Seal 1 to 100 wishes in one transaction; one result each, in order. Project and account are verified ones.

        One that is not sealed keeps none of the others from it. Raises Unavailable: then nothing is known to be sealed,
        and the same call may be made again.
        """
        owned = [OwnedWish(project, account, wish) for wish in wishes]
        results = await self._database.transact(lambda connection: self.seal(connection, tenant, owned), tenant=tenant)
        self.tell(tenant, [each for each in results if isinstance(each, Sealed) and each.new])
        return results

    async def seal(
        self, connection: Connection, tenant: str, wishes: Sequence[OwnedWish], *, signing_s: float = SIGNING_S
    ) -> list[Sealed | Unsealed]:
        """The same inside the caller's transaction: what is sealed is so once that has committed.

        Signatures are begun for `signing_s`; wishes that have none by then are not tried.
        """
        if not 1 <= len(wishes) <= MAX_SEALED:
            raise ValueError(f"1 to {MAX_SEALED} are sealed at once")
        names = {(owned.project, owned.wish.destination) for owned in wishes if ID.fullmatch(owned.wish.destination)}
        locked = await lock_destinations(connection, tenant, names)
        signer = Signer(self.keys, tenant, locked.signing_key, budget_s=signing_s)
        sealing = _Sealing(self, tenant, locked, signer, await _found(connection, tenant, locked, wishes))
        results = [await sealing.judge(owned) for owned in wishes]
        if sealing.rows:
            await insert_sealed(connection, tenant, sealing.rows)
        return results

    def tell(self, tenant: str, new: Sequence[Sealed]) -> None:
        """Wake whoever delivers what is new, once it is sealed for certain."""
        self._told(tenant, new)


async def _found(connection: Connection, tenant: str, locked: Locked, wishes: Sequence[OwnedWish]) -> Found:
    names = [
        SealedNames(destination.stream, owned.wish.idempotency_key, owned.wish.delivery)
        for owned in wishes
        if (destination := locked.destinations.get((owned.project, owned.wish.destination)))
        and IDEMPOTENCY_KEY.fullmatch(owned.wish.idempotency_key)
    ]
    return await find_sealed(connection, tenant, names) if names else Found({}, {}, {})


@dataclass(slots=True)
class _Sealing:
    """One transaction's steps 2 and 3; `rows` is what is to be written."""

    outbox: Outbox
    tenant: str
    locked: Locked
    signer: Signer
    found: Found
    rows: list[SealedRow] = field(default_factory=list[SealedRow])
    _given_out: dict[int, int] = field(default_factory=dict[int, int])
    """How many numbers of each stream."""

    async def judge(self, owned: OwnedWish) -> Sealed | Unsealed:
        """What becomes of one wish, after the earlier ones. The first that holds decides."""
        wish = owned.wish
        destination = self.locked.destinations.get((owned.project, wish.destination))
        if destination is None:
            return _unsealed(wish, SealCode.DESTINATION_UNKNOWN, "the project has no such destination")
        try:
            content = content_hash(_checked(wish))
        except ValueError as error:
            return _unsealed(wish, SealCode.PAYLOAD_INVALID, str(error))
        before = self.found.by_key.get((destination.stream, wish.idempotency_key))
        if before is not None:
            return _known(wish, before, content)
        if wish.delivery in self.found.by_delivery:
            return _unsealed(wish, SealCode.IDEMPOTENCY_CONFLICT, "another delivery has this id")
        return await self._new(owned, destination, content)

    async def _new(self, owned: OwnedWish, destination: LockedDestination, content: bytes) -> Sealed | Unsealed:
        wish = owned.wish
        given_out = self._given_out.get(destination.stream, 0)
        sequence, event_id = destination.highest + given_out + 1, new_id()
        try:
            payload = v1.encode_payload(self._payload(owned, event_id, sequence), self.outbox.kinds)
        except ValueError as error:
            return _unsealed(wish, SealCode.PAYLOAD_INVALID, str(error))
        if wish.expires_at_ms is not None and wish.expires_at_ms <= self.locked.now_ms:
            return _unsealed(wish, SealCode.EXPIRED, "its expiry has passed")
        if destination.pending + given_out >= destination.max_pending:
            detail = f"{destination.max_pending} deliveries are pending for this destination"
            return Unsealed(wish.delivery, SealCode.DESTINATION_FULL, detail, destination.max_pending)
        signed_bytes = dsse.pae(dsse.PAYLOAD_TYPE, payload)
        try:
            keyid, signature = await self.signer.sign(signed_bytes)
        except OutOfTime as late:
            return Unsealed(wish.delivery, late.code, "the tenant's signing key is too slow for so many", tried=False)
        except SigningFailed as failed:
            return _unsealed(wish, failed.code, "the tenant's signing key is missing or cannot be used")
        self._given_out[destination.stream] = given_out + 1
        row = SealedRow(
            destination.stream,
            sequence,
            wish.delivery,
            event_id,
            wish.idempotency_key,
            content,
            hashlib.sha256(signed_bytes).digest(),
            keyid,
            payload,
            signature,
            destination.lane,
            wish.attempt_limit or self.outbox.attempt_limit,
            wish.expires_at_ms,
            owned.project,
            owned.account,
            new_id(),
        )
        self.rows.append(row)
        return _sealed(wish, self._remember(row), new=True)

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

    def _payload(self, owned: OwnedWish, event_id: UUID, sequence: int) -> v1.DeploymentPayload:
        # Its bytes are held against the built-in kinds too.
        audience = owned.wish.destination
        return v1.DeploymentPayload(
            protocol=v1.PROTOCOL,
            schema_version=v1.SCHEMA_VERSION,
            route=v1.Route(tenant=self.tenant, project=owned.project, producer=PRODUCER, audience=audience),
            event_id=event_id,
            idempotency_key=owned.wish.idempotency_key,
            sequence=sequence,
            issued_at_ms=self.locked.now_ms,
            data=owned.wish.data,
        )


def _known(wish: Wish, before: SealedBefore, content: bytes) -> Sealed | Unsealed:
    if before.content_hash != content:
        return _unsealed(wish, SealCode.IDEMPOTENCY_CONFLICT, "this idempotency key was used for other content")
    return _sealed(wish, before, new=False)


def _checked(wish: Wish) -> Wish:
    if not IDEMPOTENCY_KEY.fullmatch(wish.idempotency_key):
        raise ValueError("the idempotency key breaks its rule")
    check_options(wish.attempt_limit, wish.expires_at_ms)
    return wish


def _sealed(wish: Wish, sealed: SealedBefore, *, new: bool) -> Sealed:
    return Sealed(sealed.delivery, wish.destination, sealed.sequence, sealed.event_identity, sealed.state, new)


def _unsealed(wish: Wish, code: SealCode, detail: str) -> Unsealed:
    return Unsealed(wish.delivery, code, detail)

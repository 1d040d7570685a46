"""Envelopes that an application has signed itself, taken into the outbox as they are (protocol section 7, "Outbox").

The first check that fails decides:

0. attempt limit and expiry lie in their bounds                else request_invalid
1. the outer form                                              else envelope_malformed
2. the route is the caller's: tenant, project, controlplane    else route_mismatch
   its audience, event id, idempotency key and sequence        else identity_out_of_bounds
3. the destination is there                                    else not_found
4. a signing key of the tenant that may sign now               else key_unknown
   and its signature                                           else signature_invalid
5. the whole payload                                           else schema_version_unsupported, payload_invalid
6. under the destination's lock: known already is answered as it is; event_conflict, idempotency_conflict; exactly the
   next sequence                                               else sequence_conflict
   then the expiry and the room that there is                  else request_invalid, destination_full
"""

from uuid import UUID

from postseal.envelope import dsse, ed25519, v1
from postseal.envelope.dsse import Envelope
from postseal.envelope.names import ID
from postseal.envelope.v1 import Identities
from postseal.errors import Refused
from postseal.outbound.outbox import Outbox
from postseal.outbound.wishes import PRODUCER, DestinationFull, Sealed, check_options, new_id
from postseal.outcomes import Reason
from postseal.postgres.database import Connection, Database
from postseal.postgres.sealed import SealedBefore, SealedNames, find_sealed
from postseal.postgres.sealing import LockedDestination, SealedRow, insert_sealed, lock_destinations
from postseal.postgres.signing_keys import list_signing
from postseal.rules.delivery import State


async def enqueue_signed(
    database: Database,
    outbox: Outbox,
    *,
    tenant: str,
    project: str,
    account: str,
    body: bytes,
    attempt_limit: int | None = None,
    expires_at_ms: int | None = None,
) -> Sealed:
    """Take one envelope; tenant, project and account are verified ones. Raises Refused and Unavailable.

    Of `attempt_limit` (1 to 100) and `expires_at_ms` (since 1970) None leaves the choice to the service.
    """
    try:
        check_options(attempt_limit, expires_at_ms)
    except ValueError as error:
        raise Refused(Reason.REQUEST_INVALID, str(error)) from None
    envelope = dsse.unwrap(body)
    claims = v1.read_claims(envelope.payload)
    route = claims.route()
    if (route.tenant, route.project, route.producer) != (tenant, project, PRODUCER):
        raise Refused(Reason.ROUTE_MISMATCH, f"the route is not {tenant}, {project}, {PRODUCER}")
    audience = claims.members["route"].get("audience")
    if not isinstance(audience, str) or not ID.fullmatch(audience):
        raise Refused(Reason.IDENTITY_OUT_OF_BOUNDS, "route.audience is no id")
    names = claims.identities()

    async def work(connection: Connection) -> Sealed:
        locked = await lock_destinations(connection, tenant, {(project, audience)})
        destination = locked.destinations.get((project, audience))
        if destination is None:
            raise Refused(Reason.NOT_FOUND, "the project has no such destination")
        await _verify(connection, tenant, envelope)
        v1.open_delivery(envelope.payload, outbox.kinds)
        delivery = new_id()
        known = await _known(connection, tenant, destination, names, envelope, delivery)
        if known is not None:
            return _sealed(audience, known, new=False)
        _require_next(destination, names.sequence)
        if expires_at_ms is not None and expires_at_ms <= locked.now_ms:
            raise Refused(Reason.REQUEST_INVALID, "its expiry has passed")
        row = SealedRow(
            destination.stream,
            names.sequence,
            delivery,
            names.event_id,
            names.idempotency_key,
            envelope.identity,
            envelope.identity,
            envelope.keyid,
            envelope.payload,
            envelope.signature,
            destination.lane,
            attempt_limit or outbox.attempt_limit,
            expires_at_ms,
            project,
            account,
            new_id(),
        )
        await insert_sealed(connection, tenant, [row])
        return Sealed(delivery, audience, row.sequence, row.event_identity, State.PENDING, new=True)

    sealed = await database.transact(work, tenant=tenant)
    if sealed.new:
        outbox.tell(tenant, [sealed])
    return sealed


async def _verify(connection: Connection, tenant: str, envelope: Envelope) -> None:
    """Step 4, with the keys as they are under the destination's lock."""
    keys = {key.keyid: key.public_key for key in await list_signing(connection, tenant)}
    public_key = keys.get(envelope.keyid)
    if public_key is None:
        raise Refused(Reason.KEY_UNKNOWN, "it is no signing key of the tenant's that may sign now")
    if not ed25519.verify(public_key, envelope.signed_bytes, envelope.signature):
        raise Refused(Reason.SIGNATURE_INVALID, "the signature does not hold")


async def _known(
    connection: Connection,
    tenant: str,
    destination: LockedDestination,
    names: Identities,
    envelope: Envelope,
    delivery: UUID,
) -> SealedBefore | None:
    """The same envelope, if it was taken before. Refused where its event id or key was used for another one."""
    asked = SealedNames(destination.stream, names.idempotency_key, delivery, names.event_id)
    found = await find_sealed(connection, tenant, [asked])
    by_event = found.by_event.get((destination.stream, names.event_id))
    if by_event is not None and by_event.event_identity != envelope.identity:
        raise Refused(Reason.EVENT_CONFLICT, "this event id was used for another event")
    by_key = found.by_key.get((destination.stream, names.idempotency_key))
    if by_key is not None and by_key.event_identity != envelope.identity:
        raise Refused(Reason.IDEMPOTENCY_CONFLICT, "this idempotency key was used for another event")
    return by_key


def _require_next(destination: LockedDestination, sequence: int) -> None:
    if sequence != destination.highest + 1:
        raise Refused(Reason.SEQUENCE_CONFLICT, f"the next sequence is {destination.highest + 1}")
    if destination.pending >= destination.max_pending:
        detail = f"{destination.max_pending} deliveries are pending for this destination"
        raise DestinationFull(detail, destination.max_pending)


def _sealed(audience: str, before: SealedBefore, *, new: bool) -> Sealed:
    return Sealed(before.delivery, audience, before.sequence, before.event_identity, before.state, new)

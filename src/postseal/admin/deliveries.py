"""One delivery: shown, with why it was not sent yet, and cancelled while it waits; and the intents that are not sealed.

Senders show and cancel over HTTP within their projects, administrators at the command line.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from uuid import UUID

from postseal.admin.actor import Actor
from postseal.admin.names import require_code, require_projects, require_tenant
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import mail
from postseal.postgres.mail import Cancelled, ShownDelivery, ShownIntent
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import SealCode, State


class Wait(StrEnum):
    """Why a delivery was not sent yet: stable words."""

    NOT_SEALED = "not_sealed"
    SEALING_FAILED = "sealing_failed"
    SEALING_GIVEN_UP = "sealing_given_up"
    DESTINATION_DISABLED = "destination_disabled"
    BACKING_OFF = "backing_off"
    WAITS_FOR_DEVICE = "waits_for_device"
    WAITS_FOR_TURN = "waits_for_turn"
    BEING_DELIVERED = "being_delivered"


@dataclass(frozen=True, slots=True)
class Why:
    """A stable word, and the same in one sentence."""

    code: Wait
    sentence: str


_DISABLED = {
    "operator": "by an operator",
    "gone": "because it answered that it is gone",
    "retired": "for ever because its device was retired",
}

_SEALING = {
    SealCode.DESTINATION_UNKNOWN: "its project has no such destination",
    SealCode.DESTINATION_FULL: "as much as may be is pending for its destination",
    SealCode.IDEMPOTENCY_CONFLICT: "its idempotency key was used for other content",
    SealCode.PAYLOAD_INVALID: "its data is not valid",
    SealCode.SIGNING_KEY_MISSING: "the tenant has no signing key, or its private half is not there",
    SealCode.SIGNING_FAILED: "the tenant's signing key cannot be used",
    SealCode.EXPIRED: "its expiry had passed before it was sealed",
}


async def show(connection: Connection, tenant: str, delivery: UUID) -> ShownDelivery | ShownIntent:
    """A delivery by its id, or the intent that is not sealed under it. AdminError: no such tenant or delivery."""
    await require_tenant(connection, tenant)
    found = await mail.show(connection, tenant, delivery) or await mail.show_intent(connection, tenant, delivery)
    if found is None:
        raise _unknown(tenant)
    return found


async def show_in(connection: Connection, tenant: str, project: str, delivery: UUID) -> ShownDelivery | ShownIntent:
    """The same, unless it is another project's: then there is none."""
    found = await show(connection, tenant, delivery)
    if found.project != project:
        raise _unknown(tenant)
    return found


async def list_intents(
    connection: Connection, tenant: str, project: str, *, code: str | None, limit: int
) -> list[ShownIntent]:
    """At most `limit` intents of a project that are not sealed, oldest first.

    AdminError: no such tenant, project or code.
    """
    await require_projects(connection, tenant, [project])
    require_code(code, SealCode)
    return await mail.list_intents(connection, tenant, project, code=code, limit=limit)


async def cancel(connection: Connection, actor: Actor, tenant: str, project: str, delivery: UUID) -> Cancelled:
    """End a delivery or an intent that waits, so that it is never sent (any more); returns how it ended.

    AdminError `not_found`: no such tenant, project or delivery. `conflict`: it is out, so that nobody can take it back,
    or has ended otherwise. One that was cancelled before is cancelled.
    """
    await require_projects(connection, tenant, [project])
    found = await mail.show(connection, tenant, delivery)
    if found is not None and found.project == project and found.state is State.CANCELLED:
        return Cancelled.CANCELLED
    ended = await mail.cancel(connection, tenant, project, delivery)
    match ended:
        case Cancelled.UNKNOWN:
            raise _unknown(tenant)
        case Cancelled.DELIVERING:
            raise AdminError(Reason.CONFLICT, "it is being delivered: nobody can take it back")
        case Cancelled.SETTLED:
            found = await mail.show(connection, tenant, delivery)
            raise AdminError(Reason.CONFLICT, f"it is {'ended' if found is None else found.state} already")
        case Cancelled.CANCELLED | Cancelled.INTENT_CANCELLED | Cancelled.EXPIRED:
            detail = {"delivery": str(delivery), "ended": str(ended)}
            await actor.acted(connection, "delivery.cancel", tenant=tenant, project=project, **detail)
    return ended


def why(found: ShownDelivery | ShownIntent, now: datetime | None = None) -> Why | None:
    """Why it was not sent yet; None once it has ended. `now` is advice, as all of this is."""
    if isinstance(found, ShownIntent):
        return _why_unsealed(found)
    if found.state is State.DELIVERING:
        return Why(Wait.BEING_DELIVERED, f"Attempt {found.attempt} is under way.")
    if found.state is not State.PENDING:
        return None
    if found.destination_disabled_at is not None:
        who = _DISABLED[found.destination_disabled_reason or "operator"]
        return Why(Wait.DESTINATION_DISABLED, f"Its destination was disabled {who}, and its mail is held.")
    # What was never tried is due at once: it is later only by a clock that is behind the database's.
    if found.code is not None and found.due_at is not None and found.due_at > (now or datetime.now(UTC)):
        at = found.due_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        return Why(Wait.BACKING_OFF, f"Attempt {found.attempt} failed ({found.code}); the next one is due at {at}.")
    if found.mode == "pull":
        return Why(Wait.WAITS_FOR_DEVICE, "It waits for its device to pull it.")
    return Why(Wait.WAITS_FOR_TURN, "It waits for its turn.")


def _why_unsealed(intent: ShownIntent) -> Why:
    if intent.code is None:
        return Why(Wait.NOT_SEALED, "It is about to be sealed.")
    why = f"{_SEALING[SealCode(intent.code)]} ({intent.code})"
    if intent.due_at is None:
        return Why(Wait.SEALING_GIVEN_UP, f"It is never sealed: {why}. It stays until it is cancelled.")
    return Why(Wait.SEALING_FAILED, f"It cannot be sealed: {why}.")


def _unknown(tenant: str) -> AdminError:
    return AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no such delivery")

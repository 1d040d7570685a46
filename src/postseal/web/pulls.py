"""What devices do with their own deliveries: `POST /v1/deliveries/claim`, and `/settle`, behind leases and fences.

A claim can wait. What is not settled until the lease ends is due again, so an answer that gets lost costs an attempt.
"""

from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from postseal.door import Door
from postseal.envelope import dsse
from postseal.identity.verified import Role
from postseal.outbound.pulling import Pulling, PullSettle, PullVerdict
from postseal.outcomes import Reason
from postseal.postgres.deliveries import MAX_CLAIMED, Lease
from postseal.web.calls import Asked, Call, Reception, decode_body
from postseal.web.documents import SCHEMAS, Nothing, milliseconds
from postseal.web.query import Id, Uuid

DEVICES = (Role.DEVICE,)
MAX_WAIT_S = 30
MAX_RETRY_AFTER_S = 86_400
MAX_SETTLE_BYTES = 64 * 1024
MAX_ATTEMPT = 2**31 - 1

Sequence = Annotated[int, Meta(ge=1, le=2**53 - 1)]


class Claim(Struct, frozen=True, forbid_unknown_fields=True):
    """How many deliveries at most, and for how many seconds to wait for the first."""

    limit: Annotated[int, Meta(ge=1, le=MAX_CLAIMED)] = MAX_CLAIMED
    wait: Annotated[int, Meta(ge=0, le=MAX_WAIT_S)] = 0


class ClaimedDelivery(Struct, frozen=True, rename="camel"):
    """A delivery that is the device's until `leaseEndsMs`. Its settlement names project, sequence, attempt, token."""

    delivery: str
    project: str
    sequence: int
    attempt: int
    attempt_limit: int
    token: str
    lease_ends_ms: int
    event_identity: str
    envelope: Annotated[msgspec.Raw, Meta(extra_json_schema={"$ref": f"{SCHEMAS}Envelope"})]


class ClaimedDeliveries(Struct, frozen=True):
    """What was claimed; nothing, if nothing was due."""

    items: list[ClaimedDelivery]


class Settlement(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What became of a claimed delivery: `delivered`, `retry` (later), or `reject` (never again)."""

    project: Id
    sequence: Sequence
    attempt: Annotated[int, Meta(ge=1, le=MAX_ATTEMPT)]
    token: Uuid
    verdict: PullVerdict
    retry_after_s: Annotated[int, Meta(ge=0, le=MAX_RETRY_AFTER_S)] | UnsetType = UNSET


class Settlements(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of up to 100 of them."""

    items: Annotated[list[Settlement], Meta(min_length=1, max_length=MAX_CLAIMED)]


class Settled(Struct, frozen=True):
    """Whether a settlement counted. A fenced one changed nothing: its lease had passed to somebody else."""

    project: str
    sequence: int
    fenced: bool


class SettledDeliveries(Struct, frozen=True):
    """One for each settlement, in order."""

    items: list[Settled]


class PullCalls:
    """Claims and settlements over HTTP."""

    def __init__(self, pulling: Pulling, door: Door) -> None:
        self._pulling = pulling
        self._door = door

    def calls(self, reception: Reception) -> list[Call]:
        """Both of them."""
        return [
            reception.change(
                "/v1/deliveries/claim",
                self.claim,
                roles=DEVICES,
                body=Claim,
                answer=ClaimedDeliveries,
                reasons=(Reason.SYNC_RATE_LIMITED,),
            ),
            reception.answer(
                "/v1/deliveries/settle",
                self.settle,
                roles=DEVICES,
                takes=(Settlements,),
                decode=lambda raw: decode_body(raw, Settlements),
                cap_bytes=MAX_SETTLE_BYTES,
                answers={200: (SettledDeliveries,)},
            ),
        ]

    async def claim(self, asked: Asked[Nothing, Claim]) -> ClaimedDeliveries:
        """Lease a device's due deliveries; with `wait` it comes empty only after so many seconds."""
        leases = await self._pulling.claim(asked.caller, most=asked.body.limit, wait_s=asked.body.wait)
        # Whose credential was revoked while it waited gets nothing more.
        await self._door.identify(asked.peer, asked.credential)
        return ClaimedDeliveries([_claimed(lease) for lease in leases])

    async def settle(self, asked: Asked[Nothing, Settlements]) -> tuple[int, Struct]:
        """Say what became of claimed deliveries."""
        told = asked.body.items
        settled = await self._pulling.settle(asked.caller, [_settle(each) for each in told])
        items = [Settled(each.project, each.sequence, not done) for each, done in zip(told, settled, strict=True)]
        return 200, SettledDeliveries(items)


def _claimed(lease: Lease) -> ClaimedDelivery:
    return ClaimedDelivery(
        str(lease.delivery),
        lease.project,
        lease.sequence,
        lease.attempt,
        lease.attempt_limit,
        str(lease.token),
        milliseconds(lease.lease_ends),
        lease.event_identity.hex(),
        msgspec.Raw(dsse.wrap(lease.payload, lease.keyid, lease.signature)),
    )


def _settle(told: Settlement) -> PullSettle:
    retry_after_s = None if told.retry_after_s is UNSET else float(told.retry_after_s)
    return PullSettle(told.project, told.sequence, told.attempt, UUID(told.token), told.verdict, retry_after_s)

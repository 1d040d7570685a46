"""Wishes: what is to be sent, within which bounds, and what becomes of it when it is sealed."""

import hashlib
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from postseal.correlation import new_correlation_id
from postseal.envelope import canonical
from postseal.errors import Refused
from postseal.outcomes import Reason
from postseal.rules.delivery import SealCode, State
from postseal.settings import MAX_ATTEMPTS

PRODUCER: Final = "controlplane"
LATEST_MS: Final = 4_102_444_800_000
"""The year 2100: no time on the wire lies behind it."""

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


class Wish(Struct, frozen=True, kw_only=True):
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
        return f"Wish({self.delivery})"


class OwnedWish(Struct, frozen=True):
    """A wish, for which project it is, and whom the trail names."""

    project: str
    account: str
    wish: Wish


class Sealed(Struct, frozen=True):
    """A delivery that is sealed for certain, in the state in which it is. Not `new`: its key had come before."""

    delivery: UUID
    destination: str
    sequence: int
    event_identity: bytes
    state: State
    new: bool


class Unsealed(Struct, frozen=True):
    """Why a wish was not sealed; `detail` is one sentence for people, `max_pending` that of a full destination."""

    delivery: UUID
    code: SealCode
    detail: str
    max_pending: int | None = None
    tried: bool = True
    """False: the time for signatures was over before its turn, and it may be the first one of the next call."""

    @property
    def reason(self) -> Reason:
        """The same in the words of an answer."""
        return _REASON_OF_CODE[self.code]


class DestinationFull(Refused):
    """Refused for want of room; `max_pending` is how much there is."""

    def __init__(self, detail: str, max_pending: int) -> None:
        super().__init__(Reason.DESTINATION_FULL, detail)
        self.max_pending = max_pending


def content_hash(wish: Wish) -> bytes:
    """The 32 bytes by which a key that comes again is known to bring the same. ValueError if that cannot be sent."""
    content = {"destination": wish.destination, "kind": wish.data.get("kind"), "data": wish.data}
    return hashlib.sha256(canonical.encode(content)).digest()


def check_options(attempt_limit: int | None, expires_at_ms: int | None) -> None:
    """ValueError where one of them lies outside of its bounds."""
    if attempt_limit is not None and not 1 <= attempt_limit <= MAX_ATTEMPTS:
        raise ValueError(f"an attempt limit is 1 to {MAX_ATTEMPTS}")
    if expires_at_ms is not None and not 0 <= expires_at_ms <= LATEST_MS:
        raise ValueError("the expiry lies outside of 1970 to 2100")

"""What becomes of a delivery after an attempt (protocol section 7, "Retries"): the whole decision, and its words.

Pure: the clock is the database's, and the caller gives the randomness.
"""

from enum import StrEnum

from msgspec import Struct


class State(StrEnum):
    """How a delivery stands."""

    PENDING = "pending"
    DELIVERING = "delivering"
    DELIVERED = "delivered"
    DEAD = "dead"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Code(StrEnum):
    """Why an attempt failed: stable words, never what a receiver said."""

    DNS_FAILED = "dns_failed"
    ADDRESS_REFUSED = "address_refused"
    CONNECT_TIMEOUT = "connect_timeout"
    CONNECT_FAILED = "connect_failed"
    TLS_FAILED = "tls_failed"
    SEND_TIMEOUT = "send_timeout"
    ANSWER_TOO_LARGE = "answer_too_large"
    ANSWER_INVALID = "answer_invalid"
    STATUS_3XX = "status_3xx"
    STATUS_4XX = "status_4xx"
    STATUS_5XX = "status_5xx"
    RATE_LIMITED = "status_429"
    GONE = "status_410"
    REJECTED = "rejected"
    """The device that pulled it said so."""
    DEFERRED = "deferred"
    """The device that pulled it wants it later."""
    LEASE_EXPIRED = "lease_expired"
    """Whoever had it never said what became of it."""
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    SECRET_UNUSABLE = "secret_unusable"  # noqa: S105 - a reason, not a secret
    SENDER_FAILED = "sender_failed"
    """A fault of ours."""


class SealCode(StrEnum):
    """Why an intent is unsealed."""

    DESTINATION_UNKNOWN = "destination_unknown"
    DESTINATION_FULL = "destination_full"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    PAYLOAD_INVALID = "payload_invalid"
    SIGNING_KEY_MISSING = "signing_key_missing"
    SIGNING_FAILED = "signing_failed"
    EXPIRED = "expired"


MAX_TRIES = {SealCode.EXPIRED: 1, SealCode.IDEMPOTENCY_CONFLICT: 1, SealCode.PAYLOAD_INVALID: 10}
"""After how many tries an intent is given up that was refused so; of any other code it is tried again for ever.

What has expired or met another content stays so. What is not valid here can be so for another process, which was given
another folder of kinds: ten tries take some twenty minutes."""


def gives_up(code: SealCode, tries: int) -> bool:
    """Whether an intent is never tried again whose try number `tries` was refused so."""
    return code in MAX_TRIES and tries >= MAX_TRIES[code]


class Verdict(StrEnum):
    """What becomes of a delivery that is out."""

    DELIVERED = "delivered"
    RETRY = "retry"
    DEAD = "dead"
    RELEASE = "release"
    """Nothing was sent: the attempt is given back, and the limit goes up by one."""


class Attempted(Struct, frozen=True):
    """How one attempt went. `code` is None exactly when it was delivered."""

    code: Code | None = None
    retry_after_s: float | None = None
    """How long the receiver asked to be left alone."""
    ours: bool = False
    """Nothing was sent, for a reason that is not the receiver's: such an attempt does not count."""

    @property
    def delivered(self) -> bool:
        """Whether the receiver took it."""
        return self.code is None


MAX_EXPONENT = 100
"""Of a backoff, which has reached its cap long before."""


class Backoff(Struct, frozen=True):
    """Exponential, capped, shortened by at most `jitter` of itself, so that what failed together does not return so."""

    base_s: float = 5.0
    factor: float = 2.0
    cap_s: float = 3600.0
    jitter: float = 0.2

    def delay_s(self, attempt: int, random: float) -> float:
        """How long to wait after `attempt` (1 for the first); `random` lies in [0, 1)."""
        # Redrives let attempts go on counting, and a device may name any number: 2.0**1024 is no float any more.
        exponent = min(attempt - 1, MAX_EXPONENT)
        return min(self.cap_s, self.base_s * self.factor**exponent) * (1 - self.jitter * random)


class Decision(Struct, frozen=True):
    """A verdict, and how long a retry or a release waits."""

    verdict: Verdict
    code: Code | None = None
    delay_s: float = 0.0


def decide(attempted: Attempted, *, attempt: int, attempt_limit: int, backoff: Backoff, random: float) -> Decision:
    """What becomes of a delivery whose attempt number `attempt` of at most `attempt_limit` went so.

    A receiver's `Retry-After` lengthens the wait, within the cap of the backoff, and never shortens it.
    """
    if attempted.code is None:
        return Decision(Verdict.DELIVERED)
    if attempted.ours:
        return Decision(Verdict.RELEASE, attempted.code, backoff.delay_s(attempt, random))
    if attempted.code is Code.REJECTED or attempt >= attempt_limit:
        return Decision(Verdict.DEAD, attempted.code)
    asked_s = min(attempted.retry_after_s or 0.0, backoff.cap_s)
    return Decision(Verdict.RETRY, attempted.code, max(asked_s, backoff.delay_s(attempt, random)))

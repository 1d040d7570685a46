"""One log line a refusal. It names who, what and why; never a credential, a signature or a payload."""

import traceback

import structlog
from structlog.typing import FilteringBoundLogger

from postseal import correlation
from postseal.commit import Refusal
from postseal.identity.verified import VerifiedIdentity

_log: FilteringBoundLogger = structlog.get_logger("postseal.web")

TRACED_FRAMES = 5


def log_refusal(refusal: Refusal, caller: VerifiedIdentity | None, peer: str) -> None:
    """`caller` is None where the credential is not known."""
    _log.info(
        "refused",
        reason=refusal.reason.value,
        correlation_id=correlation.text(refusal.correlation_id),
        tenant=caller.tenant if caller else None,
        device=caller.device if caller else None,
        event_identity=refusal.event_identity.hex() if refusal.event_identity else None,
        peer=peer,
    )


def log_bug(error: Exception, correlation_id: bytes) -> None:
    """A fault of ours: its type and where it arose. Its message is left out, since it may quote what was sent."""
    frames = traceback.extract_tb(error.__traceback__)[-TRACED_FRAMES:]
    _log.error(
        "unexpected error",
        error=type(error).__name__,
        at=[f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames],
        correlation_id=correlation.text(correlation_id),
    )

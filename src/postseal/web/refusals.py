"""Each refusal that is answered is counted, and told in one log line: who, what and why.

No line has a credential, a signature or a payload. Whoever reaches the port can be refused, so the lines of one reason
are bounded: what goes beyond is told as one number at the end of the second. The metrics count all.
"""

import asyncio

import structlog
from structlog.typing import FilteringBoundLogger

from postseal import correlation
from postseal.identity.verified import VerifiedIdentity
from postseal.logs import where
from postseal.metrics import Metrics
from postseal.outcomes import Reason
from postseal.verdicts import Refusal

LINES_A_SECOND = 20
"""Of one reason, in one process."""

CALLER = "postseal.caller"
"""The key of a request's state under which its verified caller stands, however long the request takes."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.web")


class Refusals:
    """What one process tells of its refusals. To be used in a running loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._in_this_second: dict[Reason, int] = {}

    def note(self, refusal: Refusal, caller: VerifiedIdentity | None, peer: str) -> None:
        """`caller` is None where the credential is not known."""
        reason = refusal.reason
        self._metrics.refusals[reason].inc()
        before = self._in_this_second.get(reason, 0)
        if not before:
            asyncio.get_running_loop().call_later(1, self._close_second, reason)
        self._in_this_second[reason] = before + 1
        if before < LINES_A_SECOND:
            _log.info(
                "refused",
                reason=reason.value,
                correlation_id=correlation.text(refusal.correlation_id),
                tenant=caller.tenant if caller else None,
                device=caller.device if caller else None,
                event_identity=refusal.event_identity.hex() if refusal.event_identity else None,
                peer=peer,
            )

    def _close_second(self, reason: Reason) -> None:
        further = self._in_this_second.pop(reason) - LINES_A_SECOND
        if further > 0:
            _log.info("refused, not told one by one", reason=reason.value, refusals=further)


def log_bug(error: Exception, correlation_id: bytes) -> None:
    """A fault of ours: its type and where it arose. Its message is left out, since it may quote what was sent."""
    _log.error(
        "unexpected error",
        error=type(error).__name__,
        at=where(error),
        correlation_id=correlation.text(correlation_id),
    )

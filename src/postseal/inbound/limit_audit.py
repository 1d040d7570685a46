"""The audit of `sync_rate_limited`, off the request path (protocol section 6).

A limiter that wrote a row a refusal would let the limited caller make work. So the first refusal of a caller's window
is audited by itself, and the rest as one count at the window's end. A crash loses at most that count.
"""

import asyncio

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.correlation import new_correlation_id
from postseal.identity.verified import VerifiedIdentity
from postseal.inbound.commit import Committer
from postseal.inbound.judging import AuditOnly
from postseal.outcomes import Reason
from postseal.verdicts import Refusal

WINDOW_S = 60.0

_log: FilteringBoundLogger = structlog.get_logger("postseal.limits")


class LimitAudit:
    """Counts refusals by caller."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._callers: dict[str, VerifiedIdentity] = {}
        self._further: dict[str, int] = {}
        self._commits: set[asyncio.Task[Refusal]] = set()

    def count(self, key: str, caller: VerifiedIdentity, correlation_id: bytes) -> None:
        """Note one refusal of `caller`, who is limited under `key` and told `correlation_id`."""
        if key in self._further:
            self._further[key] += 1
            return
        self._further[key] = 0
        self._callers[key] = caller
        self._audit(caller, 1, correlation_id)
        asyncio.get_running_loop().call_later(WINDOW_S, self._close_window, key)

    async def close(self) -> None:
        """Close every window now; returns when their audit events are committed, or lost."""
        for key in list(self._further):
            self._close_window(key)
        if self._commits:
            await asyncio.wait(self._commits)

    def _close_window(self, key: str) -> None:
        further, caller = self._further.pop(key, 0), self._callers.pop(key, None)
        if further and caller is not None:
            self._audit(caller, further, new_correlation_id())

    def _audit(self, caller: VerifiedIdentity, occurrences: int, correlation_id: bytes) -> None:
        entry = AuditOnly(caller, Reason.SYNC_RATE_LIMITED, correlation_id, occurrences=occurrences)
        task = asyncio.create_task(self._committer.audit(entry))
        self._commits.add(task)
        task.add_done_callback(self._audited)

    def _audited(self, task: asyncio.Task[Refusal]) -> None:
        self._commits.discard(task)
        if not task.cancelled() and task.result().reason is Reason.UNAVAILABLE:
            _log.warning("audit_lost", reason=Reason.SYNC_RATE_LIMITED.value)

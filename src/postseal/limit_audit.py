"""The audit of `sync_rate_limited`, off the request path (protocol section 6).

A limiter that wrote a row a refusal would let the limited caller make work. So the first refusal of a caller's window
is audited by itself, and the rest as one count at the window's end. A crash loses at most that count.
"""

import asyncio

from postseal.commit import Committer, Rejection
from postseal.correlation import new_correlation_id
from postseal.identity.verified import VerifiedIdentity
from postseal.outcomes import Reason

WINDOW_S = 60.0


class LimitAudit:
    """Counts refusals by caller. Leave it to a running loop; what is pending at the end of the process is lost."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._further: dict[str, int] = {}
        self._commits: set[asyncio.Task[object]] = set()

    def count(self, key: str, caller: VerifiedIdentity) -> None:
        """Note one refusal of `caller`, who is limited under `key`."""
        if key in self._further:
            self._further[key] += 1
            return
        self._further[key] = 0
        self._audit(caller, 1)
        asyncio.get_running_loop().call_later(WINDOW_S, self._close_window, key, caller)

    def _close_window(self, key: str, caller: VerifiedIdentity) -> None:
        further = self._further.pop(key)
        if further:
            self._audit(caller, further)

    def _audit(self, caller: VerifiedIdentity, occurrences: int) -> None:
        rejection = Rejection(caller, Reason.SYNC_RATE_LIMITED, new_correlation_id(), occurrences=occurrences)
        task = asyncio.create_task(self._committer.commit([rejection]))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

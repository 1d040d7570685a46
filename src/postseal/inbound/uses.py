"""Which keys are used: noted in the database once a minute for each key and stream, by each lane.

A note with every envelope would cost one more row version each. So the usual group writes none, and what the database
has can be as old as `rules.keys.NOTED_WITHIN` allows.
"""

import time
from collections.abc import Callable, Sequence

from postseal.postgres.ingest import RetainedRow, StreamKey
from postseal.postgres.key_uses import KeyUse
from postseal.remembered import Remembered

NOTED_EVERY_S = 60.0
REMEMBERED_USES = 50_000
"""One that is forgotten before its time is noted once more than it need be."""


def _boot_time() -> float:
    """Seconds that go on while the machine sleeps, where the system has them: what was noted grows old meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class NotedUses:
    """What one lane has noted lately, each with how long its payloads are kept."""

    def __init__(self, clock: Callable[[], float] = _boot_time) -> None:
        self._noted: Remembered[tuple[StreamKey, str], int] = Remembered(
            entries=REMEMBERED_USES, ttl_s=NOTED_EVERY_S, clock=clock
        )

    def due(self, retained: Sequence[RetainedRow]) -> list[KeyUse]:
        """The uses that are to be noted with a group: not noted lately, or of payloads that are kept longer."""
        longest: dict[tuple[StreamKey, str], int] = {}
        for row in retained:
            use = (row.names.stream, row.names.keyid)
            longest[use] = max(row.retention_s, longest.get(use, 0))
        return [
            KeyUse(stream.tenant, keyid, stream.stream, retention_s)
            for (stream, keyid), retention_s in longest.items()
            if (self._noted.peek((stream, keyid)) or 0) < retention_s
        ]

    def noted(self, uses: Sequence[KeyUse]) -> None:
        """These are committed for certain."""
        for use in uses:
            self._noted.remember((StreamKey(use.tenant, use.stream), use.keyid), use.retention_s)

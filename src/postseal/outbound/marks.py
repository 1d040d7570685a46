"""From where on in time the claims of each stream look.

PostgreSQL cannot clear away what was claimed and settled while any transaction is left open, and a claim that begins at
the start walks over all of it. So a claim goes on from where the last one came to, and begins at the start every
FROM_THE_START_EVERY_S only: until then a lease that has ended, or what became due out of order, may stay unseen. Where
that walk takes long, it is made ever more rarely; and where it never comes back, the claims go on without it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from postseal.postgres.deliveries import Mark

FROM_THE_START_EVERY_S = 5.0
SLOW_S = 1.0
REST_FACTOR = 20.0
"""After a claim from the start that was slow there is none for so many times as long."""
REST_AFTER_A_FAULT_S = 30.0
MAX_MARKS = 20_000
"""With more streams than that all begin at the start again."""
START = Mark(None, None)


@dataclass(slots=True)
class _Known:
    """What is known of one stream."""

    mark: Mark = START
    until_s: float = 0.0
    """How long claims go on from the mark."""
    asked_s: float = 0.0
    """When a claim began at the start."""
    rests_until_s: float = 0.0
    """Until when no other one does."""


class Marks:
    """The marks of one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[tuple[str, int], _Known] = {}

    def of(self, tenant: str, stream: int) -> Mark:
        """Where the next claim of that stream begins."""
        known, now_s = self._of(tenant, stream), self._clock()
        if known.mark is not START and now_s < max(known.until_s, known.rests_until_s):
            return known.mark
        known.asked_s = now_s
        known.rests_until_s = now_s + REST_AFTER_A_FAULT_S
        return START

    def keep(self, tenant: str, stream: int, *, began: Mark, reached: Mark, found: int) -> None:
        """A claim that began at `began` found so many and has come to `reached`.

        Where it found nothing, what was thought to be due may stand before it: the next one begins at the start.
        """
        known, now_s = self._of(tenant, stream), self._clock()
        if began is START:
            took_s = now_s - known.asked_s
            known.rests_until_s = now_s + REST_FACTOR * took_s if took_s > SLOW_S else now_s
            known.until_s = now_s + FROM_THE_START_EVERY_S
        elif not found:
            known.until_s = now_s
            return
        known.mark = reached

    def _of(self, tenant: str, stream: int) -> _Known:
        known = self._known.get((tenant, stream))
        if known is None:
            if len(self._known) >= MAX_MARKS:
                self._known.clear()
            known = self._known[tenant, stream] = _Known()
        return known

"""From where on in time the claims of each stream look.

PostgreSQL cannot clear away what was claimed and settled while any transaction is left open, and a claim that begins at
the start walks over all of it. So a claim goes on from where the last one came to, and begins at the start every
FROM_THE_START_EVERY_S only: until then a lease that has ended, or what became due out of order, may stay unseen.
"""

from collections.abc import Callable

from postseal.postgres.deliveries import Mark

FROM_THE_START_EVERY_S = 5.0
MAX_MARKS = 20_000
"""With more streams than that all begin at the start again."""
START = Mark(None, None)


class Marks:
    """The marks of one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: dict[tuple[str, int], tuple[float, Mark]] = {}

    def of(self, tenant: str, stream: int) -> Mark:
        """Where the next claim of that stream begins."""
        until_s, mark = self._marks.get((tenant, stream), (0.0, START))
        return mark if self._clock() < until_s else START

    def keep(self, tenant: str, stream: int, *, began: Mark, reached: Mark, found: int) -> None:
        """A claim that began at `began` found so many and has come to `reached`.

        Where it found nothing, what was thought to be due may stand before it: the next one begins at the start.
        """
        if not found and began is not START:
            self._marks.pop((tenant, stream), None)
            return
        if len(self._marks) >= MAX_MARKS:
            self._marks.clear()
        until_s, _ = self._marks.get((tenant, stream), (0.0, START))
        if began is START:
            until_s = self._clock() + FROM_THE_START_EVERY_S
        self._marks[tenant, stream] = (until_s, reached)

"""How many deliveries one worker may have out at once: to each destination, for each tenant, and altogether.

A slot is taken before the claim, so that what is claimed is sent at once, and given back when its sending ends.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from postseal.postgres.turns import Due

MIN_FREE_SHARE = 0.25
"""Claims for a destination that is busy would else be of one delivery each."""


class Slots:
    """`most` slots, of which a destination has at most `per_destination`; `freed` hears of each that comes back.

    A tenant gets no more than it leaves free, so that tenants whose receivers hang leave some to the others. One that
    has nothing out may always have one, beyond `most` if it must be.
    """

    def __init__(self, *, most: int, per_destination: int, freed: Callable[[], None] = lambda: None) -> None:
        self._free = most
        self._per_destination = per_destination
        self._freed = freed
        self._of_tenant: Counter[str] = Counter()
        self._of_destination: Counter[tuple[str, int]] = Counter()

    @property
    def taken(self) -> int:
        """How many are out."""
        return self._of_tenant.total()

    def has_room(self, due: Due) -> bool:
        """Whether it is worth a claim for that destination: MIN_FREE_SHARE of its slots are free."""
        return (
            self._left_to_destination(due.tenant, due.stream) >= self._per_destination * MIN_FREE_SHARE
            and self._left_to_tenant(due.tenant) > 0
        )

    def take(self, tenant: str, streams: Sequence[int], most: int) -> dict[int, int]:
        """Take at most `most`, shared out evenly among `streams` as far as each has room; one with none is left out.

        Where it does not come out even, those that stand first get the more.
        """
        left = min(most, self._left_to_tenant(tenant))
        taken: dict[int, int] = {}
        # The least room first: what a destination cannot use is shared out among the others.
        by_room = sorted(streams, key=lambda stream: self._left_to_destination(tenant, stream))
        for nth, stream in enumerate(by_room):
            share = min(self._left_to_destination(tenant, stream), -(-left // (len(streams) - nth)))
            if share > 0:
                taken[stream] = share
                left -= share
                self._count(tenant, stream, share)
        return {stream: taken[stream] for stream in streams if stream in taken}

    def give_back(self, tenant: str, stream: int, count: int = 1) -> None:
        """They are free again."""
        self._count(tenant, stream, -count)
        if not self._of_destination[tenant, stream]:
            del self._of_destination[tenant, stream]
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._freed()

    def _count(self, tenant: str, stream: int, count: int) -> None:
        self._free -= count
        self._of_tenant[tenant] += count
        self._of_destination[tenant, stream] += count

    def _left_to_destination(self, tenant: str, stream: int) -> int:
        return self._per_destination - self._of_destination[tenant, stream]

    def _left_to_tenant(self, tenant: str) -> int:
        # Taking half of the difference makes what it has and what is free the same.
        taken = self._of_tenant[tenant]
        return max((self._free - taken) // 2, 0 if taken else 1)

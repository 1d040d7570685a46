"""What the cycles of one worker share: its pace, its means, and the counts of what came of deliveries."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from postseal.limits import Rate, RateLimiter
from postseal.outbound.marks import Marks
from postseal.outbound.slots import Slots
from postseal.outbound.targets import Targets
from postseal.postgres.database import Database
from postseal.rules.delivery import Backoff
from postseal.senders import Sender


@dataclass(frozen=True, slots=True)
class Pace:
    """How a worker goes about it; what is left out is as the settings' defaults are."""

    cycles: int = 4
    lease_s: float = 60.0
    destination_concurrency: int = 16
    cycle_timeout_s: float = 120.0
    stop_grace_s: float = 20.0
    poll_s: float = 0.5
    rate: Rate = field(default_factory=lambda: Rate(2000.0, 10_000))
    """Of claims, for each tenant."""
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class Means:
    """What a cycle works with."""

    pace: Pace
    database: Database
    sender: Sender
    targets: Targets
    limiter: RateLimiter
    slots: Slots
    marks: Marks
    stopping: asyncio.Event
    """Set once nothing more may be begun."""
    clock: Callable[[], float]
    random: Callable[[], float]


@dataclass(slots=True)
class Counts:
    """What came of deliveries, in one cycle or since a worker began."""

    claimed: int = 0
    ended: int = 0
    """Settled by the claim itself: expired, or out of attempts."""
    delivered: int = 0
    retried: int = 0
    dead: int = 0
    released: int = 0
    fenced: int = 0
    """Not ours any more; or settled by a commit whose answer was lost."""
    left: int = 0
    """Left to the end of their leases."""
    limited: int = 0
    """Turns that the rate limit ended."""
    renewed: int = 0
    """Leases made longer."""

    def add(self, more: "Counts") -> None:
        """Count `more` too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(more, each.name))

"""What keeps a key from being removed, in words."""

from collections.abc import Sequence
from datetime import UTC, datetime

from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.rules.keys import Obstacle, ObstacleKind


def require_no_obstacles(obstacles: Sequence[Obstacle]) -> None:
    """AdminError `conflict`, which names everything that holds the key, unless nothing does."""
    if obstacles:
        raise AdminError(Reason.CONFLICT, f"the key cannot be removed yet: {'; '.join(map(sentence, obstacles))}")


def sentence(obstacle: Obstacle) -> str:
    """One obstacle, and what ends it."""
    match obstacle.kind:
        case ObstacleKind.ACTIVE:
            return "it is active (rotate, retire or revoke it first)"
        case ObstacleKind.RETIRING:
            return f"it brings something new until {_time(obstacle.until)} (retire or revoke it to end that now)"
        case ObstacleKind.WINDOW:
            return f"its last envelope is too recent until {_time(obstacle.until)}"
        case ObstacleKind.PAYLOAD:
            return f"payloads in project {obstacle.place} that it signed are kept until {_time(obstacle.until)}"
        case ObstacleKind.HOLES:
            return f"sequences are missing in its stream in project {obstacle.place} (see `postseal stream show`)"
        case ObstacleKind.ON_HOLD:
            return "its tenant's payloads are on hold (see `postseal hold list`)"
        case ObstacleKind.ENVELOPE:
            return f"envelopes for {obstacle.place} that it signed are kept"


def _time(until: datetime | None) -> str:
    return "-" if until is None else until.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")

"""How keys stand, what may become of them, and what still holds one that is to be removed (protocol section 8).

A key falls: active, retiring, verify-only, revoked, removed; it may leave steps out and never rises. A retiring key
whose time is over counts as verify-only, by the database's clock.

Pure: the facts are read by whoever asks, and so is the clock.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct


class KeyState(StrEnum):
    """How a key stands at one moment."""

    ACTIVE = "active"
    RETIRING = "retiring"
    """Brings something new until its time is over."""
    VERIFY_ONLY = "verify-only"
    REVOKED = "revoked"
    REMOVED = "removed"
    """Only its public half is left."""


_BELOW: dict[KeyState, frozenset[KeyState]] = {
    KeyState.ACTIVE: frozenset({KeyState.RETIRING, KeyState.VERIFY_ONLY, KeyState.REVOKED}),
    KeyState.RETIRING: frozenset({KeyState.VERIFY_ONLY, KeyState.REVOKED}),
    # What may still bring something new is never removed: it is retired or revoked first.
    KeyState.VERIFY_ONLY: frozenset({KeyState.REVOKED, KeyState.REMOVED}),
    KeyState.REVOKED: frozenset({KeyState.REMOVED}),
    KeyState.REMOVED: frozenset(),
}

MAX_KEYS = 32
"""Of one device, or one tenant, that are not removed: a proof is tried with each, and a set of keys is served whole."""

NOTED_WITHIN = timedelta(minutes=2)
"""How much later than noted the last use of a key can have been. A process notes it once a minute; the commits before
and after each have their deadline of ten seconds."""


def may_become(state: KeyState, to: KeyState) -> bool:
    """Whether an act may let a key that stands at `state` stand at `to`."""
    return to in _BELOW[state]


class Use(Struct, frozen=True):
    """What a device's key brought into one stream, as it was noted."""

    project: str
    last_at: datetime
    """When its last envelope was accepted."""
    kept_until: datetime
    """When the last payload that it signed expires."""
    has_holes: bool
    """Whether sequences are missing in the stream, below its highest."""


class ObstacleKind(StrEnum):
    """Why a key cannot be removed."""

    ACTIVE = "active"
    RETIRING = "retiring"
    WINDOW = "window"
    """Its last envelope is too recent."""
    PAYLOAD = "payload"
    """Payloads that it signed are kept."""
    HOLES = "holes"
    """What is missing in a stream may have been signed by it."""
    ENVELOPE = "envelope"
    """Outbound envelopes that it signed are kept, delivered or not."""
    ON_HOLD = "on-hold"
    """A hold keeps all payloads of its tenant, whatever their time."""


class Obstacle(Struct, frozen=True):
    """One thing that holds a key: where (a project, or project/destination), and until when, where that is known."""

    kind: ObstacleKind
    place: str | None = None
    until: datetime | None = None


def obstacles_of_device_key(
    state: KeyState,
    accept_until: datetime | None,
    uses: Sequence[Use],
    *,
    on_hold: bool,
    window: timedelta,
    now: datetime,
) -> list[Obstacle]:
    """All that holds a device's key; nothing does if the list is empty.

    `on_hold` says whether its tenant's payloads are on hold; so it is below.
    """
    obstacles = _obstacles_of_state(state, accept_until)
    if on_hold and uses:
        obstacles.append(Obstacle(ObstacleKind.ON_HOLD))
    if uses:
        last_at = max(use.last_at for use in uses)
        obstacles += _obstacle_until(Obstacle(ObstacleKind.WINDOW, until=last_at + NOTED_WITHIN + window), now)
    for use in uses:
        obstacles += _obstacle_until(Obstacle(ObstacleKind.PAYLOAD, use.project, use.kept_until + NOTED_WITHIN), now)
        if use.has_holes:
            obstacles.append(Obstacle(ObstacleKind.HOLES, use.project))
    return obstacles


def obstacles_of_signing_key(
    state: KeyState,
    accept_until: datetime | None,
    ended_at: datetime | None,
    *,
    on_hold: bool,
    window: timedelta,
    now: datetime,
) -> list[Obstacle]:
    """All that holds a tenant's signing key, beside envelopes of it that are kept.

    `ended_at` is when it ended to sign, None if it has not.
    """
    obstacles = _obstacles_of_state(state, accept_until)
    if on_hold:
        obstacles.append(Obstacle(ObstacleKind.ON_HOLD))
    if ended_at is not None:
        obstacles += _obstacle_until(Obstacle(ObstacleKind.WINDOW, until=ended_at + NOTED_WITHIN + window), now)
    return obstacles


def free_at(obstacles: Sequence[Obstacle]) -> datetime | None:
    """When the last of what holds a key ends, as things stand; None if nothing does, or if that cannot be told."""
    times = [obstacle.until for obstacle in obstacles if obstacle.until is not None]
    return max(times, default=None) if len(times) == len(obstacles) else None


def _obstacles_of_state(state: KeyState, accept_until: datetime | None) -> list[Obstacle]:
    match state:
        case KeyState.ACTIVE:
            return [Obstacle(ObstacleKind.ACTIVE)]
        case KeyState.RETIRING:
            return [Obstacle(ObstacleKind.RETIRING, until=accept_until)]
        case _:
            return []


def _obstacle_until(obstacle: Obstacle, now: datetime) -> list[Obstacle]:
    return [obstacle] if obstacle.until is not None and now < obstacle.until else []

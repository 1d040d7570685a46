"""Keys only fall, and each thing that holds one from being removed holds it alone."""

from datetime import UTC, datetime, timedelta

import pytest

from postseal.rules.keys import (
    NOTED_WITHIN,
    KeyState,
    Obstacle,
    ObstacleKind,
    Use,
    free_at,
    may_become,
    obstacles_of_device_key,
    obstacles_of_signing_key,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY, MOMENT = timedelta(days=1), timedelta(microseconds=1)
WINDOW = 90 * DAY
LONG_AGO = NOW - WINDOW - NOTED_WITHIN
GONE = Use("apollo", LONG_AGO, NOW - NOTED_WITHIN, has_holes=False)
"""A use that holds nothing any more, by no more than a moment."""


def of_device(
    *uses: Use,
    state: KeyState = KeyState.VERIFY_ONLY,
    accept_until: datetime | None = None,
    now: datetime = NOW,
    on_hold: bool = False,
) -> list[Obstacle]:
    """What holds a device's key."""
    return obstacles_of_device_key(state, accept_until, uses, on_hold=on_hold, window=WINDOW, now=now)


def test_no_key_ever_rises():
    """From each state only lower ones are reached, and `removed` from none that may bring something new."""
    order = list(KeyState)
    reached = {(state, to) for state in order for to in order if may_become(state, to)}
    assert all(order.index(state) < order.index(to) for state, to in reached)
    assert {state for state, to in reached if to is KeyState.REMOVED} == {KeyState.VERIFY_ONLY, KeyState.REVOKED}
    assert {state for state, to in reached if to is KeyState.REVOKED} == set(order[:3])


@pytest.mark.parametrize("state", [KeyState.VERIFY_ONLY, KeyState.REVOKED])
def test_nothing_holds_a_key_that_was_never_used_or_is_done_with(state: KeyState):
    """To the moment at which the last of it ended."""
    assert of_device(state=state) == []
    assert of_device(GONE, state=state) == []


@pytest.mark.parametrize(
    ("use", "kind", "until"),
    [
        (Use("apollo", LONG_AGO + MOMENT, GONE.kept_until, has_holes=False), ObstacleKind.WINDOW, NOW + MOMENT),
        (Use("apollo", LONG_AGO, GONE.kept_until + MOMENT, has_holes=False), ObstacleKind.PAYLOAD, NOW + MOMENT),
        (Use("apollo", LONG_AGO, GONE.kept_until, has_holes=True), ObstacleKind.HOLES, None),
    ],
)
def test_each_use_holds_alone(use: Use, kind: ObstacleKind, until: datetime | None):
    """One condition that fails is one obstacle, with its end where that is known; beside uses that hold nothing."""
    [obstacle] = of_device(GONE, use, GONE)
    assert (obstacle.kind, obstacle.until) == (kind, until)
    assert obstacle.place == (None if kind is ObstacleKind.WINDOW else "apollo")
    assert free_at([obstacle]) == until
    if until is not None:
        assert of_device(use, now=until) == []


def test_a_key_that_may_bring_something_new_is_held():
    """An active one for good as things stand, a retiring one until its time is over."""
    assert of_device(state=KeyState.ACTIVE) == [Obstacle(ObstacleKind.ACTIVE)]
    [obstacle] = of_device(state=KeyState.RETIRING, accept_until=NOW + DAY)
    assert obstacle == Obstacle(ObstacleKind.RETIRING, until=NOW + DAY)


def test_all_holds_are_told_and_the_last_end_counts():
    """The greatest end; none that can be told while one has none."""
    recent = Use("apollo", NOW, NOW + 7 * DAY, has_holes=False)
    obstacles = of_device(recent, Use("zeus", LONG_AGO, NOW + 3 * DAY, has_holes=False))
    assert [obstacle.kind for obstacle in obstacles] == [
        ObstacleKind.WINDOW,
        ObstacleKind.PAYLOAD,
        ObstacleKind.PAYLOAD,
    ]
    assert free_at(obstacles) == NOW + WINDOW + NOTED_WITHIN
    assert free_at([*obstacles, Obstacle(ObstacleKind.HOLES, "zeus")]) is None
    assert free_at([]) is None


def test_a_hold_on_payloads_holds_the_keys_that_verify_them():
    """Until it is released, which nobody can tell; a key that signed nothing is free of it."""
    [obstacle] = of_device(GONE, on_hold=True)
    assert obstacle == Obstacle(ObstacleKind.ON_HOLD)
    assert free_at([obstacle]) is None
    assert of_device(on_hold=True) == []


def test_what_holds_a_signing_key():
    """That it signs, that it ended too lately, that its tenant's payloads are on hold."""

    def found(state: KeyState, ended_at: datetime | None, *, on_hold: bool = False) -> list[Obstacle]:
        return obstacles_of_signing_key(state, None, ended_at, on_hold=on_hold, window=WINDOW, now=NOW)

    assert found(KeyState.ACTIVE, None) == [Obstacle(ObstacleKind.ACTIVE)]
    assert found(KeyState.VERIFY_ONLY, LONG_AGO) == []
    assert found(KeyState.VERIFY_ONLY, LONG_AGO, on_hold=True) == [Obstacle(ObstacleKind.ON_HOLD)]
    assert found(KeyState.REVOKED, LONG_AGO + MOMENT) == [Obstacle(ObstacleKind.WINDOW, until=NOW + MOMENT)]

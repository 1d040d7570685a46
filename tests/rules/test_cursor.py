"""`Cursor` says the same as a plain set of retained sequences does."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postseal.postgres.ingest import bitmap_from_bytes, bitmap_to_bytes
from postseal.rules.stream import Cursor

SEQUENCES = st.integers(1, 60)
STEPS = st.lists(
    st.one_of(st.tuples(st.just("retain"), SEQUENCES), st.tuples(st.just("raise"), SEQUENCES)), max_size=40
)


def contiguous_of(retained: set[int], floor: int) -> int:
    """The greatest N >= floor such that all of (floor, N] is retained: the definition, word for word."""
    n = floor
    while n + 1 in retained:
        n += 1
    return n


@given(STEPS)
def test_a_cursor_agrees_with_a_set(steps: list[tuple[str, int]]):
    """Contiguous, highest, holes and `retains` after any mix of arrivals and raised floors."""
    cursor, retained, floor = Cursor(), set[int](), 0
    for step, number in steps:
        if step == "raise":
            floor = max(floor, number)
            cursor = cursor.raised_to(floor)
        elif number > floor and number not in retained:
            retained.add(number)
            cursor = cursor.retaining(number)
        highest = max(retained | {floor})
        contiguous = contiguous_of(retained, floor)
        assert (cursor.floor, cursor.contiguous, cursor.highest) == (floor, contiguous, highest)
        assert not cursor.above & 1
        for sequence in range(floor + 1, 65):
            assert cursor.retains(sequence) == (sequence in retained)
        missing = [n for first, last in cursor.holes() for n in range(first, last + 1)]
        assert missing == [n for n in range(contiguous + 1, highest) if n not in retained]
        assert cursor.hole_count == len(cursor.holes())
        assert cursor.holes(2) == cursor.holes()[:2]


@given(st.sets(SEQUENCES))
def test_holes_are_apart_and_not_empty(retained: set[int]):
    """Two ranges never touch: what lies between them is retained."""
    cursor = Cursor()
    for sequence in retained:
        cursor = cursor.retaining(sequence)
    holes = cursor.holes()
    assert all(first <= last for first, last in holes)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(holes))


def test_a_floor_never_sinks():
    """Raising it to where it is changes nothing; lower is an error."""
    cursor = Cursor().raised_to(7)
    assert cursor.raised_to(7) == cursor == Cursor(7, 7, 7, 0)
    with pytest.raises(ValueError, match="only rises"):
        cursor.raised_to(6)


def test_the_last_possible_sequence_is_only_a_number():
    """2^53 - 1 makes no bitmap of that size, neither asked for nor retained next to the cursor."""
    assert not Cursor().retains(2**53 - 1)
    near_end = Cursor().raised_to(2**53 - 2)
    assert near_end.retaining(2**53 - 1) == Cursor(2**53 - 2, 2**53 - 1, 2**53 - 1, 0)


@given(st.integers(0, 2**1024 - 1))
def test_a_bitmap_comes_back_from_its_bytes(above: int):
    """Least significant byte first, without trailing zero bytes."""
    kept = bitmap_to_bytes(above)
    assert bitmap_from_bytes(kept) == above
    assert not kept.endswith(b"\0")
    assert len(kept) <= 128

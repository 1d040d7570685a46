"""From where claims look: from the start now and then, and never so often that the walk is all they do."""

import pytest
from mailing import StillClock

from postseal.outbound.marks import FROM_THE_START_EVERY_S, REST_AFTER_A_FAULT_S, SLOW_S, START, Marks
from postseal.postgres.deliveries import Mark

REACHED, FURTHER = Mark(None, None), Mark(None, None)


@pytest.fixture
def marks(clock: StillClock) -> Marks:
    """Those of a stream that was claimed from once."""
    marks = Marks(clock)
    assert marks.of("acme", 1) is START
    marks.keep("acme", 1, began=START, reached=REACHED, found=1)
    return marks


def test_claims_go_on_from_the_mark_for_a_while(marks: Marks, clock: StillClock):
    """And begin at the start after it; another stream has its own."""
    assert marks.of("acme", 1) is REACHED
    marks.keep("acme", 1, began=REACHED, reached=FURTHER, found=1)
    assert marks.of("acme", 1) is FURTHER
    assert marks.of("acme", 2) is START
    assert marks.of("globex", 1) is START
    clock.now_s += FROM_THE_START_EVERY_S
    assert marks.of("acme", 1) is START


def test_a_claim_that_finds_nothing_is_made_again_from_the_start(marks: Marks):
    """What was thought to be due may stand before the mark."""
    marks.keep("acme", 1, began=REACHED, reached=FURTHER, found=0)
    assert marks.of("acme", 1) is START


def test_a_claim_from_the_start_that_never_comes_back_keeps_no_other_one(marks: Marks, clock: StillClock):
    """It was too slow for the database's patience: the others go on from the mark meanwhile."""
    clock.now_s += FROM_THE_START_EVERY_S
    assert marks.of("acme", 1) is START
    for found in (1, 0):
        assert marks.of("acme", 1) is REACHED
        marks.keep("acme", 1, began=REACHED, reached=REACHED, found=found)
    clock.now_s += REST_AFTER_A_FAULT_S
    assert marks.of("acme", 1) is START


def test_slow_claims_from_the_start_are_rare(marks: Marks, clock: StillClock):
    """They take a twentieth of the time; quick ones are made every few seconds again."""
    clock.now_s += FROM_THE_START_EVERY_S
    assert marks.of("acme", 1) is START
    clock.now_s += 2 * SLOW_S
    marks.keep("acme", 1, began=START, reached=FURTHER, found=0)
    clock.now_s += 39 * SLOW_S
    assert marks.of("acme", 1) is FURTHER
    clock.now_s += SLOW_S
    assert marks.of("acme", 1) is START
    marks.keep("acme", 1, began=START, reached=FURTHER, found=1)
    clock.now_s += FROM_THE_START_EVERY_S
    assert marks.of("acme", 1) is START

"""`judge`: every rule of protocol section 5, and that the earlier of any two decides."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
from msgspec import structs

from postseal.outcomes import Outcome, Reason
from postseal.rules.keys import KeyState
from postseal.rules.stream import Cursor, Judgement, Matches, judge

WINDOW = 8
EVENT, OTHER_EVENT = b"e" * 16, b"o" * 16
IDENTITY, OTHER_IDENTITY = b"i" * 32, b"x" * 32
NOTHING_RETAINED = Matches(None, None)


STANDING = Cursor(floor=2, contiguous=4, highest=7, above=0b100)


@dataclass(frozen=True)
class Case:
    """What stands before `judge`: at first sequence 5 of a stream whose floor is 2 and that has 3, 4 and 7."""

    cursor: Cursor = STANDING
    sequence: int = 5
    matches: Matches = NOTHING_RETAINED
    retired: bool = False
    key: KeyState = KeyState.ACTIVE

    def judged(self) -> Judgement:
        """What becomes of it."""
        return judge(
            self.cursor,
            event_id=EVENT,
            event_identity=IDENTITY,
            sequence=self.sequence,
            matches=self.matches,
            retired=self.retired,
            key=self.key,
            window=WINDOW,
        )


def _with_event(case: Case, identity: bytes) -> Case:
    return replace(case, matches=structs.replace(case.matches, identity_of_event=identity))


# In the order of the rules. A fault of the same rule or on the same input as another is left out of a pair below.
FAULTS: dict[Outcome | Reason, tuple[str, Callable[[Case], Case]]] = {
    Reason.KEY_UNKNOWN: ("key", lambda case: replace(case, key=KeyState.REMOVED)),
    Outcome.DUPLICATE: ("event", lambda case: _with_event(case, IDENTITY)),
    Reason.STREAM_RETIRED: ("retired", lambda case: replace(case, retired=True)),
    Reason.KEY_REVOKED: ("key", lambda case: replace(case, key=KeyState.REVOKED)),
    Reason.KEY_RETIRED: ("key", lambda case: replace(case, key=KeyState.VERIFY_ONLY)),
    Reason.EVENT_CONFLICT: ("event", lambda case: _with_event(case, OTHER_IDENTITY)),
    Reason.IDEMPOTENCY_CONFLICT: (
        "idempotency",
        lambda case: replace(case, matches=structs.replace(case.matches, event_of_idempotency_key=OTHER_EVENT)),
    ),
    Reason.BELOW_REPLAY_FLOOR: ("sequence", lambda case: replace(case, sequence=2)),
    Reason.SEQUENCE_CONFLICT: ("sequence", lambda case: replace(case, sequence=7)),
    Reason.SEQUENCE_BEYOND_WINDOW: ("sequence", lambda case: replace(case, sequence=4 + WINDOW + 1)),
}
PAIRS = [(earlier, later) for earlier, later in combinations(FAULTS, 2) if FAULTS[earlier][0] != FAULTS[later][0]]


@pytest.mark.parametrize("answer", FAULTS)
def test_each_rule_alone_gives_its_answer_and_leaves_the_cursor(answer: Outcome | Reason):
    """Refusals and duplicates change nothing."""
    case = FAULTS[answer][1](Case())
    assert case.judged() == Judgement(answer, case.cursor)
    assert not case.judged().is_new


@pytest.mark.parametrize(("earlier", "later"), PAIRS)
def test_the_earlier_rule_wins(earlier: Outcome | Reason, later: Outcome | Reason):
    """For every two rules that can both hold, the earlier one answers, in whichever order they came about."""
    for first, second in ((earlier, later), (later, earlier)):
        assert FAULTS[second][1](FAULTS[first][1](Case())).judged().answer == earlier


def test_all_pairs_that_can_occur_together_are_in_the_table():
    """Ten rules make 45 pairs; only those on one input cannot hold at once: 3 of keys, 3 of sequences, 1 of events."""
    assert len(PAIRS) == 45 - 3 - 3 - 1


@pytest.mark.parametrize("key", list(KeyState))
@pytest.mark.parametrize("retired", [False, True])
@pytest.mark.parametrize("sequence", [1, 2, 4, 5, 7, 12, 13, 2**53 - 1])
def test_a_duplicate_is_told_whatever_became_of_stream_key_and_floor(key: KeyState, retired: bool, sequence: int):
    """An acknowledgement that was lost can always be had again; only a removed key has no say any more."""
    case = _with_event(Case(key=key, retired=retired, sequence=sequence), IDENTITY)
    expected = Reason.KEY_UNKNOWN if key is KeyState.REMOVED else Outcome.DUPLICATE
    assert case.judged().answer == expected


def test_the_idempotency_key_of_the_same_event_is_no_conflict():
    """Only another event under the key is; rule 4 has dealt with another identity of the same event."""
    case = Case(matches=Matches(None, EVENT))
    assert case.judged().answer is Outcome.REORDERED


@pytest.mark.parametrize(
    ("cursor", "sequence", "outcome", "after"),
    [
        (Cursor(), 1, Outcome.ACCEPTED, Cursor(0, 1, 1, 0)),
        (Cursor(), 2, Outcome.GAP, Cursor(0, 0, 2, 0b10)),
        (Cursor(), WINDOW, Outcome.GAP, Cursor(0, 0, WINDOW, 1 << WINDOW - 1)),
        (Cursor(0, 0, 2, 0b10), 1, Outcome.REORDERED, Cursor(0, 2, 2, 0)),
        (Cursor(0, 0, 3, 0b100), 2, Outcome.REORDERED, Cursor(0, 0, 3, 0b110)),
        (Cursor(0, 0, 2, 0b10), 4, Outcome.GAP, Cursor(0, 0, 4, 0b1010)),
        (Cursor(5, 5, 5, 0), 6, Outcome.ACCEPTED, Cursor(5, 6, 6, 0)),
        (Cursor(5, 5, 5, 0), 7, Outcome.GAP, Cursor(5, 5, 7, 0b10)),
    ],
)
def test_what_is_new_moves_the_cursor(cursor: Cursor, sequence: int, outcome: Outcome, after: Cursor):
    """Accepted, gap and reordered as protocol section 5 defines them; the window's last sequence is still inside."""
    judged = Case(cursor, sequence).judged()
    assert judged == Judgement(outcome, after)
    assert judged.is_new

"""What becomes of one verified envelope, judged under its stream's lock (protocol section 5).

`judge` is the whole decision. Its rules, of which the first that holds decides:

1. retained with the same event id and event identity: `duplicate`
2. the stream is retired: `stream_retired`
3. the key may bring nothing new: `key_revoked`, `key_retired`
4. the event id is retained with another identity: `event_conflict`
5. the idempotency key is retained for another event: `idempotency_conflict`
6. sequence <= floor: `below_replay_floor`
7. the sequence is retained: `sequence_conflict`
8. sequence > contiguous + window: `sequence_beyond_window`
9. else it is new: `reordered`, `accepted` or `gap`

A key that was removed after its signature was checked stands before all of these: check 3 of `receive()` would
have refused it.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from postseal.outcomes import Outcome, Reason


class KeyState(StrEnum):
    """Whether a key may still bring something new, read under the stream's lock."""

    ACCEPTING = "accepting"
    RETIRED = "retired"
    REVOKED = "revoked"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a stream stands.

    `above` is a bitmap of what is retained above `contiguous`: bit i is sequence `contiguous + 1 + i`. Its lowest
    bit is never set, since the contiguous cursor would have advanced through it. Python's integers make it one
    number, so that neither the cursor nor the holes need a look at the retained identities.
    """

    floor: int = 0
    contiguous: int = 0
    highest: int = 0
    above: int = 0

    def retains(self, sequence: int) -> bool:
        """Whether a sequence above the floor is retained."""
        if sequence <= self.contiguous:
            return True
        return bool(self.above >> (sequence - self.contiguous - 1) & 1)

    def retaining(self, sequence: int) -> "Cursor":
        """The cursor after `sequence`, which was not retained, is."""
        above = self.above | 1 << (sequence - self.contiguous - 1)
        return replace(self, above=above, highest=max(self.highest, sequence))._settled()

    def raised_to(self, floor: int) -> "Cursor":
        """The cursor after the floor rises: holes at or below it are closed."""
        if floor < self.floor:
            raise ValueError("a replay floor only rises")
        passed = max(0, floor - self.contiguous)
        return replace(
            self,
            floor=floor,
            contiguous=self.contiguous + passed,
            highest=max(self.highest, floor),
            above=self.above >> passed,
        )._settled()

    def holes(self) -> list[tuple[int, int]]:
        """The missing ranges between the contiguous cursor and the highest, both ends included, in order."""
        ranges: list[tuple[int, int]] = []
        first, bits = self.contiguous + 1, self.above
        while bits:
            missing = _trailing_zeros(bits)
            ranges.append((first, first + missing - 1))
            bits >>= missing
            present = _trailing_ones(bits)
            bits >>= present
            first += missing + present
        return ranges

    def _settled(self) -> "Cursor":
        """Advance the contiguous cursor through all that is now contiguous."""
        run = _trailing_ones(self.above)
        if not run:
            return self
        return replace(self, contiguous=self.contiguous + run, above=self.above >> run)


@dataclass(frozen=True, slots=True)
class Matches:
    """What the stream retains under the envelope's names; None where nothing is."""

    identity_of_event: bytes | None
    """The event identity that is retained with the envelope's event id."""
    event_of_idempotency_key: bytes | None
    """The event id (16 bytes) that is retained with the envelope's idempotency key."""


NOTHING_RETAINED = Matches(None, None)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer to one envelope, and the cursor after it. A refusal and a duplicate leave the cursor as it was."""

    answer: Outcome | Reason
    cursor: Cursor

    @property
    def is_new(self) -> bool:
        """Whether the envelope is to be retained."""
        return isinstance(self.answer, Outcome) and self.answer is not Outcome.DUPLICATE


def judge(
    cursor: Cursor,
    *,
    event_id: bytes,
    event_identity: bytes,
    sequence: int,
    matches: Matches,
    retired: bool,
    key: KeyState,
    window: int,
) -> Judgement:
    """Judge one verified envelope against its locked stream; the module's docstring numbers the rules."""

    def answer(word: Outcome | Reason) -> Judgement:
        return Judgement(word, cursor)

    if key is KeyState.REMOVED:
        return answer(Reason.KEY_UNKNOWN)
    if matches.identity_of_event == event_identity:
        return answer(Outcome.DUPLICATE)
    if retired:
        return answer(Reason.STREAM_RETIRED)
    if key is KeyState.REVOKED:
        return answer(Reason.KEY_REVOKED)
    if key is KeyState.RETIRED:
        return answer(Reason.KEY_RETIRED)
    if matches.identity_of_event is not None:
        return answer(Reason.EVENT_CONFLICT)
    if matches.event_of_idempotency_key not in (None, event_id):
        return answer(Reason.IDEMPOTENCY_CONFLICT)
    if sequence <= cursor.floor:
        return answer(Reason.BELOW_REPLAY_FLOOR)
    if cursor.retains(sequence):
        return answer(Reason.SEQUENCE_CONFLICT)
    if sequence > cursor.contiguous + window:
        return answer(Reason.SEQUENCE_BEYOND_WINDOW)
    return Judgement(_outcome_of_new(cursor, sequence), cursor.retaining(sequence))


def _outcome_of_new(cursor: Cursor, sequence: int) -> Outcome:
    if sequence < cursor.highest:
        return Outcome.REORDERED
    if sequence == cursor.contiguous + 1:
        return Outcome.ACCEPTED
    return Outcome.GAP


def _trailing_ones(bits: int) -> int:
    return (~bits & (bits + 1)).bit_length() - 1


def _trailing_zeros(bits: int) -> int:
    return (bits & -bits).bit_length() - 1

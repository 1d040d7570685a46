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

from msgspec import Struct

from postseal.outcomes import Outcome, Reason
from postseal.rules.keys import KeyState


class Cursor(Struct, frozen=True, gc=False):
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
        return _settled(self.floor, self.contiguous, max(self.highest, sequence), above)

    def raised_to(self, floor: int) -> "Cursor":
        """The cursor after the floor rises: holes at or below it are closed."""
        if floor < self.floor:
            raise ValueError("a replay floor only rises")
        passed = max(0, floor - self.contiguous)
        return _settled(floor, self.contiguous + passed, max(self.highest, floor), self.above >> passed)

    @property
    def hole_count(self) -> int:
        """How many ranges are missing: above each begins a run of what is retained."""
        return (self.above & ~(self.above << 1)).bit_count()

    def holes(self, most: int | None = None) -> list[tuple[int, int]]:
        """The missing ranges between the contiguous cursor and the highest, both ends included, in order.

        All of them, or the first `most`.
        """
        ranges: list[tuple[int, int]] = []
        first, bits = self.contiguous + 1, self.above
        while bits and len(ranges) != most:
            missing = _trailing_zeros(bits)
            ranges.append((first, first + missing - 1))
            bits >>= missing
            present = _trailing_ones(bits)
            bits >>= present
            first += missing + present
        return ranges


class Matches(Struct, frozen=True, gc=False):
    """What the stream retains under the envelope's names; None where nothing is."""

    identity_of_event: bytes | None
    """The event identity that is retained with the envelope's event id."""
    event_of_idempotency_key: bytes | None
    """The event id (16 bytes) that is retained with the envelope's idempotency key."""


class Judgement(Struct, frozen=True):
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
    if key is KeyState.REMOVED:
        return Judgement(Reason.KEY_UNKNOWN, cursor)
    if matches.identity_of_event == event_identity:
        return Judgement(Outcome.DUPLICATE, cursor)
    if retired:
        return Judgement(Reason.STREAM_RETIRED, cursor)
    if key is KeyState.REVOKED:
        return Judgement(Reason.KEY_REVOKED, cursor)
    if key is KeyState.VERIFY_ONLY:
        return Judgement(Reason.KEY_RETIRED, cursor)
    if matches.identity_of_event is not None:
        return Judgement(Reason.EVENT_CONFLICT, cursor)
    if matches.event_of_idempotency_key not in (None, event_id):
        return Judgement(Reason.IDEMPOTENCY_CONFLICT, cursor)
    if sequence <= cursor.floor:
        return Judgement(Reason.BELOW_REPLAY_FLOOR, cursor)
    if cursor.retains(sequence):
        return Judgement(Reason.SEQUENCE_CONFLICT, cursor)
    if sequence > cursor.contiguous + window:
        return Judgement(Reason.SEQUENCE_BEYOND_WINDOW, cursor)
    return Judgement(_outcome_of_new(cursor, sequence), cursor.retaining(sequence))


def _outcome_of_new(cursor: Cursor, sequence: int) -> Outcome:
    if sequence < cursor.highest:
        return Outcome.REORDERED
    if sequence == cursor.contiguous + 1:
        return Outcome.ACCEPTED
    return Outcome.GAP


def _settled(floor: int, contiguous: int, highest: int, above: int) -> Cursor:
    """The cursor advanced through all that is contiguous."""
    run = _trailing_ones(above)
    return Cursor(floor, contiguous + run, highest, above >> run)


def _trailing_ones(bits: int) -> int:
    return (~bits & (bits + 1)).bit_length() - 1


def _trailing_zeros(bits: int) -> int:
    return (bits & -bits).bit_length() - 1

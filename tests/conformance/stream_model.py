"""What a stream ought to answer, told from protocol section 5 alone, with a plain set of retained sequences."""

from dataclasses import dataclass, field
from typing import Any

WINDOW = 1024
NEW = {"accepted", "gap", "reordered"}


@dataclass
class Model:
    """One stream: its floor, and what is retained in it."""

    floor: int = 0
    sequences: set[int] = field(default_factory=set)
    identities: dict[str, str] = field(default_factory=dict)
    idempotency: dict[str, str] = field(default_factory=dict)

    @property
    def contiguous(self) -> int:
        """The greatest N, at least the floor, with all of (floor, N] retained."""
        reached = self.floor
        while reached + 1 in self.sequences:
            reached += 1
        return reached

    @property
    def highest(self) -> int:
        """The greatest retained sequence, or the floor."""
        return max(self.sequences | {self.floor})

    @property
    def missing(self) -> list[dict[str, int]]:
        """The ranges of holes between the cursor and the highest."""
        ranges: list[dict[str, int]] = []
        for hole in sorted(set(range(self.contiguous + 1, self.highest)) - self.sequences):
            if ranges and ranges[-1]["to"] == hole - 1:
                ranges[-1]["to"] = hole
            else:
                ranges.append({"from": hole, "to": hole})
        return ranges

    @property
    def cursor(self) -> dict[str, int]:
        """What answers say of the stream."""
        return {"contiguousThrough": self.contiguous, "highest": self.highest}

    def judge(self, event: dict[str, Any], identity: str) -> str:
        """The outcome or reason that this event ought to meet, under rules 1 and 4 to 9; new ones are retained."""
        name, key, sequence = event["eventId"], event["idempotencyKey"], event["sequence"]
        if self.identities.get(name) == identity:
            return "duplicate"
        if name in self.identities:
            return "event_conflict"
        if key in self.idempotency:
            return "idempotency_conflict"
        if sequence <= self.floor:
            return "below_replay_floor"
        if sequence in self.sequences:
            return "sequence_conflict"
        if sequence > self.contiguous + WINDOW:
            return "sequence_beyond_window"
        outcome = self.placed(sequence)
        self.sequences.add(sequence)
        self.identities[name] = identity
        self.idempotency[key] = name
        return outcome

    def placed(self, sequence: int) -> str:
        """Where a new sequence stands."""
        if sequence < self.highest:
            return "reordered"
        return "accepted" if sequence == self.contiguous + 1 else "gap"

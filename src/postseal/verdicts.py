"""What becomes of an envelope, as every adapter is told: a Receipt or a Refusal."""

from msgspec import Struct

from postseal.outcomes import Outcome, Reason


class Receipt(Struct, frozen=True, gc=False):
    """The acknowledgement of an envelope that is retained for certain."""

    outcome: Outcome
    event_identity: bytes
    sequence: int
    contiguous: int
    highest: int
    correlation_id: bytes


class Refusal(Struct, frozen=True, gc=False):
    """Why an envelope was not taken. `contiguous` and `highest` are there for refusals by the stream (advice)."""

    reason: Reason
    correlation_id: bytes
    detail: str = ""
    contiguous: int | None = None
    highest: int | None = None
    event_identity: bytes | None = None
    """For the log line; None where the refusal came before there was one."""


Verdict = Receipt | Refusal


def unavailable(correlation_id: bytes, event_identity: bytes | None = None) -> Refusal:
    """The refusal of what may or may not have been committed."""
    detail = "nothing is known to be committed; send it again"
    return Refusal(Reason.UNAVAILABLE, correlation_id, detail, event_identity=event_identity)

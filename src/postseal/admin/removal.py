"""What keeps a key from being removed, in words."""

from collections.abc import Sequence
from datetime import UTC, datetime

from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.rules.keys import Hold, HoldKind


def require_unheld(holds: Sequence[Hold]) -> None:
    """AdminError `conflict`, which names everything that holds the key, unless nothing does."""
    if holds:
        raise AdminError(Reason.CONFLICT, f"the key cannot be removed yet: {'; '.join(map(sentence, holds))}")


def sentence(hold: Hold) -> str:
    """One hold, and what ends it."""
    match hold.kind:
        case HoldKind.ACTIVE:
            return "it is active (rotate, retire or revoke it first)"
        case HoldKind.RETIRING:
            return f"it brings something new until {_time(hold.until)} (retire or revoke it to end that now)"
        case HoldKind.WINDOW:
            return f"its last envelope is too recent until {_time(hold.until)}"
        case HoldKind.PAYLOAD:
            return f"payloads in project {hold.place} that it signed are kept until {_time(hold.until)}"
        case HoldKind.HOLES:
            return f"sequences are missing in its stream in project {hold.place} (see `postseal stream show`)"
        case HoldKind.ENVELOPE:
            return f"envelopes for {hold.place} that it signed are kept"


def _time(until: datetime | None) -> str:
    return "-" if until is None else until.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")

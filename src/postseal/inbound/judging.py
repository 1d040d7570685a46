"""Judging a group: entries become verdicts, and the rows that must be committed before these are told.

Each envelope is judged after the earlier ones of its group, so that two with one name, or one sequence, meet as if each
had had a transaction of its own. Pure: the caller gives the randomness.
"""

from collections.abc import Sequence
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from postseal.identity.verified import VerifiedIdentity
from postseal.outcomes import Outcome, Reason
from postseal.postgres.ingest import AuditRow, LookupNames, OpenGroup, RetainedRow, StreamKey
from postseal.rules.keys import KeyState
from postseal.rules.stream import Cursor, Matches, judge
from postseal.verdicts import Receipt, Refusal, Verdict

SALT_BYTES = 16
REFUSED = "refused"


class Arrival(Struct, frozen=True, gc=False):
    """An envelope that passed checks 1 to 4 and is to be judged under its stream's lock."""

    caller: VerifiedIdentity
    project: str
    names: LookupNames
    sequence: int
    event_identity: bytes
    payload: bytes
    signature: bytes
    correlation_id: bytes

    def __repr__(self) -> str:
        return f"Arrival({self.event_identity.hex()})"  # neither payload nor signature may get into a log


class AuditOnly(Struct, frozen=True, gc=False):
    """A refusal from before check 5: nothing of it is committed but its audit event."""

    caller: VerifiedIdentity
    reason: Reason
    correlation_id: bytes
    project: str | None = None
    event_identity: bytes | None = None
    undecodable: bool = False
    occurrences: int = 1
    detail: str = ""


Entry = Arrival | AuditOnly


class Ledger:
    """What one group answers, and what it writes first. `cursors` holds the streams that moved."""

    def __init__(self, group: OpenGroup, *, window: int, default_retention_s: int, salts: bytes) -> None:
        self._group = group
        self._window = window
        self._default_retention_s = default_retention_s
        self._salts = salts
        # What the next envelopes of this group find retained, beside what the database does.
        self._identity_of_event: dict[tuple[StreamKey, bytes], bytes] = dict(group.identity_of_event)
        self._event_of_hash: dict[tuple[StreamKey, bytes], bytes] = dict(group.event_of_idempotency_hash)
        self.verdicts: list[Verdict] = []
        self.retained: list[RetainedRow] = []
        self.audits: list[AuditRow] = []
        self.cursors: dict[StreamKey, Cursor] = {}

    @classmethod
    def of(
        cls, entries: Sequence[Entry], group: OpenGroup, *, window: int, default_retention_s: int, salts: bytes
    ) -> Self:
        """Judge `entries` in their order; `salts` has SALT_BYTES for each."""
        ledger = cls(group, window=window, default_retention_s=default_retention_s, salts=salts)
        for entry in entries:
            match entry:
                case Arrival():
                    ledger._judge(entry)
                case AuditOnly():
                    ledger._refuse(entry)
        return ledger

    def _judge(self, arrival: Arrival) -> None:
        names, key = arrival.names, arrival.names.stream
        stream = self._group.streams[key]
        cursor = self.cursors.get(key, stream.cursor)
        judgement = judge(
            cursor,
            event_id=names.event_id,
            event_identity=arrival.event_identity,
            sequence=arrival.sequence,
            matches=Matches(
                self._identity_of_event.get((key, names.event_id)),
                self._event_of_hash.get((key, names.idempotency_hash)),
            ),
            retired=stream.retired,
            key=self._group.keys.get((key.tenant, names.keyid), KeyState.REMOVED),
            window=self._window,
        )
        if judgement.is_new:
            self.cursors[key] = cursor = judgement.cursor
            self._retain(arrival, self._default_retention_s if stream.retention_s is None else stream.retention_s)
        self._answer(arrival, judgement.answer, cursor)

    def _retain(self, arrival: Arrival, retention_s: int) -> None:
        names, key = arrival.names, arrival.names.stream
        self._identity_of_event[key, names.event_id] = arrival.event_identity
        self._event_of_hash[key, names.idempotency_hash] = names.event_id
        self.retained.append(
            RetainedRow(
                names, arrival.sequence, arrival.event_identity, arrival.payload, arrival.signature, retention_s
            )
        )

    def _answer(self, arrival: Arrival, answer: Outcome | Reason, cursor: Cursor) -> None:
        identity, correlation_id = arrival.event_identity, arrival.correlation_id
        if isinstance(answer, Outcome):
            self._audit(arrival, arrival.project, answer.value, None, identity)
            self.verdicts.append(
                Receipt(answer, identity, arrival.sequence, cursor.contiguous, cursor.highest, correlation_id)
            )
        else:
            self._audit(arrival, arrival.project, REFUSED, answer.value, identity)
            refusal = Refusal(answer, correlation_id, event_identity=identity)
            if answer is not Reason.KEY_UNKNOWN:  # which is no fault of the stream
                refusal = replace(refusal, contiguous=cursor.contiguous, highest=cursor.highest)
            self.verdicts.append(refusal)

    def _refuse(self, entry: AuditOnly) -> None:
        identity = entry.event_identity
        self._audit(entry, entry.project, REFUSED, entry.reason.value, identity, entry.undecodable, entry.occurrences)
        self.verdicts.append(Refusal(entry.reason, entry.correlation_id, entry.detail, event_identity=identity))

    def _audit(
        self,
        entry: Entry,
        project: str | None,
        outcome: str,
        reason: str | None,
        event_identity: bytes | None,
        undecodable: bool = False,
        occurrences: int = 1,
    ) -> None:
        caller, at = entry.caller, SALT_BYTES * len(self.audits)
        self.audits.append(
            AuditRow(
                caller.tenant,
                project,
                caller.account,
                caller.device,
                outcome,
                reason,
                event_identity,
                undecodable,
                occurrences,
                entry.correlation_id,
                self._salts[at : at + SALT_BYTES],
            )
        )

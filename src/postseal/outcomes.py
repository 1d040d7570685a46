"""The public, stable words with which an envelope is answered (protocol section 5)."""

from enum import StrEnum


class Outcome(StrEnum):
    """How an acknowledged envelope stands in its stream."""

    DUPLICATE = "duplicate"
    REORDERED = "reordered"
    ACCEPTED = "accepted"
    GAP = "gap"


class Reason(StrEnum):
    """Why a request was refused. In the order in which the checks are made: the earliest that fails decides."""

    BODY_TOO_LARGE = "body_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    PEER_RATE_LIMITED = "peer_rate_limited"
    UNAUTHENTICATED = "unauthenticated"
    SYNC_RATE_LIMITED = "sync_rate_limited"
    ROLE_FORBIDDEN = "role_forbidden"
    ENVELOPE_MALFORMED = "envelope_malformed"
    ROUTE_MISMATCH = "route_mismatch"
    IDENTITY_OUT_OF_BOUNDS = "identity_out_of_bounds"
    KEY_UNKNOWN = "key_unknown"
    SIGNATURE_INVALID = "signature_invalid"
    SCHEMA_VERSION_UNSUPPORTED = "schema_version_unsupported"
    PAYLOAD_INVALID = "payload_invalid"
    STREAM_RETIRED = "stream_retired"
    KEY_REVOKED = "key_revoked"
    KEY_RETIRED = "key_retired"
    EVENT_CONFLICT = "event_conflict"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    BELOW_REPLAY_FLOOR = "below_replay_floor"
    SEQUENCE_CONFLICT = "sequence_conflict"
    SEQUENCE_BEYOND_WINDOW = "sequence_beyond_window"
    UNAVAILABLE = "unavailable"
    # Problems of the HTTP surface that no envelope meets.
    ENROLMENT_REFUSED = "enrolment_refused"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_INVALID = "request_invalid"
    CONFLICT = "conflict"
    IDEMPOTENCY_KEY_MISSING = "idempotency_key_missing"
    DESTINATION_FULL = "destination_full"
    SIGNING_UNAVAILABLE = "signing_unavailable"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later without any change to it."""
        return self in _RETRYABLE


_OF_OTHER_CALLS = frozenset(
    {
        Reason.ENROLMENT_REFUSED,
        Reason.NOT_FOUND,
        Reason.METHOD_NOT_ALLOWED,
        Reason.REQUEST_INVALID,
        Reason.CONFLICT,
        Reason.IDEMPOTENCY_KEY_MISSING,
        Reason.DESTINATION_FULL,
        Reason.SIGNING_UNAVAILABLE,
    }
)

REASONS_OF_ENVELOPES = tuple(reason for reason in Reason if reason not in _OF_OTHER_CALLS)
"""Why an envelope can be refused; all others belong to other calls."""

_RETRYABLE = frozenset(
    {
        Reason.REQUEST_TIMEOUT,
        Reason.PEER_RATE_LIMITED,
        Reason.SYNC_RATE_LIMITED,
        Reason.SEQUENCE_BEYOND_WINDOW,
        Reason.UNAVAILABLE,
        Reason.DESTINATION_FULL,
        Reason.SIGNING_UNAVAILABLE,
    }
)

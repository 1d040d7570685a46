"""What an answer has to look like, word by word from protocol sections 5, 6 and 10."""

import re
from typing import Any
from uuid import UUID

from client import PROBLEM, Answer, Device, event_identity, undecodable_identity

ACKNOWLEDGED = {"duplicate": 200, "reordered": 201, "accepted": 201, "gap": 201}

REFUSED = {
    "body_too_large": (413, False),
    "request_timeout": (408, True),
    "unsupported_media_type": (415, False),
    "peer_rate_limited": (429, True),
    "unauthenticated": (401, False),
    "sync_rate_limited": (429, True),
    "role_forbidden": (403, False),
    "envelope_malformed": (400, False),
    "route_mismatch": (403, False),
    "identity_out_of_bounds": (422, False),
    "key_unknown": (403, False),
    "signature_invalid": (403, False),
    "schema_version_unsupported": (422, False),
    "payload_invalid": (422, False),
    "stream_retired": (403, False),
    "key_revoked": (403, False),
    "key_retired": (403, False),
    "event_conflict": (409, False),
    "idempotency_conflict": (409, False),
    "below_replay_floor": (409, False),
    "sequence_conflict": (409, False),
    "sequence_beyond_window": (409, True),
    "unavailable": (503, True),
    "enrolment_refused": (403, False),
    "not_found": (404, False),
    "method_not_allowed": (405, False),
    "request_invalid": (400, False),
}
"""Reason: status, retryable."""

UNDER_THE_LOCK = {
    "stream_retired",
    "key_revoked",
    "key_retired",
    "event_conflict",
    "idempotency_conflict",
    "below_replay_floor",
    "sequence_conflict",
    "sequence_beyond_window",
}

ANY_IDENTITY = "of what had come of the body when the adapter refused it"

LIMITS = {"peer_rate_limited": "peer", "sync_rate_limited": "sync"}


def assert_acknowledged(answer: Answer, outcome: str, payload: bytes, sequence: int, cursor: dict[str, int]) -> None:
    """The acknowledgement of this payload, with this outcome and exactly the members of section 5."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.status == ACKNOWLEDGED[outcome], answer
    assert answer.body == cursor | {
        "outcome": outcome,
        "eventIdentity": event_identity(payload),
        "sequence": sequence,
        "correlationId": answer.body["correlationId"],
    }
    assert UUID(answer.body["correlationId"]).version == 7


def assert_refused(answer: Answer, reason: str, cursor: dict[str, int] | None = None) -> None:
    """A problem with this reason, its headers, and a cursor if and only if a stream was looked at."""
    assert answer.headers["content-type"] == PROBLEM
    assert answer.status == REFUSED[reason][0], answer
    assert_problem(answer.body, reason, cursor)
    assert ("www-authenticate" in answer.headers) == (reason == "unauthenticated")
    assert ("retry-after" in answer.headers) == (answer.status in {429, 503})
    assert ("ratelimit" in answer.headers) == (answer.status == 429)
    if reason == "unauthenticated":
        assert answer.headers["www-authenticate"] == "Bearer"
    if answer.status in {429, 503}:
        assert int(answer.headers["retry-after"]) >= 1
    if reason in LIMITS:
        assert re.fullmatch(rf'"{LIMITS[reason]}";r=\d+;t=\d+', answer.headers["ratelimit"])
        assert re.fullmatch(rf'"{LIMITS[reason]}";q=\d+;w=\d+', answer.headers["ratelimit-policy"])


def assert_problem(body: dict[str, Any], reason: str, cursor: dict[str, int] | None = None) -> None:
    """The members of a problem; `detail` may be there."""
    status, retryable = REFUSED[reason]
    assert {name: value for name, value in body.items() if name != "detail"} == (cursor or {}) | {
        "type": f"/problems/{reason}",
        "title": body["title"],
        "status": status,
        "reason": reason,
        "retryable": retryable,
        "correlationId": body["correlationId"],
    }
    assert body["title"]
    assert UUID(body["correlationId"]).version == 7


def audited(device: Device, word: str, project: str | None, identity: str | None, *, undecodable: bool = False) -> Any:
    """The audit event of one answer, without its id, time and correlation id."""
    return {
        "project": project,
        "account": device.name,
        "device": device.name,
        "action": "envelope",
        "outcome": "refused" if word in REFUSED else word,
        "reason": word if word in REFUSED else None,
        "eventIdentity": identity,
        "undecodable": undecodable,
        "occurrences": 1,
        "detail": None,
    }


def audited_undecodable(device: Device, reason: str, body: bytes) -> Any:
    """The audit event of a refusal that looked at no event."""
    return audited(device, reason, None, undecodable_identity(body), undecodable=True)


def told(row: dict[str, Any]) -> dict[str, Any]:
    """An audit event in the shape of `audited`."""
    return {name: value for name, value in row.items() if name not in {"id", "atMs", "correlationId"}}

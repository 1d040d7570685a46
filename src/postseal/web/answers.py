"""What is written back: acknowledgements, problems, and the fields that say when to come again.

Each outcome and reason has its usual HTTP status here (protocol section 5); what only HTTP can break, as a head that is
too large, is given its own where it is refused. A problem is RFC 9457 `application/problem+json`; its `type` is the URI
reference `/problems/<reason>`, which stays as it is for as long as the reason does. RateLimit and RateLimit-Policy
follow draft-ietf-httpapi-ratelimit-headers-10: `"sync";q=10000;w=5` and `"sync";r=0;t=1`.
"""

import math
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Send

from postseal import correlation
from postseal.door import RateLimited
from postseal.errors import Refused
from postseal.limits import Quota
from postseal.outbound.wishes import DestinationFull
from postseal.outcomes import Outcome, Reason
from postseal.verdicts import Receipt, Refusal, Verdict

Header = tuple[bytes, bytes]

RETRY_S = {
    # A lost connection is made anew within a second; a longer outage only costs the caller one more try.
    Reason.UNAVAILABLE: 1,
    # What a key or a full destination lacks takes somebody's doing.
    Reason.SIGNING_UNAVAILABLE: 5,
    Reason.DESTINATION_FULL: 5,
}
"""After how many seconds it is worth trying again."""

_STATUS_OF_OUTCOME = {
    Outcome.DUPLICATE: 200,
    Outcome.REORDERED: 201,
    Outcome.ACCEPTED: 201,
    Outcome.GAP: 201,
}

_STATUS_AND_TITLE_OF_REASON = {
    Reason.BODY_TOO_LARGE: (413, "The body is too large"),
    Reason.REQUEST_TIMEOUT: (408, "The request did not arrive in time"),
    Reason.UNSUPPORTED_MEDIA_TYPE: (415, "The media type or content encoding is not supported"),
    Reason.PEER_RATE_LIMITED: (429, "Too many unknown credentials from this address"),
    Reason.UNAUTHENTICATED: (401, "The credential is not valid"),
    Reason.SYNC_RATE_LIMITED: (429, "Too many envelopes from this device"),
    Reason.ROLE_FORBIDDEN: (403, "The credential's role may not do this"),
    Reason.ENVELOPE_MALFORMED: (400, "The envelope is malformed"),
    Reason.ROUTE_MISMATCH: (403, "The route is not the caller's"),
    Reason.IDENTITY_OUT_OF_BOUNDS: (422, "A member that names the event is out of bounds"),
    Reason.KEY_UNKNOWN: (403, "The signing key is not known"),
    Reason.SIGNATURE_INVALID: (403, "The signature does not hold"),
    Reason.SCHEMA_VERSION_UNSUPPORTED: (422, "The protocol or schema version is not supported"),
    Reason.PAYLOAD_INVALID: (422, "The payload is not valid"),
    Reason.STREAM_RETIRED: (403, "The stream is retired"),
    Reason.KEY_REVOKED: (403, "The signing key is revoked"),
    Reason.KEY_RETIRED: (403, "The signing key is retired"),
    Reason.EVENT_CONFLICT: (409, "The event id is taken by another event"),
    Reason.IDEMPOTENCY_CONFLICT: (409, "The idempotency key is taken by another event"),
    Reason.BELOW_REPLAY_FLOOR: (409, "The sequence is not above the replay floor"),
    Reason.SEQUENCE_CONFLICT: (409, "The sequence is taken by another event"),
    Reason.SEQUENCE_BEYOND_WINDOW: (409, "The sequence is too far ahead"),
    Reason.UNAVAILABLE: (503, "Nothing is known to be committed"),
    Reason.ENROLMENT_REFUSED: (403, "The enrolment is refused"),
    Reason.NOT_FOUND: (404, "There is no such thing"),
    Reason.METHOD_NOT_ALLOWED: (405, "The method is not allowed here"),
    Reason.REQUEST_INVALID: (400, "The request is not valid"),
    Reason.CONFLICT: (409, "The request conflicts with what is there"),
    Reason.IDEMPOTENCY_KEY_MISSING: (400, "The request has no idempotency key"),
    Reason.DESTINATION_FULL: (429, "Too much is pending for this destination"),
    Reason.SIGNING_UNAVAILABLE: (503, "Nothing can be signed at the moment"),
}

_JSON: Final[Header] = (b"content-type", b"application/json")
_NDJSON: Final[Header] = (b"content-type", b"application/x-ndjson")
_PROBLEM: Final[Header] = (b"content-type", b"application/problem+json")
_NO_STORE: Final[Header] = (b"cache-control", b"no-store")


class Acknowledgement(Struct, frozen=True, kw_only=True, rename="camel"):
    """The body of an acknowledgement; `status` is there in the lines of a batch only."""

    status: int | UnsetType = UNSET
    outcome: Outcome
    event_identity: str
    sequence: int
    contiguous_through: int
    highest: int
    correlation_id: str


class Problem(Struct, frozen=True, rename="camel"):
    """The body of a refusal (RFC 9457). The cursors are there for faults of the stream only."""

    type: str
    title: str
    status: int
    reason: Reason
    retryable: bool
    correlation_id: str
    detail: str | UnsetType = UNSET
    contiguous_through: int | UnsetType = UNSET
    highest: int | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, its length left to be counted."""

    status: int
    headers: tuple[Header, ...]
    body: bytes


def status_of(reason: Reason) -> int:
    """The usual HTTP status of a reason."""
    return _STATUS_AND_TITLE_OF_REASON[reason][0]


def of_verdict(verdict: Verdict) -> Answer:
    """The answer to one envelope."""
    if isinstance(verdict, Refusal):
        return of_refusal(verdict)
    body = msgspec.json.encode(_acknowledgement(verdict, UNSET))
    return Answer(_STATUS_OF_OUTCOME[verdict.outcome], (_JSON,), body)


def problem(refusal: Refusal, status: int | None = None) -> Problem:
    """The body of a refusal."""
    usual_status, title = _STATUS_AND_TITLE_OF_REASON[refusal.reason]
    return Problem(
        f"/problems/{refusal.reason}",
        title,
        status or usual_status,
        refusal.reason,
        refusal.reason.retryable,
        correlation.text(refusal.correlation_id),
        refusal.detail or UNSET,
        UNSET if refusal.contiguous is None else refusal.contiguous,
        UNSET if refusal.highest is None else refusal.highest,
    )


def of_batch(verdicts: list[Verdict]) -> Answer:
    """The answer to a batch: 200 and, a line each and in order, what a single answer would have said."""
    lines = [
        msgspec.json.encode(
            problem(verdict)
            if isinstance(verdict, Refusal)
            else _acknowledgement(verdict, _STATUS_OF_OUTCOME[verdict.outcome])
        )
        for verdict in verdicts
    ]
    lines.append(b"")
    return Answer(200, (_NDJSON,), b"\n".join(lines))


def of_refusal(refusal: Refusal, *headers: Header, status: int | None = None) -> Answer:
    """The problem of a refusal. `status` is for the few faults of HTTP that share a reason with others."""
    body = problem(refusal, status)
    fields: tuple[Header, ...] = (_PROBLEM, _NO_STORE, *headers)
    if body.status == 401:  # noqa: PLR2004 - the status is the name here
        fields += ((b"www-authenticate", b"Bearer"),)
    if refusal.reason in RETRY_S:
        fields += ((b"retry-after", b"%d" % RETRY_S[refusal.reason]),)
    return Answer(body.status, fields, msgspec.json.encode(body))


def of_refused(refused: Refused, correlation_id: bytes, *headers: Header) -> Answer:
    """The problem of what a flow raised."""
    refusal = Refusal(refused.reason, correlation_id, refused.detail)
    if isinstance(refused, RateLimited):
        name = b"peer" if refused.reason is Reason.PEER_RATE_LIMITED else b"sync"
        headers += _rate_limit(name, refused.quota)
    if isinstance(refused, DestinationFull):
        headers += _full(refused.max_pending)
    return of_refusal(refusal, *headers)


async def send_answer(send: Send, answer: Answer) -> None:
    """Write an answer."""
    headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _acknowledgement(receipt: Receipt, status: int | UnsetType) -> Acknowledgement:
    return Acknowledgement(
        status=status,
        outcome=receipt.outcome,
        event_identity=receipt.event_identity.hex(),
        sequence=receipt.sequence,
        contiguous_through=receipt.contiguous,
        highest=receipt.highest,
        correlation_id=correlation.text(receipt.correlation_id),
    )


def _rate_limit(name: bytes, quota: Quota) -> tuple[Header, ...]:
    retry_after_s = max(1, math.ceil(quota.retry_after_s))
    window_s = max(1, math.ceil(quota.window_s))
    return (
        (b"retry-after", b"%d" % retry_after_s),
        (b"ratelimit-policy", b'"%b";q=%d;w=%d' % (name, quota.limit, window_s)),
        (b"ratelimit", b'"%b";r=%d;t=%d' % (name, quota.remaining, retry_after_s)),
    )


def _full(max_pending: int) -> tuple[Header, ...]:
    return (
        (b"ratelimit-policy", b'"pending";q=%d' % max_pending),
        (b"ratelimit", b'"pending";r=0;t=%d' % RETRY_S[Reason.DESTINATION_FULL]),
    )

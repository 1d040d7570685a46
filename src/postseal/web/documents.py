"""The JSON documents that are read: names as on the wire, times in milliseconds since 1970.

Their types and docstrings are what /openapi.json says of them.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field
from starlette.responses import Response

from postseal.enrolment import Enrolled
from postseal.envelope import base64url, dsse
from postseal.inbound import reading
from postseal.inbound.reading import Page
from postseal.outbound.wishes import LATEST_MS
from postseal.postgres.reading import EnvelopeRow, KeyRow
from postseal.postgres.streams import Stream

SCHEMAS: Final = "#/components/schemas/"
"""Where /openapi.json keeps the schemas of documents, each under its type's name."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

MAX_RANGES_IN_LISTS: Final = 100
"""A page of 1000 streams, each with a hole at every other sequence, would else keep the event loop for seconds."""


class Nothing(Struct, frozen=True):
    """A query without parameters, or a body that is not there."""


class Range(Struct, frozen=True):
    """Sequences, both ends included."""

    first: int = field(name="from")
    last: int = field(name="to")


class StreamStanding(Struct, frozen=True, rename="camel"):
    """Where a stream stands. Cursors are advice: only an acknowledgement lets go of an envelope.

    In a list `missing` has at most the first 100 ranges; if there are more, `missingRanges` says how many.
    """

    project: str
    producer: str
    contiguous_through: int
    highest: int
    replay_floor: int
    next_sequence: int
    missing: list[Range]
    retired: bool
    missing_ranges: int | UnsetType = UNSET


class StreamList(Struct, frozen=True):
    """Streams in the order of their producers; `next` is the `after` of the next page, null at the end."""

    items: list[StreamStanding]
    next: str | None


class RetainedEnvelope(Struct, frozen=True, rename="camel"):
    """An envelope as it was signed."""

    sequence: int
    event_identity: str
    accepted_at_ms: int
    envelope: Annotated[msgspec.Raw, Meta(extra_json_schema={"$ref": f"{SCHEMAS}Envelope"})]


class ExpiredEnvelope(Struct, frozen=True, rename="camel"):
    """An envelope whose payload and signature expired."""

    sequence: int
    event_identity: str
    expired: Literal[True] = True


class ClosedRange(Struct, frozen=True):
    """Sequences that will never be there, both ends included: the replay floor rose over them."""

    first: int = field(name="from")
    last: int = field(name="to")
    closed: Literal[True] = True


Item = RetainedEnvelope | ExpiredEnvelope | ClosedRange
ITEM_TYPES: Final = (RetainedEnvelope, ExpiredEnvelope, ClosedRange)


class EnvelopePage(Struct, frozen=True, rename="camel"):
    """What a stream holds, in order, through the contiguous cursor; `next` is the `after` of the next page."""

    # For msgspec they are Any: it reads a union of objects only where a member of all tells them apart.
    items: list[Annotated[Any, Meta(extra_json_schema={"anyOf": [{"$ref": SCHEMAS + t.__name__} for t in ITEM_TYPES]})]]
    contiguous_through: int
    next: int


class ProducerKey(Struct, frozen=True, rename="camel"):
    """A public key; `acceptUntilMs` is there while it retires, `publicKey` is in base64url."""

    keyid: str
    public_key: str
    state: str
    registered_at_ms: int
    changed_at_ms: int
    accept_until_ms: int | UnsetType = UNSET


class ProducerKeyList(Struct, frozen=True):
    """The keys with which a producer's envelopes are verified, oldest first, removed ones included."""

    items: list[ProducerKey]


class EnrolledDevice(Struct, frozen=True, rename="camel"):
    """What a new device is told; the credential is shown this once."""

    tenant: str
    device: str
    projects: list[str]
    keyid: str
    credential: str
    expires_at_ms: int


class Health(Struct, frozen=True):
    """How the process is."""

    status: Literal["ok", "ready"]


def json_response(document: Struct, status: int = 200) -> Response:
    """A document that no cache keeps."""
    return Response(
        msgspec.json.encode(document), status, media_type="application/json", headers={"cache-control": "no-store"}
    )


def of_stream(stream: Stream, *, most_ranges: int | None = None) -> StreamStanding:
    """Where a stream stands, with all missing ranges or the first `most_ranges`."""
    cursor = stream.cursor
    return StreamStanding(
        stream.project,
        stream.producer,
        cursor.contiguous,
        cursor.highest,
        cursor.floor,
        cursor.highest + 1,
        [Range(first, last) for first, last in cursor.holes(most_ranges)],
        stream.retired,
        cursor.hole_count if most_ranges is not None and cursor.hole_count > most_ranges else UNSET,
    )


def of_streams(streams: list[Stream], limit: int) -> StreamList:
    """A page of at most `limit` streams."""
    items = [of_stream(stream, most_ranges=MAX_RANGES_IN_LISTS) for stream in streams]
    return StreamList(items, streams[-1].producer if len(streams) == limit else None)


def of_page(page: Page) -> EnvelopePage:
    """A page of envelopes."""
    return EnvelopePage([_of_item(item) for item in page.items], page.contiguous, page.next_after)


def of_key(key: KeyRow) -> ProducerKey:
    """A public key."""
    return ProducerKey(
        key.keyid,
        base64url.encode(key.public_key),
        key.state,
        milliseconds(key.registered_at),
        milliseconds(key.changed_at),
        UNSET if key.accept_until is None else milliseconds(key.accept_until),
    )


def of_enrolled(enrolled: Enrolled) -> EnrolledDevice:
    """What a new device is told."""
    return EnrolledDevice(
        enrolled.tenant,
        enrolled.device,
        enrolled.projects,
        enrolled.keyid,
        enrolled.credential,
        milliseconds(enrolled.expires_at),
    )


TimeMs = Annotated[int, Meta(ge=0, le=LATEST_MS)]
"""Milliseconds since 1970."""


def milliseconds(at: datetime) -> int:
    """Milliseconds since 1970."""
    return int(at.timestamp() * 1000)


def time_of(at_ms: int | UnsetType) -> datetime | None:
    """The time that was told in milliseconds, if one was."""
    return None if at_ms is UNSET else EPOCH + timedelta(milliseconds=at_ms)


def _of_item(item: EnvelopeRow | reading.ClosedRange) -> Item:
    if isinstance(item, reading.ClosedRange):
        return ClosedRange(item.first, item.last)
    identity = item.event_identity.hex()
    if item.payload is None or item.signature is None:
        return ExpiredEnvelope(item.sequence, identity)
    envelope = msgspec.Raw(dsse.wrap(item.payload, item.keyid, item.signature))
    return RetainedEnvelope(item.sequence, identity, milliseconds(item.accepted_at), envelope)

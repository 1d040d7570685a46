"""The JSON documents that are read: names as on the wire, times in milliseconds since 1970."""

import base64
from datetime import datetime
from typing import Any

import msgspec
from starlette.responses import Response

from postseal.enrolment import Enrolled
from postseal.envelope import dsse
from postseal.postgres.reading import EnvelopeRow, KeyRow, StreamRow
from postseal.reading import Closed, Page


def json_response(document: dict[str, Any]) -> Response:
    """A document that no cache keeps."""
    return Response(msgspec.json.encode(document), media_type="application/json", headers={"cache-control": "no-store"})


def of_stream(project: str, stream: StreamRow) -> dict[str, Any]:
    """Where a stream stands."""
    cursor = stream.cursor
    return {
        "project": project,
        "producer": stream.producer,
        "contiguousThrough": cursor.contiguous,
        "highest": cursor.highest,
        "replayFloor": cursor.floor,
        "nextSequence": cursor.highest + 1,
        "missing": [{"from": first, "to": last} for first, last in cursor.holes()],
        "retired": stream.retired,
    }


def of_page(page: Page) -> dict[str, Any]:
    """Envelopes in order; `next` is what the next page comes after."""
    return {
        "items": [_of_item(item) for item in page.items],
        "contiguousThrough": page.contiguous,
        "next": page.next_after,
    }


def of_key(key: KeyRow) -> dict[str, Any]:
    """A public key; `acceptUntilMs` is there while it retires."""
    document = {
        "keyid": key.keyid,
        "publicKey": base64url(key.public_key),
        "state": key.state,
        "registeredAtMs": milliseconds(key.registered_at),
        "changedAtMs": milliseconds(key.changed_at),
    }
    if key.accept_until is not None:
        document["acceptUntilMs"] = milliseconds(key.accept_until)
    return document


def of_enrolled(enrolled: Enrolled) -> dict[str, Any]:
    """What a new device is told, this once."""
    return {
        "tenant": enrolled.tenant,
        "device": enrolled.device,
        "projects": enrolled.projects,
        "keyid": enrolled.keyid,
        "credential": enrolled.credential,
        "expiresAtMs": milliseconds(enrolled.expires_at),
    }


def milliseconds(at: datetime) -> int:
    """Milliseconds since 1970."""
    return int(at.timestamp() * 1000)


def base64url(raw: bytes) -> str:
    """Base64url without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _of_item(item: EnvelopeRow | Closed) -> dict[str, Any]:
    if isinstance(item, Closed):
        return {"from": item.first, "to": item.last, "closed": True}
    document: dict[str, Any] = {"sequence": item.sequence, "eventIdentity": item.event_identity.hex()}
    if item.payload is None or item.signature is None:
        return document | {"expired": True}
    envelope = msgspec.Raw(dsse.wrap(item.payload, item.keyid, item.signature))
    return document | {"acceptedAtMs": milliseconds(item.accepted_at), "envelope": envelope}

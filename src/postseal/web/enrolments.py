"""`POST /v1/enrolments`: a one-time code, a public key and its proof become a device's credential.

Every attempt is charged to its network peer before its body is read, and given back when it spent a code: a code has
too many random bits to be guessed, but a guess costs us the verification of a signature, and a code that is used again
writes rows besides.
"""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from postseal.door import Door
from postseal.enrolment import enrol
from postseal.envelope import base64url
from postseal.errors import Refused, Unavailable
from postseal.outcomes import Reason
from postseal.postgres.database import Database
from postseal.web import documents
from postseal.web.body import HeldBytes, receive_body
from postseal.web.calls import JSON, Call, Content, decode_body, responding, said
from postseal.web.head import read_head
from postseal.web.peer import TrustedProxies

MAX_ENROLMENT_BYTES = 4096


class Enrolment(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A one-time code, a new Ed25519 public key and its proof, the latter two in base64url."""

    code: Annotated[str, Meta(min_length=1, max_length=200)]
    public_key: Annotated[str, Meta(min_length=43, max_length=43)]
    proof: Annotated[str, Meta(min_length=86, max_length=86)]


class EnrolmentCalls:
    """Enrolment over HTTP. `database` is the administrators' part."""

    def __init__(
        self,
        *,
        database: Database,
        door: Door,
        proxies: TrustedProxies,
        held: HeldBytes,
        credential_lifetime_s: int,
        max_pending: int,
    ) -> None:
        self._database = database
        self._door = door
        self._proxies = proxies
        self._held = held
        self._credential_lifetime_s = credential_lifetime_s
        self._max_pending = max_pending

    def calls(self) -> list[Call]:
        """The one there is. For anyone with a code, so that no credential is asked for."""
        return [
            Call(
                "POST",
                "/v1/enrolments",
                said(self.post),
                responding(self.post),
                takes=Content(JSON, Enrolment),
                answers={200: (Content(JSON, documents.EnrolledDevice),)},
                reasons=(Reason.PEER_RATE_LIMITED, Reason.ENROLMENT_REFUSED),
            )
        ]

    async def post(self, request: Request) -> Response:
        """Enrol a device with a one-time code."""
        head = read_head(request.scope, self._proxies)
        charged = self._door.charge(head.peer)
        held = self._held.of(charged)
        body = await receive_body(
            request.scope,
            request.receive,
            head,
            media_type=JSON.encode(),
            cap_bytes=MAX_ENROLMENT_BYTES,
            held=held,
        )
        try:
            wanted = decode_body(body, Enrolment)
            enrolled = await enrol(
                self._database,
                code=wanted.code,
                public_key=_from_base64url(wanted.public_key),
                proof=_from_base64url(wanted.proof),
                credential_lifetime_s=self._credential_lifetime_s,
                max_pending=self._max_pending,
            )
        except Unavailable:
            self._door.give_back(charged)  # an outage is nobody's guess at a code
            raise
        finally:
            held.release(len(body))
        if not enrolled.again:
            self._door.give_back(charged)
        return documents.json_response(documents.of_enrolled(enrolled))


def _from_base64url(text: str) -> bytes:
    try:
        return base64url.decode(text)
    except ValueError:
        raise Refused(Reason.REQUEST_INVALID, "publicKey and proof must be in base64url without padding") from None

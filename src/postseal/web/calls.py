"""The calls of the HTTP surface: each is one Call, from which both its route and its part of /openapi.json are made.

A Reception makes those that take and answer JSON. In this order, and the first fault decides:

1. the caller, by credential; 2. the role; 3. what stands in the path; 4. the query; 5. the body; 6. the work itself
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from postseal.door import Door, require_role
from postseal.errors import Refused
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.outcomes import Reason
from postseal.web.body import HeldBytes, receive_body
from postseal.web.documents import Nothing, json_response
from postseal.web.head import read_head
from postseal.web.peer import TrustedProxies
from postseal.web.query import broken_rule, read_path, read_query
from postseal.web.refusals import CALLER

JSON: Final = "application/json"
MAX_BODY_BYTES: Final = 16 * 1024

Q = TypeVar("Q", bound=Struct)
B = TypeVar("B", bound=Struct)
A = TypeVar("A", bound=Struct)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Content:
    """One form that a body can have: its media type, and a type or a JSON Schema that describes it."""

    media_type: str
    form: type[Struct] | tuple[type[Struct], ...] | dict[str, Any]
    """A tuple of types is one of them."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and all that is said of it. Without roles it is for anyone."""

    method: str
    path: str
    summary: str
    handle: ASGIApp = field(repr=False)
    roles: tuple[Role, ...] = ()
    query: type[Struct] = Nothing
    headers: type[Struct] = Nothing
    takes: Content | None = None
    answers: Mapping[int, tuple[Content, ...]] = field(default_factory=dict[int, tuple[Content, ...]])
    """What a success answers, by status."""
    reasons: tuple[Reason, ...] = ()
    """Why it can be refused, beside what any call is refused for that has these roles, query and body."""


@dataclass(frozen=True, slots=True)
class Asked(Generic[Q, B]):
    """A request whose caller is known and whose parts hold."""

    caller: VerifiedIdentity
    path: dict[str, str]
    query: Q
    body: B
    request: Request
    peer: str
    credential: str | None = field(repr=False)


def said(function: Callable[..., Any]) -> str:
    """What a function's docstring says of it: the summary of its call."""
    return " ".join((function.__doc__ or "").split())


def responding(endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """`endpoint` as ASGI."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)

    return handle


class Reception:
    """Takes requests in for calls, and writes their answers."""

    def __init__(self, door: Door, proxies: TrustedProxies, held: HeldBytes) -> None:
        self._door = door
        self._proxies = proxies
        self._held = held

    def read(
        self,
        path: str,
        work: Callable[[Asked[Q, Nothing]], Awaitable[A]],
        *,
        roles: tuple[Role, ...],
        query: type[Q],
        answer: type[A],
        reasons: tuple[Reason, ...] = (),
    ) -> Call:
        """A GET that answers one document."""
        answers = {200: (Content(JSON, answer),)}
        return self._call("GET", path, work, json_response, roles, query, _no_body, answers=answers, reasons=reasons)

    def change(
        self,
        path: str,
        work: Callable[[Asked[Nothing, B]], Awaitable[A]],
        *,
        roles: tuple[Role, ...],
        body: type[B],
        answer: type[A],
        status: int = 200,
        reasons: tuple[Reason, ...] = (),
    ) -> Call:
        """A POST of one document, answered with another."""
        return self._call(
            "POST",
            path,
            work,
            lambda document: json_response(document, status),
            roles,
            Nothing,
            lambda raw: decode_body(raw, body),
            takes=Content(JSON, body),
            answers={status: (Content(JSON, answer),)},
            reasons=reasons,
        )

    def answer(
        self,
        path: str,
        work: Callable[[Asked[Nothing, B]], Awaitable[tuple[int, Struct]]],
        *,
        roles: tuple[Role, ...],
        takes: tuple[type[Struct], ...],
        decode: Callable[[bytes], B],
        cap_bytes: int,
        answers: Mapping[int, tuple[type[Struct], ...]],
        headers: type[Struct] = Nothing,
        reasons: tuple[Reason, ...] = (),
    ) -> Call:
        """A POST of a document that has one of several forms, of at most `cap_bytes`; the work chooses the status."""
        return self._call(
            "POST",
            path,
            work,
            lambda answered: json_response(answered[1], answered[0]),
            roles,
            Nothing,
            decode,
            takes=Content(JSON, takes),
            cap_bytes=cap_bytes,
            headers=headers,
            answers={status: (Content(JSON, form),) for status, form in answers.items()},
            reasons=reasons,
        )

    def trial(
        self,
        path: str,
        work: Callable[[Asked[Nothing, Nothing]], Awaitable[A]],
        *,
        roles: tuple[Role, ...],
        answer: type[A],
        reasons: tuple[Reason, ...] = (),
    ) -> Call:
        """A POST without a body, answered with a document that says how it went."""
        answers = {200: (Content(JSON, answer),)}
        return self._call("POST", path, work, json_response, roles, Nothing, _no_body, answers=answers, reasons=reasons)

    def order(
        self,
        path: str,
        work: Callable[[Asked[Nothing, Nothing]], Awaitable[None]],
        *,
        roles: tuple[Role, ...],
        reasons: tuple[Reason, ...] = (),
    ) -> Call:
        """A POST without a body, answered with 204 and nothing."""

        def done(_nothing: None) -> Response:
            return Response(status_code=204, headers={"cache-control": "no-store"})

        return self._call("POST", path, work, done, roles, Nothing, _no_body, answers={204: ()}, reasons=reasons)

    def _call(
        self,
        method: str,
        path: str,
        work: Callable[[Asked[Q, B]], Awaitable[R]],
        respond: Callable[[R], Response],
        roles: tuple[Role, ...],
        query: type[Q],
        decode: Callable[[bytes], B],
        *,
        takes: Content | None = None,
        cap_bytes: int = MAX_BODY_BYTES,
        headers: type[Struct] = Nothing,
        answers: Mapping[int, tuple[Content, ...]],
        reasons: tuple[Reason, ...],
    ) -> Call:
        """Where it takes nothing no body is read, and `decode` gets none."""

        async def endpoint(request: Request) -> Response:
            asked = await self._ask(request, roles, query, decode, cap_bytes if takes else None)
            return respond(await work(asked))

        handle = responding(endpoint)
        return Call(method, path, said(work), handle, roles, query, headers, takes, answers, reasons)

    async def _ask(
        self,
        request: Request,
        roles: tuple[Role, ...],
        known: type[Q],
        decode: Callable[[bytes], B],
        cap_bytes: int | None,
    ) -> Asked[Q, B]:
        """Steps 1 to 5; without `cap_bytes` there is no body. Raises Refused and Unavailable."""
        head = read_head(request.scope, self._proxies)
        caller = await self._door.identify(head.peer, head.credential)
        request.scope["state"][CALLER] = caller
        require_role(caller, *roles)
        path, query = read_path(request), read_query(request, known)
        if cap_bytes is None:
            return Asked(caller, path, query, decode(b""), request, head.peer, head.credential)
        held = self._held.of(caller.tenant)
        raw = await receive_body(
            request.scope,
            request.receive,
            head,
            media_type=JSON.encode(),
            cap_bytes=cap_bytes,
            held=held,
        )
        try:
            return Asked(caller, path, query, decode(raw), request, head.peer, head.credential)
        finally:
            held.release(len(raw))


def decode_body(raw: bytes, form: type[B]) -> B:
    """A JSON body. Refused `request_invalid`, without anything that was sent."""
    try:
        return msgspec.json.decode(raw, type=form)
    except msgspec.ValidationError as error:
        raise Refused(Reason.REQUEST_INVALID, broken_rule(error)) from None
    except (ValueError, RecursionError):
        raise Refused(Reason.REQUEST_INVALID, "the body is no JSON") from None


def _no_body(_raw: bytes) -> Nothing:
    return Nothing()

"""One HTTP connection: uvicorn's httptools protocol, with the bounds that it leaves open.

What the parser refuses (both lengths at once, a bare LF, a folded line) stays refused. Added here:

* a request's head has at most MAX_HEAD_BYTES and MAX_HEADERS: 431. With what a body carries beside its data and the
  plain frames of its chunks, as extensions are, it has no more either; the data is counted by whoever reads it
  (`body.py`). Only a read that ends a request counts nothing against the next one
* exactly one Host where HTTP/1.1 wants one, and no Transfer-Encoding where HTTP/1.0 has none (RFC 9112): a proxy on the
  way could read such a request in another way
* trailers and upgrades are refused: trailers would be taken for header fields, and what follows the head of an upgrade
  for the next request
* a request has one absolute deadline, from its first byte: a late head is cut off, a late body is told to whoever
  reads it (`body.TIMED_OUT`)
* a connection that is idle, or does not read what we write, is closed; beyond a number of connections, and of
  pipelined requests on one, no more are taken
* an answer before the end of its request ends the connection; what still comes is thrown away for a moment, because a
  socket that is closed with something unread takes the answer with it

What cannot be parsed is answered only where the answer could not be taken for that to an earlier request.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from postseal.correlation import new_correlation_id
from postseal.outcomes import Reason
from postseal.verdicts import Refusal
from postseal.web import answers
from postseal.web.body import TIMED_OUT
from postseal.web.lingering import UNREAD_S, LingeringTransport
from postseal.web.peer import NOBODY
from postseal.web.refusals import Refusals

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 64
CHUNK_FRAME_BYTES = 12
"""A size of eight digits and two line ends: a body may come in the smallest chunks."""
MAX_TURNED_AWAY = 16
"""Connections beyond the bound that wait until their 503 was read; more are closed at once, to spare descriptors."""
MAX_PIPELINED = 16
"""Requests that wait behind one; one read could bring thousands."""
IDLE_S = 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a deployment can choose of the bounds."""

    receive_deadline_s: float
    max_connections: int


class _Phase(Enum):
    HEAD = auto()
    BODY = auto()


class _Fault(Exception):
    """Raised in a callback of the parser to stop it."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, bounded. The parser calls the `on_` methods while it is fed."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        bounds: Bounds,
        refusals: Refusals,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._bounds = bounds
        self._refusals = refusals
        self._phase = _Phase.HEAD
        self._begun = False
        self._ended_a_request = False
        self._excused_bytes = 0
        self._overhead_bytes = 0
        self._head_bytes = 0
        self._stays_after = self._may_stay = True
        self._deaf = False
        self._status_of_fault = 400
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    # The transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn narrows it
        """Take the connection, unless there are too many."""
        self._lingering = LingeringTransport(transport, self.loop, lambda: self._begun)
        super().connection_made(self._lingering)
        beyond = len(self.connections) - self._bounds.max_connections
        if beyond > 0:
            self._begun = beyond <= MAX_TURNED_AWAY  # its request is on its way
            self._give_up(Reason.UNAVAILABLE, "too many connections")
            return
        self.timeout_keep_alive_task = self.loop.call_later(IDLE_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of every timer."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._disarm_deadline()
        self.resume_writing()
        self._lingering.lost()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and refuse what it refuses."""
        if self._deaf or self.parser is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._ended_a_request = False
        self._excused_bytes = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse("protocol upgrades are not taken")
        except httptools.HttpParserError:
            self._refuse("this is not a request that can be taken")
        else:
            self._account(len(data))

    def _account(self, size_bytes: int) -> None:
        """Every read either ends a request, or counts against the bound of its head with all but the body's data."""
        if not self._ended_a_request:
            self._overhead_bytes = max(0, self._overhead_bytes + size_bytes - self._excused_bytes)
            self._begun = True
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self._status_of_fault = 431
            self._refuse("the request's head is too large")
        elif self._begun and self._deadline is None:
            wait_s = self._bounds.receive_deadline_s
            self._deadline = self.loop.call_later(wait_s, self._deadline_passed)

    def pause_writing(self) -> None:
        """What was written is not read: wait for it, but not for ever."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It was read after all."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def shutdown(self) -> None:
        """Close the connection once it has nothing in flight."""
        self._may_stay = False
        super().shutdown()

    # The parser.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or behind a body a trailer."""
        if self._phase is _Phase.BODY:
            raise _Fault
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if len(self.headers) >= MAX_HEADERS:
            self._status_of_fault = 431
            raise _Fault
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A whole head: the request is handed on, its body to come."""
        if self._upgrades():
            return
        if len(self.pipeline) >= MAX_PIPELINED or not self._is_unambiguous():
            raise _Fault
        super().on_headers_complete()
        self._phase = _Phase.BODY
        # An answer before the request's end says `connection: close` and means it.
        self._stays_after = self.cycle.keep_alive
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Some decoded bytes of a body."""
        self._excused_bytes += len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """The size of a chunk, which has at least one byte of data."""
        self._excused_bytes += CHUNK_FRAME_BYTES

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        if self._upgrades():
            return
        self._phase = _Phase.HEAD
        self._begun = False
        self._ended_a_request = True
        self._overhead_bytes = self._head_bytes = 0
        self._disarm_deadline()
        self.cycle.keep_alive = self._stays_after and self._may_stay
        super().on_message_complete()

    def _is_unambiguous(self) -> bool:
        names = [name for name, _ in self.headers]
        if self.parser is not None and self.parser.get_http_version() == "1.0":
            return names.count(b"host") <= 1 and b"transfer-encoding" not in names
        return names.count(b"host") == 1

    def _upgrades(self) -> bool:
        return self.parser is not None and self.parser.should_upgrade()

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._status_of_fault = 431
            raise _Fault

    # The end.

    def _deadline_passed(self) -> None:
        self._deadline = None
        self._deaf = True
        if not self._has_unanswered():
            self.transport.close()
            return
        self.cycle.keep_alive = False
        if self._phase is _Phase.BODY:
            self.cycle.scope["state"][TIMED_OUT] = True  # pyright: ignore[reportTypedDictNotRequiredAccess] - set by uvicorn
            self.cycle.message_event.set()

    def _disarm_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, detail: str) -> None:
        """Take nothing more, and say so where it cannot be taken for the answer to an earlier request."""
        self._deaf = self._begun = True
        if self._phase is _Phase.BODY and (self.pipeline or self.cycle.response_started):
            self.transport.close()
        elif self._phase is _Phase.HEAD and self._has_unanswered():
            self.cycle.keep_alive = False
        else:
            self._give_up(Reason.REQUEST_INVALID, detail, self._status_of_fault)

    def _has_unanswered(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None until the first request
        return cycle is not None and not cycle.response_complete

    def _give_up(self, reason: Reason, detail: str, status: int | None = None) -> None:
        refusal = Refusal(reason, new_correlation_id(), detail)
        self._refusals.note(refusal, None, self.client[0] if self.client else NOBODY)
        answer = answers.of_refusal(refusal, status=status)
        fields = [*self.server_state.default_headers, *answer.headers]
        fields += [(b"content-length", b"%d" % len(answer.body)), (b"connection", b"close")]
        head = b"".join([b"%b: %b\r\n" % field for field in fields])
        self.transport.write(STATUS_LINE[answer.status] + head + b"\r\n" + answer.body)
        self.transport.close()

"""A receiver of deliveries that checks all that can be checked and does nothing else: for the demo, tests, and a start.

1. a POST of at most 8,192 bytes                                         else 405, 413, 408
2. the signature of the request holds, and its time is now               else 401
3. a test of the destination                                             is answered with 204, and is no delivery
4. with `fail_first`, so many attempts at each delivery have failed      else 500
5. the envelope has its form, and a signing key of the tenant signed it  else 400; 503 if its keys cannot be read
6. its payload is whole, of a known kind, and for this receiver          else 400
7. if its sequence came before, it was the same event                    else 400

Then it is new, or a duplicate without effect, and answered with 204: only now does a sender let go of it.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from postseal.envelope import dsse, ed25519, v1
from postseal.envelope.dsse import MAX_ENVELOPE_BYTES, Envelope
from postseal.envelope.kinds import NO_KINDS, Kinds
from postseal.errors import Refused
from postseal.key_set import EnvelopeKeys, KeysUnreadable, at_most
from postseal.outcomes import Reason
from postseal.senders import PROBE, webhook
from postseal.senders.webhook import SignatureInvalid, Verifier

RECEIVE_S = 15.0
REMEMBERED = 100_000
"""Sequences whose events are known again. A duplicate of an older one counts as new."""
KEPT = 10_000
"""Of `Echo.received`: the last ones."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Received:
    """A delivery that passed every check."""

    delivery: str
    tenant: str
    project: str
    audience: str
    sequence: int
    kind: str
    keyid: str
    event_identity: bytes
    duplicate: bool
    payload: v1.Payload | v1.DeploymentPayload


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request was answered. `delivery` is known once the signature of the request held."""

    status: int
    why: str | None = None
    delivery: str | None = None
    received: Received | None = None


class Echo:
    """Receives, checks, remembers. `told` is called with every answer, before it is sent.

    `received` has the last KEPT that passed, duplicates among them; `events` counts those that were new.
    """

    def __init__(
        self,
        verifier: Verifier,
        keys: EnvelopeKeys,
        *,
        audience: str | None = None,
        kinds: Kinds = NO_KINDS,
        fail_first: int = 0,
        told: Callable[[Answer], None] = lambda _: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.received: deque[Received] = deque(maxlen=KEPT)
        self.events = 0
        self._verifier = verifier
        self._keys = keys
        self._audience = audience
        self._kinds = kinds
        self._fail_first = fail_first
        self._told = told
        self._now = now
        self._came = asyncio.Condition()
        self._known = _Last[tuple[str, str, str, int], bytes](REMEMBERED)
        self._failed = _Last[str, int](REMEMBERED)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncGenerator[str]:
        """Receive there until left; gives the URL. Port 0 takes a free one. Raises OSError if it cannot be had."""
        # The defaults would undo a Content-Encoding, and it is the bytes on the wire that are signed.
        server = web.Server(self._answer, access_log=None, auto_decompress=False, lingering_time=0)
        runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            bound_host, bound_port, *_ = runner.addresses[0]
            yield f"http://[{bound_host}]:{bound_port}/" if ":" in bound_host else f"http://{bound_host}:{bound_port}/"
        finally:
            await runner.cleanup()

    async def has(self, events: int) -> None:
        """Wait until that many different events have come."""
        async with self._came:
            await self._came.wait_for(lambda: self.events >= events)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        answer = await self._judge(request)
        self._told(answer)
        if answer.received is not None:
            async with self._came:
                self._came.notify_all()
        return web.Response(status=answer.status)

    async def _judge(self, request: web.BaseRequest) -> Answer:
        if request.method != "POST":  # 1
            return Answer(405, "no POST")
        try:
            async with asyncio.timeout(RECEIVE_S):
                body = await at_most(request.content, MAX_ENVELOPE_BYTES + 1)
        except TimeoutError:
            return Answer(408, "the body did not come in time")
        if len(body) > MAX_ENVELOPE_BYTES:
            return Answer(413, f"the body has more than {MAX_ENVELOPE_BYTES} bytes")
        delivery = request.headers.get(webhook.ID, "")
        try:  # 2
            self._verifier.verify(request.headers, body, self._now())
        except SignatureInvalid as error:
            return Answer(401, str(error))
        if body == PROBE:  # 3
            return Answer(204, "a test of the destination", delivery)
        failed = self._failed.get(delivery) or 0
        if failed < self._fail_first:  # 4
            self._failed.put(delivery, failed + 1)
            return Answer(500, f"failed on purpose ({failed + 1} of {self._fail_first})", delivery)
        try:
            received = await self._open(delivery, body)
        except Refused as refused:
            return Answer(400, str(refused), delivery)
        except KeysUnreadable as error:
            return Answer(503, str(error), delivery)
        self.received.append(received)
        self.events += not received.duplicate
        return Answer(204, None, delivery, received)

    async def _open(self, delivery: str, body: bytes) -> Received:
        """The steps 5 to 7. Raises Refused, KeysUnreadable."""
        envelope = dsse.unwrap(body)
        key = await self._keys.find(envelope.keyid)
        if key is None:
            raise Refused(Reason.KEY_UNKNOWN, "none of the tenant's keys signed the envelope")
        if not ed25519.verify(key, envelope.signed_bytes, envelope.signature):
            raise Refused(Reason.SIGNATURE_INVALID, "the envelope's signature does not hold")
        payload = v1.open_delivery(envelope.payload, self._kinds)
        route = payload.route
        if route.audience is UNSET or self._audience not in (None, route.audience):
            raise Refused(Reason.ROUTE_MISMATCH, "the envelope is for another audience")
        stream = (route.tenant, route.project, route.audience, payload.sequence)
        before = self._known.get(stream)
        if before not in (None, envelope.identity):
            raise Refused(Reason.SEQUENCE_CONFLICT, "this sequence came before, with another event")
        self._known.put(stream, envelope.identity)
        return _received(delivery, route.audience, envelope, payload, duplicate=before is not None)


class _Last(Generic[K, V]):
    """The values of the last `entries` keys that were put."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._entries:
            self._values.popitem(last=False)


def _received(
    delivery: str, audience: str, envelope: Envelope, payload: v1.Payload | v1.DeploymentPayload, *, duplicate: bool
) -> Received:
    return Received(
        delivery=delivery,
        tenant=payload.route.tenant,
        project=payload.route.project,
        audience=audience,
        sequence=payload.sequence,
        kind=msgspec.to_builtins(payload.data)["kind"],
        keyid=envelope.keyid,
        event_identity=envelope.identity,
        duplicate=duplicate,
        payload=payload,
    )

"""The ASGI application: the two hot calls first, all others by their routes, every fault as a problem.

A path is compared as it was sent. None of ours needs a percent sign, an empty segment or a dot segment, so a path with
one names nothing.
"""

import asyncio
import time

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from postseal.commit import Refusal
from postseal.correlation import new_correlation_id
from postseal.errors import Refused, Unavailable
from postseal.outcomes import Reason
from postseal.readiness import Readiness
from postseal.service import SECONDS_A_DAY, Service
from postseal.web import answers
from postseal.web.body import ClientGone, HeldBytes
from postseal.web.enrolments import EnrolmentCalls
from postseal.web.envelopes import EnvelopeCalls
from postseal.web.head import read_head
from postseal.web.health import HealthCalls
from postseal.web.metrics import MetricsCalls
from postseal.web.peer import TrustedProxies
from postseal.web.refusals import Refusals, log_bug
from postseal.web.streams import StreamCalls

STREAMS = "/v1/projects/{project}/streams"


class App:
    """The HTTP surface of one process. StartupError if a setting cannot be used."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.stopping = asyncio.Event()
        """Set to end every wait for something new."""
        self.refusals = Refusals(service.metrics)
        self._door = service.door
        self._proxies = TrustedProxies(settings.trusted_proxies)
        held_for_strangers = HeldBytes(settings.max_pending_body_bytes)
        envelopes = EnvelopeCalls(
            inbox=service.inbox,
            door=service.door,
            proxies=self._proxies,
            max_envelope_bytes=settings.max_envelope_bytes,
            held_for_strangers=held_for_strangers,
            held_for_known=HeldBytes(settings.max_pending_body_bytes),
            refusals=self.refusals,
        )
        self._hot: dict[bytes, ASGIApp] = {
            b"/v1/envelopes": envelopes.post_single,
            b"/v1/envelopes/batch": envelopes.post_batch,
        }
        self._router = Router(self._routes(service, held_for_strangers), redirect_slashes=False)

    def _routes(self, service: Service, held: HeldBytes) -> list[Route]:
        enrolments = EnrolmentCalls(
            database=service.admin,
            door=service.door,
            proxies=self._proxies,
            held=held,
            credential_lifetime_s=service.settings.credential_days * SECONDS_A_DAY,
        )
        streams = StreamCalls(
            database=service.ingest,
            door=service.door,
            proxies=self._proxies,
            stopping=self.stopping,
            clock=time.monotonic,
        )
        metrics = MetricsCalls(service.metrics, service.sampler)
        health = HealthCalls(Readiness(service.ingest, service.committer, time.monotonic), service.kinds)
        return [
            Route("/v1/enrolments", enrolments.post, methods=["POST"]),
            Route(STREAMS, streams.list_streams),
            Route(STREAMS + "/{producer}", streams.get_stream),
            Route(STREAMS + "/{producer}/envelopes", streams.list_envelopes),
            Route("/v1/projects/{project}/producers/{producer}/keys", streams.list_keys),
            Route("/healthz", health.healthz),
            Route("/readyz", health.readyz),
            Route("/metrics", metrics.get),
            Route("/schemas/payload.v1.schema.json", health.payload_schema),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; never raises for what a caller can bring about."""
        try:
            await self._dispatch(scope, receive, send)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - whatever is left is a fault of ours, answered as such
            await answers.send_answer(send, self._problem(scope, error))

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        hot = self._hot.get(scope["raw_path"])
        if hot is None:
            if b"%" in scope["raw_path"]:
                raise HTTPException(404)
            # With this key in the scope Starlette raises what it would else answer in its own words.
            scope["app"] = self
            await self._router(scope, receive, send)
        elif scope["method"] == "POST":
            await hot(scope, receive, send)
        else:
            raise HTTPException(405, headers={"allow": "POST"})

    def _problem(self, scope: Scope, error: Exception) -> answers.Answer:
        correlation_id = new_correlation_id()
        headers: tuple[answers.Header, ...] = ()
        match error:
            case Refused():
                refused = error
            case HTTPException():
                refused = Refused(Reason.METHOD_NOT_ALLOWED if error.status_code == 405 else Reason.NOT_FOUND)  # noqa: PLR2004 - the status is the name here
                headers = tuple((k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items())
            case Unavailable():
                refused = Refused(Reason.UNAVAILABLE, str(error))
            case _:
                log_bug(error, correlation_id)
                refused = Refused(Reason.UNAVAILABLE, "an unexpected error; nothing is known to be committed")
        head = read_head(scope, self._proxies)
        refusal = Refusal(refused.reason, correlation_id, refused.detail)
        self.refusals.note(refusal, self._door.recall(head.credential), head.peer)
        return answers.of_refused(refused, correlation_id, *headers)

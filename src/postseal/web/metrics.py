"""`GET /metrics`: the service's numbers in a text format of Prometheus, open to whoever reaches the port.

They name no tenant, but tell how much is taken in and refused; a proxy should keep the path to itself. A text is made
anew once a second at the most, however many ask.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from postseal.metrics import Metrics
from postseal.sampler import Sampler
from postseal.web.calls import Call, Content, responding, said

OPENMETRICS = "application/openmetrics-text"
REMEMBERED_FOR_S = 1.0


@dataclass(slots=True)
class _Format:
    write: Callable[[CollectorRegistry], bytes]
    media_type: str
    text: bytes = b""
    written_s: float | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class MetricsCalls:
    """Shows the metrics of all processes of this service."""

    def __init__(self, metrics: Metrics, sampler: Sampler) -> None:
        self._metrics = metrics
        self._sampler = sampler
        self._prometheus = _Format(*choose_encoder("text/plain"))
        self._openmetrics = _Format(*choose_encoder(OPENMETRICS))

    def calls(self) -> list[Call]:
        """The one there is."""
        text: dict[str, Any] = {"type": "string"}
        answers = {200: (Content("text/plain", text), Content(OPENMETRICS, text))}
        return [Call("GET", "/metrics", said(self.get), responding(self.get), answers=answers)]

    async def get(self, request: Request) -> Response:
        """The service's numbers: OpenMetrics for who names it among what it accepts, else Prometheus text."""
        wanted = self._openmetrics if OPENMETRICS in request.headers.get("accept", "") else self._prometheus
        async with wanted.writing:
            if wanted.written_s is None or time.monotonic() - wanted.written_s >= REMEMBERED_FOR_S:
                wanted.text = await self._write(wanted.write)
                wanted.written_s = time.monotonic()
        return Response(wanted.text, headers={"content-type": wanted.media_type, "cache-control": "no-store"})

    async def _write(self, write: Callable[[CollectorRegistry], bytes]) -> bytes:
        self._sampler.sample()
        await self._sampler.sample_backlog()
        # In a thread: with several processes it reads their files.
        return await asyncio.to_thread(write, self._metrics.exposed())

"""`/healthz` and `/readyz`: open to everyone, and telling nothing about any tenant."""

from starlette.requests import Request
from starlette.responses import Response

from postseal.readiness import Readiness
from postseal.web.calls import JSON, Call, Content, responding, said
from postseal.web.documents import Health, json_response


class HealthCalls:
    """Whether the process is up, and whether it makes progress."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    def calls(self) -> list[Call]:
        """Both of them."""
        answers = {200: (Content(JSON, Health),)}
        return [
            Call("GET", "/healthz", said(self.healthz), responding(self.healthz), answers=answers),
            Call("GET", "/readyz", said(self.readyz), responding(self.readyz), answers=answers),
        ]

    async def healthz(self, _request: Request) -> Response:
        """Whether the process answers."""
        return json_response(Health("ok"))

    async def readyz(self, _request: Request) -> Response:
        """Whether commits work now; else a problem with 503."""
        await self._readiness.require()
        return json_response(Health("ready"))

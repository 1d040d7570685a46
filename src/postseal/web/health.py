"""`/healthz`, `/readyz` and the published schema: open to everyone, and telling nothing about any tenant."""

from starlette.requests import Request
from starlette.responses import Response

from postseal.envelope.kinds import Kinds
from postseal.envelope.schema import payload_schema
from postseal.readiness import Readiness
from postseal.web import documents


class HealthCalls:
    """Whether the process is up, and whether it makes progress."""

    def __init__(self, readiness: Readiness, kinds: Kinds) -> None:
        self._readiness = readiness
        self._schema = payload_schema(kinds)

    async def healthz(self, _request: Request) -> Response:
        """The process answers."""
        return documents.json_response({"status": "ok"})

    async def readyz(self, _request: Request) -> Response:
        """Commits work now; else a problem with 503."""
        await self._readiness.require()
        return documents.json_response({"status": "ready"})

    async def payload_schema(self, _request: Request) -> Response:
        """The JSON Schema of the payload, this deployment's kinds included."""
        return Response(self._schema, media_type="application/schema+json")

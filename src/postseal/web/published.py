"""What describes the service to whoever reaches the port: JSON Schemas, `/openapi.json`, and `/docs` made of it."""

import json
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from postseal.envelope.kinds import Kinds
from postseal.envelope.schema import envelope_schema, payload_schema
from postseal.web import page
from postseal.web.calls import JSON, Call, Content, responding, said
from postseal.web.openapi import describe

SCHEMA = "application/schema+json"


class PublishedCalls:
    """Documents that stay as they are while the process runs. `describe` is to be told all calls before the first."""

    def __init__(self, kinds: Kinds) -> None:
        self._envelope = envelope_schema()
        self._payload = payload_schema(kinds)
        self._openapi = b""
        self._page = b""

    def calls(self) -> list[Call]:
        """All of them."""
        document = {"type": "object"}
        schema, openapi = Content(SCHEMA, document), Content(JSON, document)
        html = Content("text/html", {"type": "string"})
        served = [
            ("/schemas/envelope.v1.schema.json", self.get_envelope_schema, schema),
            ("/schemas/payload.v1.schema.json", self.get_payload_schema, schema),
            ("/openapi.json", self.get_openapi, openapi),
            ("/docs", self.get_page, html),
        ]
        return [
            Call("GET", path, said(endpoint), responding(endpoint), answers={200: (content,)})
            for path, endpoint, content in served
        ]

    def describe(self, calls: Sequence[Call]) -> None:
        """Write the description of `calls`."""
        document = describe(calls, json.loads(self._envelope))
        self._openapi = json.dumps(document, ensure_ascii=False).encode()
        self._page = page.render(document)

    async def get_envelope_schema(self, _request: Request) -> Response:
        """The JSON Schema of an envelope."""
        return Response(self._envelope, media_type=SCHEMA)

    async def get_payload_schema(self, _request: Request) -> Response:
        """The JSON Schema of the payload, this deployment's kinds included."""
        return Response(self._payload, media_type=SCHEMA)

    async def get_openapi(self, _request: Request) -> Response:
        """The description of all calls, as OpenAPI 3.1."""
        return Response(self._openapi, media_type=JSON)

    async def get_page(self, _request: Request) -> Response:
        """The description of all calls, to be read by people."""
        return Response(self._page, headers=page.HEADERS, media_type="text/html")

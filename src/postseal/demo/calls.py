"""What the demo's people ask the service over HTTP, and how what comes is held against what was expected."""

import asyncio
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from postseal.errors import PostsealError

HTTP_TIMEOUT_S = 15
OK, CREATED = 200, 201
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody who calls the service at `address`, with the credential that they have; `repr` does not show it."""

    address: str
    credential: str | None = field(default=None, repr=False)

    async def get(self, path: str) -> dict[str, Any]:
        """The document there. Raises PostsealError where another status is answered than 200."""
        return _document(path, OK, await self.send("GET", path))

    async def post(self, path: str, document: object, *, expected: int = OK, **headers: str) -> dict[str, Any]:
        """What `document` is answered with. Raises PostsealError where the status is another than `expected`.

        An underscore in a header's name stands for its hyphen.
        """
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return _document(path, expected, await self.send("POST", path, json.dumps(document).encode(), JSON, named))

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        media_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """One request: the status of its answer, and the JSON in it."""
        return await asyncio.to_thread(self._send, method, path, body, media_type, headers or {})

    def _send(
        self, method: str, path: str, body: bytes | None, media_type: str | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        url = urlsplit(self.address)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=HTTP_TIMEOUT_S)
        bearer = f"Bearer {self.credential}" if self.credential else None
        named = {"Content-Type": media_type, "Authorization": bearer, **headers}
        try:
            connection.request(method, path, body, {name: value for name, value in named.items() if value})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def _document(path: str, expected: int, answered: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    status, document = answered
    require(status, expected, f"the status of {path}")
    return document


def require(found: object, expected: object, what: str) -> None:
    """Raise PostsealError unless `what` was found as it was expected."""
    if found != expected:
        raise PostsealError(f"{what}: the demo expected {expected} and got {found}")

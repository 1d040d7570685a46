"""HTTP by hand, over a raw socket: what no well-behaved client would let a test say."""

import json
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

ENVELOPE = "application/vnd.controlplane.envelope.v1+json"
NDJSON = "application/x-ndjson"
ANSWER_S = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The JSON body."""
        return json.loads(self.body)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The NDJSON body."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def reason(self) -> str:
        """Why it was refused."""
        return self.document["reason"]


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, raw: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(raw)

    def end(self) -> None:
        """Say that nothing more comes."""
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self) -> Answer:
        """The next answer."""
        head, _, rest = self._until(b"\r\n\r\n").partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        length = int(headers.get("content-length", "0"))
        while len(rest) < length:
            rest += self._more()
        self._received = rest[length:]
        return Answer(int(status.split(" ")[1]), headers, rest[:length])

    def is_closed(self) -> bool:
        """Wait for the end of the connection; False if something else comes first."""
        if self._received:
            return False
        try:
            return self._socket.recv(65536) == b""
        except ConnectionResetError:
            return True

    def is_ended(self) -> bool:
        """The same of an end that is no reset; a reset raises."""
        return not self._received and self._socket.recv(65536) == b""

    def ask(self, raw: bytes) -> Answer:
        """Send a request, take its answer."""
        self.send(raw)
        return self.answer()

    def head(self) -> bytes:
        """The head of the next answer, which has no body."""
        head, _, self._received = self._until(b"\r\n\r\n").partition(b"\r\n\r\n")
        return head

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._received:
            self._received += self._more()
        return self._received

    def _more(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise EOFError(f"closed after {self._received!r}")
        return data


def request(
    method: str, path: str, body: bytes | None = None, *, credential: str | None = None, **headers: str
) -> bytes:
    """A request's bytes; `headers` have underscores for hyphens, and win over what is made up here."""
    fields = {"host": "test"}
    if credential is not None:
        fields["authorization"] = f"Bearer {credential}"
    if body is not None:
        fields["content-length"] = str(len(body))
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + (body or b"")


def post(credential: str | None, body: bytes, **headers: str) -> bytes:
    """A single envelope."""
    headers = {"content_type": ENVELOPE, **headers}
    return request("POST", "/v1/envelopes", body, credential=credential, **headers)


def post_batch(credential: str | None, body: bytes, **headers: str) -> bytes:
    """A batch."""
    headers = {"content_type": NDJSON, **headers}
    return request("POST", "/v1/envelopes/batch", body, credential=credential, **headers)


def get(path: str, credential: str | None = None, **headers: str) -> bytes:
    """A read."""
    return request("GET", path, credential=credential, **headers)

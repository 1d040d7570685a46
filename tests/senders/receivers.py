"""Receivers on real sockets that behave as they are told, and what is sent to them."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Any
from uuid import UUID

from postseal.rules.delivery import Attempted
from postseal.senders import Mail, Scheme, Secret
from postseal.senders.http import HttpSender
from postseal.senders.webhook import make_secret

LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
SHARED = Secret(Scheme.V1, bytes(range(32)))
PAIR = make_secret(Scheme.V1A)
MAIL = Mail(UUID(int=7), "acme", "apollo", "erp", "", b'{"payload":"e30="}', (SHARED, PAIR), 1)


@dataclass
class Request:
    """One request as it came in."""

    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A server on a free port of 127.0.0.1, and what it has seen."""

    port: int = 0
    connections: int = 0
    requests: list[Request] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """A request is in, or where none is read a connection."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A connection ended."""

    @property
    def url(self) -> str:
        """Where it is reached without TLS."""
        return f"http://127.0.0.1:{self.port}/hook"


Script = Callable[[Receiver, asyncio.StreamWriter], Awaitable[None]]
"""What becomes of each request."""


def answer(raw: bytes) -> Script:
    """Answer with these bytes."""

    async def write(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return write


async def hang(_receiver: Receiver, _writer: asyncio.StreamWriter) -> None:
    """Say nothing more."""
    await asyncio.Event().wait()


async def close(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
    """End the connection."""
    writer.close()


def drip(raw: bytes, every_s: float) -> Script:
    """Answer with one byte at a time."""

    async def write(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        for byte in raw:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(every_s)

    return write


@asynccontextmanager
async def receiving(
    script: Script, *, tls: ssl.SSLContext | None = None, reads: bool = True, host: str = "127.0.0.1"
) -> AsyncGenerator[Receiver]:
    """A receiver that runs `script` for each request, or at once for each connection where it does not read."""
    receiver = Receiver()
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        receiver.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
                await (_requests(receiver, reader, writer, script) if reads else _one(receiver, reader, writer, script))
        except asyncio.CancelledError:
            pass
        finally:
            tasks.discard(task)
            receiver.left.set()
            writer.transport.abort()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await server.wait_closed()


async def _requests(
    receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: Script
) -> None:
    while not writer.is_closing():
        receiver.requests.append(await read_request(reader))
        await _one(receiver, reader, writer, script)


async def _one(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: Script) -> None:
    receiver.asked.set()
    running = asyncio.ensure_future(script(receiver, writer))
    gone = asyncio.ensure_future(_gone(reader))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        else:
            raise ConnectionResetError
    finally:
        running.cancel()
        gone.cancel()


async def _gone(reader: asyncio.StreamReader) -> None:
    """Wait for the other end to leave, without taking what it sends."""
    while not reader._eof and reader.exception() is None:  # at_eof() would be false while anything is left to read
        await asyncio.sleep(0.005)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request."""
    line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (text.partition(": ") for text in lines)}
    return Request(line, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def push(url: str, **options: Any) -> Attempted:
    """One attempt at a URL, by a sender that may send to loopback and without TLS."""
    async with HttpSender(**({"allowed": LOOPBACK, "allow_http": True, "timeout_s": 5.0} | options)) as sender:
        return await sender.send(to(url))


def to(url: str, **changes: Any) -> Mail:
    """The mail, for that URL."""
    return replace(MAIL, url=url, **changes)

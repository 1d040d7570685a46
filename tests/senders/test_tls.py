"""TLS is verified for the name of the URL, whatever address it leads to and whatever carries the connection."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, make_authority
from receivers import LOOPBACK, NO_CONTENT, Receiver, answer, hang, push, read_request, receiving, to

from postseal.errors import StartupError
from postseal.rules.delivery import Attempted, Code
from postseal.senders.http import HttpSender
from postseal.senders.resolving import AddressInfo


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One for all tests of this module."""
    return make_authority(tmp_path_factory.mktemp("authority"))


async def at_loopback(_host: str, port: int) -> list[AddressInfo]:
    """Every name is here."""
    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))]


async def pushed(certificate: str, url_host: str, authority: Authority, **options: Any) -> tuple[Attempted, Receiver]:
    """One attempt at a server with that certificate, under that name."""
    tls = authority.serving(certificate)
    seen: list[str | None] = []
    tls.sni_callback = lambda _object, name, _context: seen.append(name)
    async with receiving(answer(NO_CONTENT), tls=tls) as receiver:
        url = f"https://{url_host}:{receiver.port}/hook"
        result = await push(url, look_up=at_loopback, **options)
        assert seen in ([url_host], [None])
        return result, receiver


def test_a_certificate_for_the_name_by_a_known_authority(authority: Authority) -> None:
    """By name with SNI, and for an address."""
    for certificate, host in (("DNS:hooks.example", "hooks.example"), ("IP:127.0.0.1", "127.0.0.1")):
        result, receiver = asyncio.run(pushed(certificate, host, authority, ca_file=authority.file))
        assert result == Attempted()
        assert receiver.requests[0].headers["host"] == f"{host}:{receiver.port}"


def test_authorities_are_the_systems_or_those_of_the_file(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the system's are trusted; with a file, those in it alone."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    other = make_authority(tmp_path)
    for ca_file, code in ((None, None), (other.file, Code.TLS_FAILED)):
        result, _ = asyncio.run(pushed("DNS:hooks.example", "hooks.example", authority, ca_file=ca_file))
        assert result == Attempted(code)


def test_certificates_that_say_too_little(authority: Authority) -> None:
    """An unknown authority, another name, and the vetted address in place of the name: nothing is sent."""
    for certificate, host, options in (
        ("DNS:hooks.example", "hooks.example", {}),
        ("DNS:other.example", "hooks.example", {"ca_file": authority.file}),
        ("IP:127.0.0.1", "hooks.example", {"ca_file": authority.file}),
        ("DNS:hooks.example", "127.0.0.1", {"ca_file": authority.file}),
    ):
        result, receiver = asyncio.run(pushed(certificate, host, authority, **options))
        assert result == Attempted(Code.TLS_FAILED)
        assert receiver.requests == []


def test_a_server_without_tls(authority: Authority) -> None:
    """It answers in clear, hangs, or hangs up: each has its code."""

    async def flow(script: Any, **options: Any) -> Attempted:
        async with receiving(script, reads=False) as receiver:
            return await push(f"https://127.0.0.1:{receiver.port}/", **options)

    async def close(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        writer.close()

    assert asyncio.run(flow(answer(b"HTTP/1.1 400 Bad Request\r\n\r\n"))) == Attempted(Code.TLS_FAILED)
    assert asyncio.run(flow(hang, connect_timeout_s=0.2)) == Attempted(Code.CONNECT_TIMEOUT)
    assert asyncio.run(flow(close)) == Attempted(Code.CONNECT_FAILED)


def test_authorities_that_cannot_be_read(tmp_path: Path) -> None:
    """The start fails with one line: no such file, and one without a certificate."""
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate\n")

    async def start(file: Path) -> None:
        async with HttpSender(ca_file=file):
            pass

    for file in (tmp_path / "missing.pem", empty):
        with pytest.raises(StartupError, match=r"\Acannot use the ca_file [^\n]*\Z"):
            asyncio.run(start(file))


class Proxy:
    """An HTTP proxy that connects whoever asks to one place, whatever they ask for."""

    def __init__(self, target: int, status: bytes = b"200") -> None:
        self.heads: list[tuple[str, dict[str, str]]] = []
        self.port = 0
        self._target = target
        self._status = status
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[str]:
        """Gives its URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"http://user:word@127.0.0.1:{self.port}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            request = await read_request(reader)
            self.heads.append((request.line, request.headers))
            if not request.line.startswith("CONNECT "):
                writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
                await writer.drain()
                return
            writer.write(b"HTTP/1.1 %b So\r\n\r\n" % self._status)
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
            finally:
                there_writer.transport.abort()
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65_536):
        writer.write(piece)
        await writer.drain()
    writer.transport.abort()


async def proxied(
    authority: Authority, host: str, certificate: str = "DNS:hooks.example", **options: Any
) -> tuple[Attempted, Proxy, Receiver]:
    """One attempt through a proxy."""
    tls = authority.serving(certificate)
    async with receiving(answer(NO_CONTENT), tls=tls) as receiver:
        proxy = Proxy(receiver.port)
        async with proxy.running() as url:
            settings = {"look_up": at_loopback, "ca_file": authority.file, "proxy": url} | options
            return await push(f"https://{host}:{receiver.port}/a%2Fb?c", **settings), proxy, receiver


def test_a_proxy_is_told_the_vetted_address(authority: Authority) -> None:
    """It need not, and cannot, look the name up again; TLS inside is for the name, and the receiver sees its name."""
    result, proxy, receiver = asyncio.run(proxied(authority, "hooks.example"))
    assert result == Attempted()
    [(line, headers)] = proxy.heads
    assert line == f"CONNECT 127.0.0.1:{receiver.port} HTTP/1.1"
    assert headers["proxy-authorization"] == "Basic dXNlcjp3b3Jk"
    [request] = receiver.requests
    assert request.line == "POST /a%2Fb?c HTTP/1.1"
    assert request.headers["host"] == f"hooks.example:{receiver.port}"
    assert "proxy-authorization" not in request.headers


def test_a_proxy_does_not_switch_vetting_off(authority: Authority) -> None:
    """Refused by name, by address, and by the URL's check: the proxy hears nothing, though it itself is private."""
    for host in ("hooks.example", "127.0.0.1", "[::1]", "2130706433"):
        result, proxy, receiver = asyncio.run(proxied(authority, host, allowed=()))
        assert result == Attempted(Code.ADDRESS_REFUSED)
        assert proxy.heads == []
        assert receiver.connections == 0


def test_tls_through_a_proxy_is_verified_for_the_name(authority: Authority) -> None:
    """A certificate for the address that the proxy was told is not one for the name."""
    for certificate in ("DNS:other.example", "IP:127.0.0.1"):
        result, _, receiver = asyncio.run(proxied(authority, "hooks.example", certificate))
        assert result == Attempted(Code.TLS_FAILED)
        assert receiver.requests == []


def test_two_names_at_one_address_share_no_connection_of_a_proxy(authority: Authority) -> None:
    """A tunnel whose TLS was verified for one name is not used for another one."""

    async def flow() -> None:
        async with receiving(answer(NO_CONTENT), tls=authority.serving("DNS:hooks.example")) as receiver:
            proxy = Proxy(receiver.port)
            async with (
                proxy.running() as url,
                HttpSender(allowed=LOOPBACK, look_up=at_loopback, ca_file=authority.file, proxy=url) as sender,
            ):
                codes = [
                    (await sender.send(to(f"https://{host}:{receiver.port}/"))).code
                    for host in ("hooks.example", "other.example", "hooks.example")
                ]
        assert codes == [None, Code.TLS_FAILED, None]
        assert len(receiver.requests) == 2

    asyncio.run(flow())


def test_the_next_attempt_through_a_proxy_takes_the_next_address(authority: Authority) -> None:
    """A proxy tries the one address that it is told; an attempt later it is told another one."""

    async def two(_host: str, port: int) -> list[AddressInfo]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (f"127.0.0.{last}", port)) for last in (1, 2)
        ]

    async def flow() -> list[str]:
        proxy = Proxy(0)
        async with (
            proxy.running() as url,
            HttpSender(allowed=LOOPBACK, allow_http=True, look_up=two, proxy=url) as sender,
        ):
            for attempt in (1, 2, 3):
                assert await sender.send(to("http://hooks.example/", attempt=attempt)) == Attempted()
        return [line for line, _ in proxy.heads]

    lines = asyncio.run(flow())
    assert lines[0] == "POST http://127.0.0.1/ HTTP/1.1"
    assert lines[1] == "POST http://127.0.0.2/ HTTP/1.1"


def test_a_proxy_that_fails(authority: Authority) -> None:
    """It refuses, or is not there: nothing was reached."""

    async def refusing() -> Attempted:
        proxy = Proxy(0, b"403")
        async with proxy.running() as url:
            return await push("https://hooks.example/", look_up=at_loopback, proxy=url)

    assert asyncio.run(refusing()) == Attempted(Code.CONNECT_FAILED)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = push("https://hooks.example/", look_up=at_loopback, proxy=f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert asyncio.run(gone) == Attempted(Code.CONNECT_FAILED)


def test_a_proxy_setting_that_is_no_url() -> None:
    """The start fails with one line that does not repeat it: it may hold a password."""

    async def start(proxy: str) -> None:
        async with HttpSender(proxy=proxy):
            pass

    for proxy in ("user:word@proxy:3128", "socks5://user:word@proxy:1080", "http://", "", "http://user:word@[::1"):
        with pytest.raises(StartupError, match=r"\Aegress_proxy is no URL[^\n]*\Z") as raised:
            asyncio.run(start(proxy))
        assert "word" not in str(raised.value)

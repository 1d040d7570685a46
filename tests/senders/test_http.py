"""One attempt over real sockets: what receivers do, and what it is called."""

import asyncio
import base64
import errno
import gzip
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from nacl.signing import VerifyKey
from receivers import (
    LOOPBACK,
    MAIL,
    NO_CONTENT,
    PAIR,
    SHARED,
    Receiver,
    Script,
    answer,
    close,
    drip,
    hang,
    push,
    receiving,
    to,
)
from standardwebhooks import Webhook
from structlog.testing import capture_logs

from postseal import senders
from postseal.rules.delivery import Attempted, Code
from postseal.senders import Sender, http, resolving
from postseal.senders.http import MAX_ANSWER_BYTES, HttpSender
from postseal.senders.judging import MAX_RETRY_AFTER_S
from postseal.senders.resolving import MAX_THREADS_OF_A_TENANT, AddressInfo
from postseal.senders.webhook import for_receiver
from until import until_async

MIB = 1 << 20
NOW_S = 1_767_225_600.0


def attempt(script: Script, *, reads: bool = True, **options: Any) -> tuple[Attempted, Receiver]:
    """One attempt at a receiver that runs the script."""

    async def flow() -> tuple[Attempted, Receiver]:
        async with receiving(script, reads=reads) as receiver:
            return await push(receiver.url, **options), receiver

    return asyncio.run(flow())


def test_what_is_sent() -> None:
    """One POST of the stored bytes with the path and query as written, which two independent libraries verify."""

    async def flow() -> Receiver:
        async with receiving(answer(NO_CONTENT)) as receiver:
            assert await push(f"http://127.0.0.1:{receiver.port}/a%2Fb/../c?d=%20e&f") == Attempted()
        return receiver

    [request] = asyncio.run(flow()).requests
    assert request.line == "POST /a%2Fb/../c?d=%20e&f HTTP/1.1"
    assert request.body == MAIL.body
    headers = request.headers
    assert headers["content-type"] == "application/vnd.controlplane.envelope.v1+json"
    assert headers["user-agent"].startswith("postseal/")
    assert headers["webhook-id"] == str(MAIL.delivery)
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 30
    assert {"cookie", "authorization"}.isdisjoint(headers)

    assert Webhook(for_receiver(SHARED)).verify(request.body, headers) == {"payload": "e30="}
    first, second = headers["webhook-signature"].split(" ")
    assert (first.partition(",")[0], second.partition(",")[0]) == ("v1a", "v1")
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + request.body
    key = VerifyKey(base64.b64decode(for_receiver(PAIR).removeprefix("whpk_")))
    key.verify(signed, base64.b64decode(first.partition(",")[2]))


def test_each_attempt_has_its_own_time_and_the_same_id() -> None:
    """A second attempt is signed anew; what names the delivery stays."""

    async def flow() -> Receiver:
        times = iter((NOW_S, NOW_S, NOW_S + 60, NOW_S + 60))
        async with receiving(answer(NO_CONTENT)) as receiver, sender(now=lambda: next(times)) as pushing:
            for number in (1, 2):
                assert await pushing.send(to(receiver.url, attempt=number)) == Attempted()
        return receiver

    first, second = (request.headers for request in asyncio.run(flow()).requests)
    assert first["webhook-id"] == second["webhook-id"]
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == 60
    assert first["webhook-signature"] != second["webhook-signature"]


def sender(**options: Any) -> HttpSender:
    """A sender that may send to loopback and without TLS."""
    return HttpSender(**({"allowed": LOOPBACK, "allow_http": True, "timeout_s": 5.0} | options))


def test_it_is_a_sender() -> None:
    """The shipped sender is one of the protocol."""
    pushing: Sender = HttpSender()
    assert pushing
    assert senders.Sender


STATUSES = {
    200: None, 201: None, 204: None, 299: None,
    300: Code.STATUS_3XX, 304: Code.STATUS_3XX, 308: Code.STATUS_3XX,
    400: Code.STATUS_4XX, 404: Code.STATUS_4XX, 408: Code.STATUS_4XX, 410: Code.GONE, 429: Code.RATE_LIMITED,
    500: Code.STATUS_5XX, 503: Code.STATUS_5XX, 599: Code.STATUS_5XX,
    600: Code.ANSWER_INVALID, 999: Code.ANSWER_INVALID,
}  # fmt: skip


@pytest.mark.parametrize("status", STATUSES)
def test_the_status_decides(status: int) -> None:
    """2xx is success; 410 and 429 have codes of their own; the rest goes by its class, and what has none is invalid."""
    body = b"" if status in (204, 304) else b"hi"
    raw = b"HTTP/1.1 %d Whatever\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    attempted, receiver = attempt(answer(raw))
    assert attempted == Attempted(STATUSES[status])
    assert len(receiver.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    """Not to a cloud's metadata, not back to the same receiver."""
    for place in (b"http://169.254.169.254/latest/meta-data/", b"/elsewhere"):
        head = b"HTTP/1.1 %d Moved\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % (status, place)
        attempted, receiver = attempt(answer(head))
        assert attempted == Attempted(Code.STATUS_3XX)
        assert (len(receiver.requests), receiver.connections) == (1, 1)


RETRY_AFTER = [
    (b"Retry-After: 120", 120.0),
    (b"Retry-After: 0", 0.0),
    (b"Retry-After: " + b"9" * 400, MAX_RETRY_AFTER_S),
    (b"Retry-After: %b" % formatdate(NOW_S + 90, usegmt=True).encode(), 90.0),
    (b"Retry-After: %b" % formatdate(NOW_S - 90, usegmt=True).encode(), 0.0),
    (b"Retry-After: %b" % formatdate(NOW_S + 1e8, usegmt=True).encode(), MAX_RETRY_AFTER_S),
    # A receiver whose clock is an hour ahead.
    (
        b"Retry-After: %b\r\nDate: %b"
        % (formatdate(NOW_S + 3690, usegmt=True).encode(), formatdate(NOW_S + 3600, usegmt=True).encode()),
        90.0,
    ),
    (b"Retry-After: %b\r\nDate: yesterday" % formatdate(NOW_S + 90, usegmt=True).encode(), 90.0),
    (b"Retry-After: -5", None),
    (b"Retry-After: 1.5", None),
    (b"Retry-After: \xb2", None),
    (b"Retry-After: soon", None),
    (b"Retry-After: Wed, 99 Foo 2026 00:00:00 GMT", None),
    (b"Retry-After: Thu, 01 Jan 99999999 00:00:00 GMT", None),
    (b"Retry-After:", None),
    (b"X-Other: 1", None),
]


@pytest.mark.parametrize(("header", "expected_s"), RETRY_AFTER)
def test_how_long_a_receiver_wants_to_be_left_alone(header: bytes, expected_s: float | None) -> None:
    """429 and 503 may say so in seconds or as a date, read on the receiver's clock; other answers may not."""
    for status, code in ((429, Code.RATE_LIMITED), (503, Code.STATUS_5XX)):
        raw = b"HTTP/1.1 %d Later\r\n%b\r\nContent-Length: 0\r\n\r\n" % (status, header)
        attempted, _ = attempt(answer(raw), now=lambda: NOW_S)
        assert attempted == Attempted(code, expected_s)
    for status, code in ((500, Code.STATUS_5XX), (404, Code.STATUS_4XX)):
        raw = b"HTTP/1.1 %d No\r\n%b\r\nContent-Length: 0\r\n\r\n" % (status, header)
        assert attempt(answer(raw))[0] == Attempted(code)


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 abc Huh\r\n\r\n",
    b"HTTP/1.1 20 Huh\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
]


@pytest.mark.parametrize("raw", GARBAGE)
def test_garbage_is_no_answer(raw: bytes) -> None:
    """What is no HTTP answer, or an ambiguous one, is invalid, and the connection is not used again."""

    async def flow() -> None:
        async with receiving(answer(raw)) as receiver, sender(timeout_s=1.0) as pushing:
            for connections in (1, 2):
                assert await pushing.send(to(receiver.url)) == Attempted(Code.ANSWER_INVALID)
                assert receiver.connections == connections

    asyncio.run(flow())


def test_a_connection_that_closes_early_is_no_answer() -> None:
    """Before the request is read, after it, and in the middle of the head."""
    assert attempt(close)[0] == Attempted(Code.ANSWER_INVALID)
    assert attempt(close, reads=False)[0] == Attempted(Code.ANSWER_INVALID)

    async def beginning(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Le")
        await writer.drain()
        writer.close()

    assert attempt(beginning)[0] == Attempted(Code.ANSWER_INVALID)


def test_a_head_without_end_is_too_large() -> None:
    """One header line of 64 KiB is not read to its end."""
    raw = b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 65_536 + b"\r\n\r\n"
    assert attempt(answer(raw))[0] == Attempted(Code.ANSWER_TOO_LARGE)


def test_a_receiver_that_hangs() -> None:
    """It costs the time of one attempt and no more."""
    started_s = time.monotonic()
    assert attempt(hang, timeout_s=0.3)[0] == Attempted(Code.SEND_TIMEOUT)
    assert attempt(hang, timeout_s=0.3, reads=False)[0] == Attempted(Code.SEND_TIMEOUT)
    assert time.monotonic() - started_s < 3


def test_a_receiver_that_drips_its_head() -> None:
    """A byte now and then does not lengthen the time."""
    assert attempt(drip(NO_CONTENT, 0.05), timeout_s=0.4)[0] == Attempted(Code.SEND_TIMEOUT)


@pytest.mark.parametrize(("status", "code"), [(200, None), (503, Code.STATUS_5XX), (410, Code.GONE)])
def test_a_body_that_drips_or_breaks_does_not_hold_up_what_the_status_says(status: int, code: Code | None) -> None:
    """Once the status is known it is the result: the body is waited for a second at most, and not missed."""
    head = b"HTTP/1.1 %d So\r\nContent-Length: 1000\r\n\r\n" % status

    async def slow(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        await answer(head)(receiver, writer)
        await drip(b"x" * 1000, 0.05)(receiver, writer)

    async def broken(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        await answer(head + b"some")(receiver, writer)
        writer.close()

    started_s = time.monotonic()
    assert attempt(slow, timeout_s=30.0)[0] == Attempted(code)
    assert time.monotonic() - started_s < 5
    assert attempt(broken)[0] == Attempted(code)


@pytest.mark.parametrize(("status", "code"), [(200, None), (500, Code.STATUS_5XX)])
def test_a_body_that_is_too_long_is_not_read(status: int, code: Code | None) -> None:
    """Of 64 MiB the receiver gets rid of what fits into buffers; what the status says still holds."""
    written = 0

    async def pour(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 %d So\r\nContent-Length: %d\r\n\r\n" % (status, 64 * MIB))
        while written < 64 * MIB:
            writer.write(bytes(MIB))
            await writer.drain()
            written += MIB

    assert attempt(pour)[0] == Attempted(code)
    assert written < 32 * MIB


def test_a_compressed_body_is_not_unpacked() -> None:
    """A bomb stays packed: what counts is what comes over the wire, and a little of that keeps the connection."""

    async def flow() -> int:
        bomb = gzip.compress(bytes(16 * MIB))
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
        async with receiving(answer(head + bomb)) as receiver, sender() as pushing:
            for _ in range(2):
                assert await pushing.send(to(receiver.url)) == Attempted()
                await drained(pushing)
            return receiver.connections

    assert asyncio.run(flow()) == 1


@pytest.mark.parametrize(("size", "connections"), [(0, 1), (MAX_ANSWER_BYTES - 1, 1), (4 * MAX_ANSWER_BYTES, 2)])
def test_a_connection_is_kept_only_if_its_answer_is_short(size: int, connections: int) -> None:
    """A second push goes over the first connection, unless too much was left on it."""

    async def flow() -> int:
        raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
        async with receiving(answer(raw)) as receiver, sender() as pushing:
            for _ in range(2):
                assert await pushing.send(to(receiver.url)) == Attempted()
                await drained(pushing)
            return receiver.connections

    assert asyncio.run(flow()) == connections


def test_cookies_are_not_kept() -> None:
    """What one delivery was told to remember, the next one does not tell."""

    async def flow() -> Receiver:
        raw = b"HTTP/1.1 200 OK\r\nSet-Cookie: track=1\r\nContent-Length: 0\r\n\r\n"
        async with receiving(answer(raw)) as receiver, sender() as pushing:
            for _ in range(2):
                await pushing.send(to(f"http://localhost:{receiver.port}/"))
        return receiver

    assert all("cookie" not in request.headers for request in asyncio.run(flow()).requests)


def test_the_environment_names_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxy variables that happen to be set move no delivery elsewhere."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    monkeypatch.delenv("no_proxy", raising=False)
    assert attempt(answer(NO_CONTENT))[0] == Attempted()


def test_an_idle_connection_that_the_receiver_closed_costs_no_attempt() -> None:
    """When it is closed while we write to it, the same attempt goes over a new one; once, and only then."""

    async def once(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        if len(receiver.requests) in (2, 4, 5):
            writer.close()
        else:
            await answer(NO_CONTENT)(receiver, writer)

    async def flow() -> None:
        async with receiving(once) as receiver, sender() as pushing:
            assert await pushing.send(to(receiver.url)) == Attempted()
            assert await pushing.send(to(receiver.url)) == Attempted()
            assert (len(receiver.requests), receiver.connections) == (3, 2)
            assert await pushing.send(to(receiver.url)) == Attempted(Code.ANSWER_INVALID)
            assert (len(receiver.requests), receiver.connections) == (5, 3)

    asyncio.run(flow())


def test_nobody_waits_for_another_tenants_receiver() -> None:
    """However many of one tenant's pushes hang at a host, another's to the same host goes out at once."""

    async def flow() -> None:
        async def hangs_for_acme(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
            hanging = receiver.requests[-1].line.startswith("POST /acme")
            await (hang if hanging else answer(NO_CONTENT))(receiver, writer)

        async with receiving(hangs_for_acme) as receiver, sender(timeout_s=60.0) as pushing:
            url = f"http://127.0.0.1:{receiver.port}"
            stuck = [asyncio.create_task(pushing.send(to(f"{url}/acme"))) for _ in range(80)]
            await until_async(lambda: len(receiver.requests) == 80)
            assert await pushing.send(to(f"{url}/globex", tenant="globex")) == Attempted()
            for each in stuck:
                each.cancel()
            await asyncio.wait(stuck)

    asyncio.run(flow())


def test_nobody_listens() -> None:
    """A port that is closed."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert asyncio.run(push(f"http://127.0.0.1:{unused.getsockname()[1]}/")) == Attempted(Code.CONNECT_FAILED)


def full_backlog() -> tuple[socket.socket, list[socket.socket]]:
    """A listener that takes no further connection: whoever connects waits."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    filling = []
    for _ in range(4):
        client = socket.socket()
        client.settimeout(0)
        client.connect_ex(listener.getsockname())
        filling.append(client)
    return listener, filling


def test_a_receiver_that_takes_no_connection() -> None:
    """It costs the time that connecting may cost."""
    listener, filling = full_backlog()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        started_s = time.monotonic()
        assert asyncio.run(push(url, connect_timeout_s=0.2)) == Attempted(Code.CONNECT_TIMEOUT)
        assert time.monotonic() - started_s < 3
        assert asyncio.run(push(url, timeout_s=0.2)) == Attempted(Code.CONNECT_TIMEOUT)
    finally:
        for one in (listener, *filling):
            one.close()


REFUSED_HOSTS = [
    "127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "localhost", "[::1]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]",
    "[2002:7f00:1::]", "[fe80::1]", "169.254.169.254", "10.0.0.1", "[fd00:ec2::254]", "[::]", "0", "127.0.0.1.",
]  # fmt: skip


@pytest.mark.parametrize("host", REFUSED_HOSTS)
def test_every_spelling_of_an_address_that_is_not_open_is_refused(host: str) -> None:
    """Whether a resolver reads it, aiohttp takes it for an address, or the URL's own check stops it."""

    async def flow() -> None:
        async with receiving(answer(NO_CONTENT)) as receiver:
            url = f"http://{host}:{receiver.port}/"
            async with HttpSender(allow_http=True) as pushing:
                assert await pushing.send(to(url)) == Attempted(Code.ADDRESS_REFUSED)
            assert receiver.connections == 0

    asyncio.run(flow())


@pytest.mark.parametrize("host", REFUSED_HOSTS)
def test_the_gate_at_the_socket_holds_alone(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the URL's check before it, none of these spellings comes to a connection either."""
    monkeypatch.setattr("postseal.senders.http.check_url", lambda _url, **_options: None)
    test_every_spelling_of_an_address_that_is_not_open_is_refused(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
def test_an_allowed_network_opens_what_lies_in_it(host: str) -> None:
    """As an address, by name, and mapped."""

    async def flow() -> None:
        async with receiving(answer(NO_CONTENT)) as receiver:
            allowed = (*LOOPBACK,) if host == "localhost" else (ip_network("127.0.0.1/32"),)
            url = f"http://{host}:{receiver.port}/"
            assert await push(url, allowed=allowed) == Attempted()
            assert await push(url, allowed=(ip_network("127.0.0.2/32"),)) == Attempted(Code.ADDRESS_REFUSED)
            assert receiver.connections == 1

    asyncio.run(flow())


def test_http_is_refused_unless_allowed() -> None:
    """Also for a destination that was made while it was allowed."""
    attempted, receiver = attempt(answer(NO_CONTENT), allow_http=False)
    assert attempted == Attempted(Code.ADDRESS_REFUSED)
    assert receiver.connections == 0


def names(*answers: Sequence[str]) -> tuple[Callable[[str, int], Any], list[str]]:
    """A look-up whose answers change, and what it was asked."""
    left, asked = list(answers), []

    async def look_up(host: str, port: int) -> list[AddressInfo]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (one, port)) for one in left.pop(0)]

    return look_up, asked


def test_a_name_that_changes_between_check_and_connect() -> None:
    """It is looked up once for a connection, which goes where was vetted; what it says later is vetted for the next."""
    allowed = (ip_network("127.0.0.1/32"),)

    async def closing(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    async def flow() -> None:
        look_up, asked = names(["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.1"])
        async with receiving(closing) as receiver, sender(allowed=allowed, look_up=look_up) as pushing:
            mail = to(f"http://rebind.example:{receiver.port}/")
            results = [(await pushing.send(mail)).code for _ in range(4)]
            assert results == [None, Code.ADDRESS_REFUSED, Code.ADDRESS_REFUSED, None]
            assert asked == ["rebind.example"] * 4
            assert receiver.connections == 2
            assert {request.headers["host"] for request in receiver.requests} == {f"rebind.example:{receiver.port}"}

    asyncio.run(flow())


def test_names_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such name, and a look-up that hangs."""

    async def fail(_host: str, _port: int) -> list[AddressInfo]:
        raise socket.gaierror(socket.EAI_NONAME, "x")

    assert asyncio.run(push("http://nowhere.example/", look_up=fail)) == Attempted(Code.DNS_FAILED)
    with hanging_names(monkeypatch):
        hangs = push("http://nowhere.example/", connect_timeout_s=0.1)
        assert asyncio.run(hangs) == Attempted(Code.DNS_FAILED)


def test_a_look_up_that_never_began_is_no_receivers_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of a tenant hang and keep its threads: what finds none is ours; another tenant's mail finds one."""

    async def flow() -> None:
        async with receiving(answer(NO_CONTENT)) as receiver, sender(connect_timeout_s=0.5) as pushing:
            urls = [f"http://slow-{n}.example/" for n in range(MAX_THREADS_OF_A_TENANT + 1)]
            results = await asyncio.gather(*(pushing.send(to(url)) for url in urls))
            assert Counter(results) == {
                Attempted(Code.DNS_FAILED): MAX_THREADS_OF_A_TENANT,
                Attempted(Code.SENDER_FAILED, ours=True): 1,
            }
            quick = f"http://quick.example:{receiver.port}/"
            assert await pushing.send(to(quick)) == Attempted(Code.SENDER_FAILED, ours=True)
            assert await pushing.send(to(quick, tenant="globex")) == Attempted()

    with hanging_names(monkeypatch):
        asyncio.run(flow())


@contextmanager
def hanging_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until the block ends the system does not answer for any name but `quick.example`, which is this machine."""
    release = threading.Event()

    def ask(host: str, port: int) -> list[AddressInfo]:
        if host == "quick.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))]
        release.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "x")

    monkeypatch.setattr(resolving, "_ask", ask)
    try:
        yield
    finally:
        release.set()


def test_a_second_address_is_tried() -> None:
    """Of several vetted addresses one that answers is enough."""

    async def flow() -> None:
        look_up, _ = names(["127.0.0.3", "127.0.0.1"])
        async with receiving(answer(NO_CONTENT)) as receiver:
            assert await push(f"http://two.example:{receiver.port}/", look_up=look_up) == Attempted()

    asyncio.run(flow())


def test_nothing_is_sent_unsigned() -> None:
    """Without a secret there is no request."""

    async def flow() -> None:
        async with receiving(answer(NO_CONTENT)) as receiver, sender() as pushing:
            assert await pushing.send(to(receiver.url, secrets=())) == Attempted(Code.SECRET_UNUSABLE, ours=True)
            assert receiver.connections == 0

    asyncio.run(flow())


def test_a_fault_of_ours_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of file descriptors, which costs no attempt, or a bug; the log says where, and nothing of the mail."""

    def no_more(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    def bug(*_: object) -> socket.socket:
        raise ZeroDivisionError("whsec_secret")

    structlog.reset_defaults()
    for fault, ours in ((no_more, True), (bug, False)):
        with monkeypatch.context() as patched, capture_logs() as logged:
            patched.setattr("postseal.senders.resolving.VettedResolver.open_socket", fault)
            result = asyncio.run(push("http://127.0.0.1:9/hook?token=tell-nobody"))
        assert result == Attempted(Code.SENDER_FAILED, ours=ours)
        [event] = logged
        assert event["event"] == "push_failed"
        assert "tell-nobody" not in str(event)
        assert "whsec" not in str(event)


def test_a_shortage_after_something_was_sent_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection took the request and broke, and there is no descriptor for another: it may have arrived."""
    open_socket, left = resolving.VettedResolver.open_socket, [1]

    def only_one(resolver: resolving.VettedResolver, info: AddressInfo) -> socket.socket:
        if not left:
            raise OSError(errno.EMFILE, "Too many open files")
        left.pop()
        return open_socket(resolver, info)

    async def once(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        await (answer(NO_CONTENT) if len(receiver.requests) == 1 else close)(receiver, writer)

    async def flow() -> None:
        async with receiving(once) as receiver, sender() as pushing:
            assert await pushing.send(to(receiver.url)) == Attempted()
            assert await pushing.send(to(receiver.url)) == Attempted(Code.SENDER_FAILED)
            assert len(receiver.requests) == 2

    monkeypatch.setattr(resolving.VettedResolver, "open_socket", only_one)
    asyncio.run(flow())


def test_nothing_of_url_secret_and_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Not by us, not by a library, not even when debugging, whatever a receiver does."""
    caplog.set_level(logging.DEBUG)
    scripts = [
        answer(NO_CONTENT),
        answer(b"tell-nobody"),
        answer(b"HTTP/1.1 500 tell-nobody\r\n\r\ntell-nobody"),
        close,
    ]

    async def flow() -> None:
        for script in scripts:
            async with receiving(script) as receiver:
                await push(f"{receiver.url}?token=tell-nobody", timeout_s=0.5)

    asyncio.run(flow())
    assert "tell-nobody" not in caplog.text
    assert "tell-nobody" not in repr(to("https://example.net/?token=tell-nobody"))
    assert MAIL.body.decode() not in repr(MAIL)


async def cancelled(pushing: HttpSender, url: str, reached: asyncio.Event) -> None:
    """Cancel an attempt that has come as far as `reached` says, and waits."""
    task = asyncio.create_task(pushing.send(to(url)))
    await asyncio.wait_for(reached.wait(), 5)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def drained(pushing: HttpSender) -> None:
    """Wait until no rest of an answer is being read."""
    await until_async(lambda: not pushing._draining)


def assert_nothing_is_open(pushing: HttpSender) -> None:
    """No connection, in use or idle."""
    connector = pushing._session.connector
    assert isinstance(connector, aiohttp.TCPConnector)
    assert not connector._acquired
    assert not connector._conns


def open_files() -> int:
    """How many this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_cancelled_look_up_leaves_nothing_behind() -> None:
    """It passes through, and no task is left."""

    async def flow() -> None:
        asked = asyncio.Event()

        async def look_up(_host: str, _port: int) -> list[AddressInfo]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with sender(look_up=look_up) as pushing:
            before = asyncio.all_tasks()
            await cancelled(pushing, "http://slow.example/", asked)
            assert_nothing_is_open(pushing)
            assert asyncio.all_tasks() == before

    asyncio.run(flow())


def test_a_cancelled_connecting_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes through; no task and no socket is left."""

    async def flow(url: str) -> None:
        opened, open_socket = asyncio.Event(), resolving.VettedResolver.open_socket

        def opening(resolver: resolving.VettedResolver, info: AddressInfo) -> socket.socket:
            opened.set()
            return open_socket(resolver, info)

        monkeypatch.setattr(resolving.VettedResolver, "open_socket", opening)
        async with sender() as pushing:
            before, open_before = asyncio.all_tasks(), open_files()
            await cancelled(pushing, url, opened)
            assert_nothing_is_open(pushing)
            assert asyncio.all_tasks() == before
            assert open_files() == open_before

    listener, filling = full_backlog()
    try:
        asyncio.run(flow(f"http://127.0.0.1:{listener.getsockname()[1]}/"))
    finally:
        for one in (listener, *filling):
            one.close()


async def half(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
    """A head, and no body."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    await asyncio.Event().wait()


@pytest.mark.parametrize("phase", ["TLS", "head"])
def test_a_cancellation_at_the_receiver_leaves_nothing_behind(phase: str) -> None:
    """It passes through, the receiver sees its connection end at once, and no task is left."""

    async def flow() -> None:
        async with receiving(hang, reads=phase != "TLS") as receiver, sender() as pushing:
            before = asyncio.all_tasks()
            url = receiver.url.replace("http", "https") if phase == "TLS" else receiver.url
            await cancelled(pushing, url, receiver.asked)
            await asyncio.wait_for(receiver.left.wait(), 5)
            assert_nothing_is_open(pushing)
            assert asyncio.all_tasks() == before

    asyncio.run(flow())


def test_what_the_status_says_is_told_before_the_body_is_there() -> None:
    """So nobody who is cut off meanwhile makes a failure of it; the connection is kept once the rest was short."""

    async def flow() -> None:
        rest = asyncio.Event()

        async def slow(_receiver: Receiver, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            await rest.wait()
            writer.write(b"ok")

        async with receiving(slow) as receiver, sender() as pushing:
            assert await pushing.send(to(receiver.url)) == Attempted()
            rest.set()
            await drained(pushing)
            assert await pushing.send(to(receiver.url)) == Attempted()
            assert receiver.connections == 1

    asyncio.run(flow())


def test_a_body_that_does_not_come_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed after a second, at once where too many are waited for, and when the sender is left."""
    monkeypatch.setattr(http, "DRAIN_S", 0.05)

    async def flow() -> None:
        async with receiving(half) as receiver, sender() as pushing:
            assert await pushing.send(to(receiver.url)) == Attempted()
            await asyncio.wait_for(receiver.left.wait(), 5)
            assert_nothing_is_open(pushing)

        monkeypatch.setattr(http, "DRAIN_S", 60.0)
        async with receiving(half) as receiver:
            before = asyncio.all_tasks()
            async with sender() as pushing:
                assert await pushing.send(to(receiver.url)) == Attempted()
            await asyncio.wait_for(receiver.left.wait(), 5)
            assert asyncio.all_tasks() == before

        monkeypatch.setattr(http, "MAX_DRAINING", 0)
        async with receiving(half) as receiver, sender() as pushing:
            assert await pushing.send(to(receiver.url)) == Attempted()
            assert_nothing_is_open(pushing)
            await asyncio.wait_for(receiver.left.wait(), 5)

    asyncio.run(flow())

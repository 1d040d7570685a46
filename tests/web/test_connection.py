"""One connection: what is no HTTP, too much of it, or too slow, and what cannot be mistaken for an answer."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from served import Site, running_site
from wire import ENVELOPE, Client, get, post, request

from fleet import enrol
from postseal.settings import Settings
from postseal.web import answers, connection
from postseal.web.connection import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED

DEADLINE_S = 0.5


@pytest.fixture(scope="module")
def hasty(site: Site) -> Iterator[Site]:
    """Another server on the same database, with a short deadline."""
    settings = Settings(receive_deadline_s=DEADLINE_S)
    with running_site(site.access, settings, device=site.device) as hasty:
        yield hasty


def require_refused(client: Client, raw: bytes, status: int) -> None:
    """`raw` is refused with a problem, and the connection ends."""
    client.send(raw)
    answer = client.answer()
    assert (answer.status, answer.reason) == (status, "request_invalid")
    assert answer.document["status"] == status
    assert answer.headers["connection"] == "close"
    assert client.is_closed()


def test_a_slow_head_is_cut_off(hasty: Site) -> None:
    """The deadline is absolute: a byte now and then does not move it."""
    began_s = time.monotonic()
    with hasty.client() as client:
        client.send(b"GET /healthz HTTP/1.1\r\nx: ")
        assert client.is_closed()
    assert DEADLINE_S * 0.9 <= time.monotonic() - began_s < DEADLINE_S + 5


def test_empty_lines_for_ever_are_cut_off(hasty: Site) -> None:
    """Line feeds before a request, which parsers skip, hold no connection either."""
    with hasty.client() as client:
        client.send(b"\r\n")
        assert client.is_closed()


def test_a_second_slow_head_is_cut_off(hasty: Site) -> None:
    """The deadline holds for every request of a connection."""
    with hasty.client() as client:
        assert client.ask(get("/healthz")).status == 200
        client.send(b"G")
        assert client.is_closed()


def test_a_body_that_nobody_reads_is_cut_off(site: Site) -> None:
    """A GET with a body is answered at once, and its connection ends with that answer."""
    with site.client() as client:
        answer = client.ask(request("GET", "/healthz", content_length="10"))
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.is_closed()


def test_an_idle_connection_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection over which nothing was ever sent does not stay."""
    monkeypatch.setattr(connection, "IDLE_S", 0.1)
    with site.client() as client:
        assert client.is_closed()


def test_a_connection_is_kept_between_requests(site: Site) -> None:
    """Requests follow one another on one connection."""
    with site.client() as client:
        for _ in range(3):
            answer = client.ask(get("/healthz"))
            assert (answer.status, "connection" in answer.headers) == (200, False)


def test_too_many_connections_are_told_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a connection is answered 503 and closed, not reset; the others are served on."""
    sent, of_refusal = threading.Event(), answers.of_refusal

    def once_sent(*args: Any, **changes: Any) -> answers.Answer:
        assert sent.wait(DEADLINE_S + 5)
        return of_refusal(*args, **changes)

    monkeypatch.setattr(answers, "of_refusal", once_sent)
    with running_site_of(site, 2, monkeypatch) as small, small.client() as first, small.client() as second:
        assert (first.ask(get("/healthz")).status, second.ask(get("/healthz")).status) == (200, 200)
        with small.client() as third:
            third.send(get("/healthz"))
            sent.set()
            answer = third.answer()
            assert (answer.status, answer.reason, answer.headers["retry-after"]) == (503, "unavailable", "1")
            assert third.is_ended()
        assert first.ask(get("/healthz")).status == 200


def running_site_of(site: Site, connections: int, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Site]:
    """Another server on the same database, which takes only so many connections."""
    monkeypatch.setattr("postseal.web.server._max_connections", lambda _settings: connections)
    return running_site(site.access, Settings(), device=site.device)


@pytest.mark.parametrize(
    "raw",
    [
        get("/healthz", x="a" * MAX_HEAD_BYTES),
        get("/" + "a" * MAX_HEAD_BYTES),
        get("/healthz", **{f"x{number}": "a" * 1000 for number in range(17)}),
        get("/healthz", **{f"x{number}": "" for number in range(MAX_HEADERS)}),
        get("/healthz", **{"a" * MAX_HEAD_BYTES: ""}),
    ],
    ids=["value", "url", "sum", "count", "name"],
)
def test_a_head_has_bounds(site: Site, raw: bytes) -> None:
    """431 for too many bytes or fields, in one piece or in many."""
    with site.client() as client:
        require_refused(client, raw, 431)
    with site.client() as client:
        client.send(raw[:100])
        require_refused(client, raw[100:], 431)


def test_a_head_without_end_is_refused_before_its_deadline(site: Site) -> None:
    """A field's value that goes on and on is not gathered."""
    with site.client() as client:
        client.send(b"GET /healthz HTTP/1.1\r\nx: ")
        require_refused(client, b"a" * (4 * MAX_HEAD_BYTES), 431)


def test_as_much_as_is_allowed_is_taken(site: Site) -> None:
    """The bounds themselves are within."""
    fields = {f"x{number}": "" for number in range(MAX_HEADERS - 2)}
    assert site.ask(get("/healthz", **fields, y="a" * (MAX_HEAD_BYTES - 1024))).status == 200


HEAD = f"POST /v1/envelopes HTTP/1.1\r\nhost: x\r\ncontent-type: {ENVELOPE}\r\n".encode()
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        CHUNKED + b"content-length: 2\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"content-length: +2\r\n\r\n{}",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD.replace(b"\r\n", b"\n") + b"\n",
        HEAD + b"x: a\nx: b\r\n\r\n",
        HEAD + b"x: a\r\n b\r\n\r\n",
        HEAD + b"x: a\0b\r\n\r\n",
        CHUNKED + b"\r\n2\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"\r\n2\r\n{}x\r\n0\r\n\r\n",
        CHUNKED + b"\r\n2\r\n{}\r\n0\r\nauthorization: Bearer x\r\n\r\n",
        CHUNKED + b"\r\n2\r\n{}\r\n0\r\nx: " + b"a" * (20 * MAX_HEAD_BYTES),
        CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"host: y\r\ncontent-length: 2\r\n\r\n{}",
        HEAD.replace(b"host: x\r\n", b"") + b"content-length: 2\r\n\r\n{}",
        HEAD + b"host: x\r\ncontent-length: 2\r\n\r\n{}",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /health\xffz HTTP/1.1\r\n\r\n",
        b"GET /health\0z HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
def test_what_is_no_plain_request_is_refused(site: Site, raw: bytes) -> None:
    """Both lengths, no Host or two, a bare LF, a folded line, trailers, an upgrade and their like: 400, and the end."""
    with site.client() as client:
        client.send(raw)
        answer = client.answer()
        assert (answer.status, answer.reason) in {(400, "request_invalid"), (431, "request_invalid")}
        assert client.is_closed()


@pytest.mark.parametrize("end", [b"0\r\nx: y\r\n\r\n", b"2;" + b"e" * (20 * MAX_HEAD_BYTES)])
def test_a_known_callers_broken_body_is_never_taken(site: Site, end: bytes) -> None:
    """An envelope whose chunks end in trailers, or in an endless extension, is not committed."""
    device = enrol(site.access, f"broken-{len(end)}")
    body = device.envelope(1)
    with site.client() as client:
        client.send(
            request(
                "POST",
                "/v1/envelopes",
                credential=device.token.reveal(),
                content_type=ENVELOPE,
                transfer_encoding="chunked",
            )
            + b"%x\r\n%b\r\n" % (len(body), body)
        )
        client.send(end)
        assert client.answer().status in {400, 431}
        assert client.is_closed()
    assert site.ask(post(device.token.reveal(), body)).document["outcome"] == "accepted"


def test_extensions_among_the_data_are_bounded(site: Site) -> None:
    """A body carries no more beside its data than a head may have, however little of it stands in one chunk."""
    extended = b"1;%b\r\nx\r\n" % (b"e" * 2000)
    with site.client() as client:
        require_refused(client, CHUNKED + b"\r\n" + extended * (MAX_HEAD_BYTES // 1000), 431)


def test_pipelined_requests_are_answered_in_order(site: Site) -> None:
    """Several requests in one packet are several requests, one after the other."""
    device = enrol(site.access, "pipelined")
    token = device.token.reveal()
    with site.client() as client:
        client.send(b"".join(post(token, device.envelope(sequence)) for sequence in (1, 2, 3)) + get("/healthz"))
        assert [client.answer().document["sequence"] for _ in range(3)] == [1, 2, 3]
        assert client.answer().status == 200


def test_garbage_behind_a_request_is_not_its_answer(site: Site) -> None:
    """The request before it gets its own answer, and then the connection ends."""
    device = enrol(site.access, "garbage")
    with site.client() as client:
        client.send(post(device.token.reveal(), device.envelope(1)) + b"\0\0\0\0")
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (201, "close")
        assert client.is_closed()


def test_broken_chunks_behind_a_request_are_not_its_answer(site: Site) -> None:
    """Where a later request breaks in its body, no answer can be mistaken for that to the earlier one."""
    device = enrol(site.access, "broken-behind")
    with site.client() as client:
        client.send(post(device.token.reveal(), device.envelope(1)) + CHUNKED + b"\r\nzz\r\n")
        assert client.is_closed()
    assert site.ask(post(device.token.reveal(), device.envelope(2))).status == 201


def test_pipelines_are_short(site: Site) -> None:
    """Thousands of requests in one packet do not become thousands of waiting requests."""
    with site.client() as client:
        client.send(get("/healthz") * (MAX_PIPELINED + 10))
        for _ in range(MAX_PIPELINED + 1):
            assert client.answer().status == 200
        assert client.is_closed()


def test_the_rest_of_a_refused_request_is_no_request(site: Site) -> None:
    """What follows an early answer is thrown away, even where it looks like a request."""
    device = enrol(site.access, "hidden")
    hidden = post(device.token.reveal(), device.envelope(1))
    with site.client() as client:
        client.send(post(device.token.reveal(), hidden, content_type="text/plain", content_length="9000"))
        assert client.answer().status in {413, 415}
        assert client.is_closed()
    assert site.ask(post(device.token.reveal(), device.envelope(1))).document["outcome"] == "accepted"


def test_http_1_0_and_head_are_answered(site: Site) -> None:
    """An old client's connection ends after its answer; a HEAD gets no body."""
    with site.client() as client:
        answer = client.ask(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.is_closed()
    with site.client() as client:
        client.send(request("HEAD", "/healthz") + b"GARBAGE")
        assert b"200 OK" in client.head()


def test_nothing_is_said_about_the_server(site: Site) -> None:
    """A date, as RFC 9110 wants; no product, no version."""
    answer = site.ask(get("/healthz"))
    assert "server" not in answer.headers
    assert answer.headers["date"].endswith("GMT")

"""Bodies: no length that is declared, left out or wrong is taken at its word, and every refusal is audited."""

import hashlib
from collections.abc import Iterator

import pytest
from served import Site, running_site
from wire import ENVELOPE, NDJSON, Answer, post, post_batch, request

from fleet import enrol
from postseal.postgres.access import Access
from postseal.settings import Settings
from postseal.web.body import HeldBytes

DEADLINE_S = 0.5
PATIENT_DEADLINE_S = 3.0
"""For a body that is to hold its room meanwhile."""
PENDING_BYTES = 1 << 20
ATTEMPTS = 50
"""Until what another connection sent has been read."""


@pytest.fixture(scope="module")
def site(shared_access: Access) -> Iterator[Site]:
    """A server with a short deadline and little room for bodies that are on their way."""
    settings = Settings(receive_deadline_s=DEADLINE_S, max_pending_body_bytes=PENDING_BYTES)
    with running_site(shared_access, settings) as site:
        yield site


@pytest.fixture(scope="module")
def patient(site: Site) -> Iterator[Site]:
    """Another server on the same database, with as little room and more time."""
    settings = Settings(receive_deadline_s=PATIENT_DEADLINE_S, max_pending_body_bytes=PENDING_BYTES)
    with running_site(site.access, settings, device=site.device) as patient:
        yield patient


def chunked(*parts: bytes) -> bytes:
    """A body in chunks, without its end."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def require_audited(site: Site, answer: Answer, reason: str, received: bytes) -> None:
    """The refusal was committed, under the name of what had come."""
    assert answer.reason == reason
    identity = hashlib.sha256(b"postseal-undecodable\0" + received).digest()
    assert site.audits(answer.document["correlationId"]) == [("refused", reason, None, identity, True)]


def open_post(site: Site, **headers: str) -> bytes:
    """The head of a single envelope's request, its body to follow."""
    token = site.device.token.reveal()
    return request("POST", "/v1/envelopes", credential=token, **{"content_type": ENVELOPE, **headers})


def test_a_declared_length_over_the_limit_is_refused_unread(site: Site) -> None:
    """413 comes before any byte of the body; the caller is not told to go on sending."""
    head = open_post(site, content_length="8193", expect="100-continue")
    with site.client() as client:
        answer = client.ask(head)
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        require_audited(site, answer, "body_too_large", b"")


def test_a_declared_length_over_the_limit_is_told_although_all_of_it_was_sent(site: Site) -> None:
    """The answer is not lost to a reset when the body was on its way already."""
    answer = site.ask(post(site.device.token.reveal(), bytes(8_000_000)))
    assert answer.status == 413


def test_a_chunked_body_is_counted_as_it_comes(site: Site) -> None:
    """413 at the byte that is too many, without waiting for the end."""
    with site.client() as client:
        client.send(open_post(site, transfer_encoding="chunked") + chunked(b"a" * 8192))
        client.send(chunked(b"b"))
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        require_audited(site, answer, "body_too_large", b"a" * 8192)


def test_a_chunked_envelope_is_taken(site: Site) -> None:
    """Chunks are as good as a declared length, trickling in or not."""
    device = enrol(site.access, "chunked")
    body = device.envelope(1)
    head = request(
        "POST", "/v1/envelopes", credential=device.token.reveal(), content_type=ENVELOPE, transfer_encoding="chunked"
    )
    with site.client() as client:
        client.send(head)
        client.send(chunked(body[:100]))
        client.send(chunked(body[100:]) + b"0\r\n\r\n")
        assert client.answer().status == 201


def test_the_greatest_body_is_read(site: Site) -> None:
    """8,192 bytes are within the limit; what is wrong with them is another matter."""
    answer = site.ask(post(site.device.token.reveal(), b"x" * 8192))
    assert answer.reason == "envelope_malformed"


def test_a_body_longer_than_declared_is_no_second_success(site: Site) -> None:
    """What stands behind the declared length is another request, or nothing; never part of this one."""
    device = enrol(site.access, "lying")
    body = device.envelope(1)
    with site.client() as client:
        client.send(post(device.token.reveal(), body + b"extra", content_length=str(len(body))))
        assert client.answer().status == 201
        assert client.is_closed()
    with site.client() as client:
        client.send(post(device.token.reveal(), body, content_length=str(len(body) - 1)))
        assert client.answer().reason == "envelope_malformed"


def test_a_truncated_body_changes_nothing(site: Site) -> None:
    """A client that goes away in the middle is answered nothing, and nothing is kept."""
    device = enrol(site.access, "truncated")
    with site.client() as client:
        client.send(post(device.token.reveal(), device.envelope(1))[:-1])
        client.end()
        assert client.is_closed()
    assert site.ask(post(device.token.reveal(), device.envelope(1))).document["outcome"] == "accepted"


def test_a_slow_body_is_timed_out(site: Site) -> None:
    """408 once the deadline for the whole request is over, however the body trickles; then the end."""
    with site.client() as client:
        client.send(open_post(site, content_length="1000") + b"{")
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        require_audited(site, answer, "request_timeout", b"{")
        assert client.is_closed()


def test_a_body_that_does_not_begin_is_timed_out(site: Site) -> None:
    """The deadline counts from the head's first byte, not from the body's."""
    with site.client() as client:
        client.send(open_post(site, content_length="1000"))
        require_audited(site, client.answer(), "request_timeout", b"")


def test_a_slow_body_of_a_stranger_is_timed_out(site: Site) -> None:
    """The same for who is not known; there is no tenant to audit it for."""
    with site.client() as client:
        client.send(post(None, b"{}", content_length="1000"))
        answer = client.answer()
        assert answer.reason == "request_timeout"
        assert site.audits(answer.document["correlationId"]) == []


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "application/json"},
        {"content_type": ENVELOPE + "; charset=utf-8"},
        {"content_type": NDJSON},
        {"content_type": ENVELOPE + "\r\ncontent-type: " + ENVELOPE},
        {"content_type": ""},
        {"content_encoding": "gzip"},
        {"content_encoding": "identity"},
        {"content_length": "0\r\nx: y", "transfer_encoding": "gzip, chunked"},
    ],
)
def test_any_other_media_type_or_encoding_is_refused(site: Site, headers: dict[str, str]) -> None:
    """One media type, without parameters, and no encoding at all."""
    if "transfer_encoding" in headers:
        raw = open_post(site, transfer_encoding="gzip, chunked") + b"0\r\n\r\n"
    else:
        raw = post(site.device.token.reveal(), b"{}", **headers)
    answer = site.ask(raw)
    assert answer.status == 415
    require_audited(site, answer, "unsupported_media_type", b"")


def test_the_media_type_has_no_case(site: Site) -> None:
    """Media types are compared without case (RFC 9110)."""
    device = enrol(site.access, "shouting")
    answer = site.ask(post(device.token.reveal(), device.envelope(1), content_type=ENVELOPE.upper()))
    assert answer.status == 201


def test_strangers_cannot_use_up_the_room_of_known_callers(patient: Site) -> None:
    """What strangers' bodies may hold at once is capped: 503 beyond, while a known caller's body is taken."""
    known = enrol(patient.access, "known")
    assert patient.ask(post(known.token.reveal(), known.envelope(1))).status == 201
    half = b"x" * (PENDING_BYTES * 5 // 8)
    with patient.client() as holder:
        holder.send(post_batch("nobody", half, content_length=str(len(half) + 1)))
        for _ in range(ATTEMPTS):
            answer = patient.ask(post_batch("nobody", half))
            if answer.status != 401:
                break
        assert (answer.status, answer.reason, answer.headers["retry-after"]) == (503, "unavailable", "1")
        (line,) = patient.ask(post_batch(known.token.reveal(), half)).lines
        assert line["reason"] == "body_too_large"
        assert holder.answer().reason == "request_timeout"
    assert patient.ask(post_batch("nobody", half)).reason == "unauthenticated"


def test_a_refused_body_gives_its_room_back(site: Site) -> None:
    """Room is not lost with a body that is refused or whose sender goes away."""
    part = b"x" * (PENDING_BYTES - 1)
    for _ in range(3):
        with site.client() as client:
            client.send(post_batch("nobody", part, content_length=str(len(part) + 1)))
            client.end()
            assert client.is_closed()
    for _ in range(3):
        assert site.ask(post_batch("nobody", part)).reason == "unauthenticated"


def test_no_holder_has_more_than_a_share():
    """One tenant, or one stranger's address, cannot use up the room of the others; what is let go is free again."""
    held = HeldBytes(64 << 20)
    evil, good = held.of("evil"), held.of("good")
    assert evil.take(held.share_bytes)
    assert not evil.take(1)
    assert good.take(1 << 20)
    evil.release(held.share_bytes)
    assert evil.take(1)
    evil.release(1)
    good.release(1 << 20)
    assert (held.free_bytes, dict(held.held_by)) == (64 << 20, {})


def test_a_body_without_room_costs_no_commit(patient: Site) -> None:
    """A known caller's body for which there is no room is `unavailable`, and nothing of it is audited."""
    device = enrol(patient.access, "crowded")
    token, half = device.token.reveal(), b"x" * (PENDING_BYTES * 5 // 8)
    with patient.client() as holder:
        holder.send(post_batch(token, half, content_length=str(len(half) + 1)))
        for _ in range(ATTEMPTS):
            answer = patient.ask(post_batch(token, half))
            if answer.status != 200:
                break
        assert (answer.status, answer.reason, answer.headers["retry-after"]) == (503, "unavailable", "1")
        assert patient.audits(answer.document["correlationId"]) == []

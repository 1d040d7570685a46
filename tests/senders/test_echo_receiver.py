"""The echo receiver: what it takes, what it refuses, and what it remembers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from receivers import LOOPBACK, MAIL, Receiver, answer, receiving
from sealed import PAIR, SEED, SHARED, delivery, headers, key_set

from postseal import echo
from postseal.echo import Answer, Echo
from postseal.envelope import ed25519
from postseal.key_set import EnvelopeKeys, KeysUnreadable, keys_at, keys_in_file, read_key_set
from postseal.kinds_folder import load_kinds
from postseal.rules.delivery import Attempted, Code
from postseal.senders import PROBE
from postseal.senders.http import HttpSender
from postseal.senders.webhook import Verifier, for_receiver, make_secret

OTHER_SEED = bytes(range(1, 33))
VERIFIER = Verifier([for_receiver(SHARED), for_receiver(PAIR)])


def keys(*seeds: bytes) -> EnvelopeKeys:
    """Keys that are there."""

    async def read() -> bytes:
        return key_set(*seeds)

    return EnvelopeKeys(read)


class Poster:
    """Posts to an echo and has its answers."""

    def __init__(self, session: aiohttp.ClientSession, url: str, answers: list[Answer]) -> None:
        self._session, self._url, self.answers = session, url, answers

    async def post(self, body: bytes, **changed: Any) -> int:
        """The status of one request; `changed` are headers in place of the right ones."""
        given = changed.pop("headers", None) or headers(body)
        async with self._session.post(self._url, data=body, headers=given | changed) as response:
            assert await response.read() == b""
            return response.status


@asynccontextmanager
async def echoing(**options: Any) -> AsyncGenerator[tuple[Echo, Poster]]:
    """An echo on a free port, and who posts to it."""
    answers: list[Answer] = []
    receiver = Echo(**({"verifier": VERIFIER, "keys": keys(), "told": answers.append} | options))
    async with receiver.listening("127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        yield receiver, Poster(session, url, answers)


def test_what_our_sender_sends_is_taken() -> None:
    """Both signatures hold, the event is there with its route and kind, and whoever waits for it is woken."""

    async def flow() -> None:
        body = delivery(7)
        receiver = Echo(VERIFIER, keys(), audience="erp")
        async with (
            receiver.listening("127.0.0.1", 0) as url,
            HttpSender(allowed=LOOPBACK, allow_http=True) as sender,
        ):
            waiting = asyncio.create_task(receiver.has(1))
            assert await sender.send(replace(MAIL, url=url, body=body, secrets=(SHARED, PAIR))) == Attempted()
            await asyncio.wait_for(waiting, 5)
        [came] = receiver.received
        assert (came.delivery, came.sequence, came.kind, came.duplicate) == (str(MAIL.delivery), 7, "heartbeat", False)
        assert (came.tenant, came.project, came.audience) == ("acme", "apollo", "erp")
        assert came.keyid == ed25519.thumbprint(ed25519.public_key(SEED))

    asyncio.run(flow())


def test_duplicates_have_no_effect() -> None:
    """The same sequence of the same audience again, under whatever delivery id, is taken and counts for nothing."""

    async def flow() -> None:
        body = delivery(1)
        async with echoing() as (receiver, poster):
            assert [await poster.post(body) for _ in range(3)] == [204] * 3
            assert await poster.post(delivery(2)) == 204
            assert await poster.post(delivery(1, audience="crm")) == 204
            assert [came.duplicate for came in receiver.received] == [False, True, True, False, False]
            assert receiver.events == 3

    asyncio.run(flow())


def test_a_sequence_with_another_event_is_refused() -> None:
    """A control plane that gives a number out twice is found out, and the first event stays the one."""

    async def flow() -> None:
        body = delivery(1)
        async with echoing() as (receiver, poster):
            assert [await poster.post(one) for one in (body, delivery(1), body)] == [204, 400, 204]
            assert str(poster.answers[1].why).startswith("sequence_conflict")
            assert receiver.events == 1

    asyncio.run(flow())


def test_requests_whose_signature_does_not_hold() -> None:
    """Unsigned, signed by another, for another body, old, or with one header changed: 401, and nothing is opened."""

    async def flow() -> None:
        body = delivery()
        async with echoing(keys=EnvelopeKeys(unreadable)) as (receiver, poster):
            stranger = [make_secret(SHARED.scheme), make_secret(PAIR.scheme)]
            assert await poster.post(body, headers={"webhook-id": "x"}) == 401
            assert await poster.post(body, headers=headers(body, secrets=stranger)) == 401
            assert await poster.post(body, headers=headers(delivery())) == 401
            assert await poster.post(body, **{"webhook-id": str(uuid4())}) == 401
            assert await poster.post(body, **{"webhook-timestamp": "1767225600"}) == 401
            assert not receiver.received
            assert all(answer.delivery is None for answer in poster.answers)

    async def unreadable() -> bytes:
        raise AssertionError

    asyncio.run(flow())


INNER = {
    "no envelope": (b"{}", "envelope_malformed"),
    "another key": (delivery(seed=OTHER_SEED), "key_unknown"),
    "a byte changed": (delivery().replace(b'"sig":"', b'"sig":"AAAA', 1)[:-4] + b'"}]}', "envelope_malformed"),
    "what a device sends": (delivery(audience=None), "payload_invalid"),
    "another audience": (delivery(audience="crm"), "route_mismatch"),
    "another version": (delivery(schemaVersion=2), "schema_version_unsupported"),
    "an unknown kind": (delivery(data={"kind": "acme.job", "id": 1}), "payload_invalid"),
}


@pytest.mark.parametrize("what", INNER)
def test_envelopes_that_are_refused(what: str) -> None:
    """A good request around a bad envelope: 400, with the reason, and no effect."""
    body, reason = INNER[what]

    async def flow() -> None:
        async with echoing(audience="erp") as (receiver, poster):
            assert await poster.post(body) == 400
            assert str(poster.answers[0].why).startswith(reason)
            assert receiver.events == 0

    asyncio.run(flow())


def test_a_forged_envelope_is_refused() -> None:
    """The tenant's key id with another key's signature."""
    forged = delivery(seed=OTHER_SEED)
    ours, theirs = (ed25519.thumbprint(ed25519.public_key(seed)).encode() for seed in (SEED, OTHER_SEED))

    async def flow() -> None:
        async with echoing() as (receiver, poster):
            assert await poster.post(forged.replace(theirs, ours)) == 400
            assert str(poster.answers[0].why).startswith("signature_invalid")
            assert receiver.events == 0

    asyncio.run(flow())


def test_kinds_of_the_deployment(tmp_path: Path) -> None:
    """With its schema a deployment's kind is taken."""
    (tmp_path / "acme.job.json").write_text(
        '{"type":"object","additionalProperties":false,"required":["kind","id"],"properties":'
        '{"kind":{"const":"acme.job"},"id":{"type":"integer","minimum":0,"maximum":9}}}'
    )

    async def flow() -> None:
        async with echoing(kinds=load_kinds(tmp_path)) as (receiver, poster):
            assert await poster.post(delivery(data={"kind": "acme.job", "id": 1})) == 204
            assert receiver.received[0].kind == "acme.job"

    asyncio.run(flow())


def test_first_attempts_are_failed_on_purpose() -> None:
    """Each delivery fails that often and then goes through; what is not signed does not count."""

    async def flow() -> None:
        body = delivery()
        async with echoing(fail_first=2) as (receiver, poster):
            first, second = (headers(body) for _ in range(2))
            assert await poster.post(body, headers=first | {"webhook-timestamp": "1"}) == 401
            order = (first, second, first, second, first, second)
            assert [await poster.post(body, headers=one) for one in order] == [500, 500, 500, 500, 204, 204]
            assert [came.duplicate for came in receiver.received] == [False, True]

    asyncio.run(flow())


def test_a_test_of_the_destination() -> None:
    """It is taken if its signature holds, even by a receiver that fails first, and is no delivery."""

    async def flow() -> None:
        async with (
            echoing(keys=EnvelopeKeys(unreadable), fail_first=1) as (receiver, poster),
            HttpSender(allowed=LOOPBACK, allow_http=True) as sender,
        ):
            mail = replace(MAIL, url=poster._url, body=PROBE, secrets=(SHARED,))
            assert await sender.send(mail) == Attempted()
            assert await poster.post(PROBE, headers=headers(PROBE, secrets=[make_secret(SHARED.scheme)])) == 401
            assert (receiver.events, len(receiver.received)) == (0, 0)
            assert poster.answers[0] == Answer(204, "a test of the destination", str(MAIL.delivery))

    async def unreadable() -> bytes:
        raise AssertionError

    asyncio.run(flow())


def test_bounds_of_a_request() -> None:
    """Another method, and more bytes than an envelope may have, declared or chunked; packed bytes stay packed."""

    async def pieces() -> AsyncGenerator[bytes]:
        for _ in range(9):
            yield b"x" * 1024

    async def flow() -> None:
        async with echoing() as (receiver, poster):
            async with poster._session.get(poster._url) as response:
                assert response.status == 405
            assert await poster.post(b"x" * 8193) == 413
            async with poster._session.post(poster._url, data=pieces()) as response:
                assert response.status == 413
            assert await poster.post(delivery(), **{"Content-Encoding": "gzip"}) == 204
            assert receiver.events == 1

    asyncio.run(flow())


def test_a_request_that_does_not_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that stops half way costs a bounded time."""
    monkeypatch.setattr(echo, "RECEIVE_S", 0.1)

    async def flow() -> None:
        async with echoing() as (_, poster):
            port = int(poster._url.rpartition(":")[2].rstrip("/"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf")
            assert (await reader.readline()).split(b" ")[1] == b"408"
            writer.close()
            await writer.wait_closed()

    asyncio.run(flow())


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten first: then a duplicate counts as new."""
    monkeypatch.setattr(echo, "REMEMBERED", 3)
    monkeypatch.setattr(echo, "KEPT", 2)

    async def flow() -> None:
        bodies = [delivery(sequence) for sequence in (1, 2, 3, 4)]
        async with echoing() as (receiver, poster):
            for body in (*bodies, bodies[3], bodies[0]):
                assert await poster.post(body) == 204
            assert receiver.events == 5
            assert [(came.sequence, came.duplicate) for came in receiver.received] == [(4, True), (1, False)]
            assert len(receiver._known._values) == 3

    asyncio.run(flow())


def test_a_rotation_is_followed_and_not_asked_for_in_vain() -> None:
    """An unknown key makes the keys be read again, at most every few seconds."""
    now_s, known, reads = 0.0, [SEED], 0

    async def read() -> bytes:
        nonlocal reads
        reads += 1
        return key_set(*known)

    async def flow() -> None:
        nonlocal now_s
        found = EnvelopeKeys(read, lambda: now_s)
        old, new = (ed25519.thumbprint(ed25519.public_key(seed)) for seed in (SEED, OTHER_SEED))
        assert await found.find(old)
        assert await found.find(new) is None
        known.append(OTHER_SEED)
        assert await found.find(new) is None
        assert reads == 1
        now_s = 5.0
        assert await found.find(new) == ed25519.public_key(OTHER_SEED)
        assert await found.find(old)
        assert reads == 2

    asyncio.run(flow())


def test_who_asks_while_the_keys_are_read_waits_for_them() -> None:
    """At the start, and while a rotation is followed, no delivery is refused for a key that is on its way."""
    gate, reads = asyncio.Event(), 0

    async def read() -> bytes:
        nonlocal reads
        reads += 1
        await gate.wait()
        return key_set()

    async def flow() -> None:
        found = EnvelopeKeys(read)
        keyid = ed25519.thumbprint(ed25519.public_key(SEED))
        asking = [asyncio.create_task(found.find(keyid)) for _ in range(5)]
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*asking) == [ed25519.public_key(SEED)] * 5
        assert reads == 1

    asyncio.run(flow())


def test_keys_that_cannot_be_read_are_nobodys_fault() -> None:
    """A delivery is neither taken nor refused while its key cannot be looked up."""

    async def gone() -> bytes:
        raise KeysUnreadable("the control plane is away")

    async def flow() -> None:
        async with echoing(keys=EnvelopeKeys(gone)) as (receiver, poster):
            assert [await poster.post(delivery()) for _ in range(2)] == [503, 503]
            assert [answer.why for answer in poster.answers] == ["the control plane is away"] * 2
            assert receiver.events == 0

    asyncio.run(flow())


def test_a_set_of_keys() -> None:
    """Keys of other types are left alone; ids are computed; what is no set, or holds a bad key, is refused whole."""
    key = ed25519.public_key(SEED)
    assert read_key_set(key_set(SEED)) == {ed25519.thumbprint(key): key}
    assert read_key_set(b'{"keys":[{"kty":"RSA","n":"AQAB"},{"kty":"OKP","crv":"X25519","x":"AA"}]}') == {}
    bad = [b"", b"[]", b"{}", b'{"keys":{}}', b'{"keys":[{"kty":"OKP","crv":"Ed25519","x":"AA"}]}', b"[" * 10_000]
    bad += [b'{"keys":[{"kty":"OKP","crv":"Ed25519","x":"' + b"A" * 43 + b'"}]}', b'{"keys":[' + b" " * 65_536 + b"]}"]
    for raw in bad:
        with pytest.raises(KeysUnreadable):
            read_key_set(raw)


def test_keys_from_a_file(tmp_path: Path) -> None:
    """Read when needed; one that is missing is told."""
    file = tmp_path / "keys.json"
    with pytest.raises(KeysUnreadable, match=r"cannot read .*keys.json"):
        asyncio.run(keys_in_file(file).load())
    file.write_bytes(key_set())
    assert asyncio.run(keys_in_file(file).find(ed25519.thumbprint(ed25519.public_key(SEED))))


def test_keys_from_a_control_plane() -> None:
    """They are asked for with the header that was given; whatever else it answers is told without the URL's rest."""

    async def flow() -> None:
        document = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(key_set()), key_set())
        async with receiving(answer(document)) as receiver:
            assert await keys_at(receiver.url, "Bearer word").find(ed25519.thumbprint(ed25519.public_key(SEED)))
            [request] = receiver.requests
            assert request.headers["authorization"] == "Bearer word"
        async with receiving(answer(document)) as elsewhere:
            place = elsewhere.url.encode()
            redirect = b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % place
            async with receiving(answer(redirect)) as receiver:
                await refuses(receiver)
            assert elsewhere.connections == 0
        for raw in (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", b"garbage"):
            async with receiving(answer(raw)) as receiver:
                await refuses(receiver)

    async def refuses(receiver: Receiver) -> None:
        with pytest.raises(KeysUnreadable) as raised:
            await keys_at(f"{receiver.url}?tell-nobody", "Bearer word").load()
        assert "127.0.0.1" in str(raised.value)
        assert "tell-nobody" not in str(raised.value)
        assert "word" not in str(raised.value)

    asyncio.run(flow())


def test_a_sender_and_an_echo_that_fails_first() -> None:
    """What the sender makes of a failed attempt, and that the same delivery goes through after it."""

    async def flow() -> None:
        receiver = Echo(VERIFIER, keys(), fail_first=1)
        async with (
            receiver.listening("127.0.0.1", 0) as url,
            HttpSender(allowed=LOOPBACK, allow_http=True) as sender,
        ):
            mail = replace(MAIL, url=url, body=delivery(), secrets=(PAIR,))
            assert await sender.send(mail) == Attempted(Code.STATUS_5XX)
            assert await sender.send(replace(mail, attempt=2)) == Attempted()
        assert receiver.events == 1

    asyncio.run(flow())

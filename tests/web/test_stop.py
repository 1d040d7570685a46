"""What a stop does to each connection: answered, closed, or cut at the grace's end; and the bounds of a process."""

import asyncio
import resource
import socket
import threading
from typing import Any

import pytest
from served import running_site
from wire import get, post

from fleet import as_owner, enrol, stored
from postseal.open_files import allow_open_files
from postseal.postgres.access import Access
from postseal.settings import Settings
from postseal.web import server
from postseal.web.lingering import LingeringTransport
from postseal.worker_service import worker_files

REQUESTS = 30
HOLD_S = 0.3


def test_idle_connections_are_closed_and_a_retry_heals(access: Access) -> None:
    """They hold nothing up. What is sent on one is not taken: the client gets an end, and no answer."""
    device = enrol(access)
    credential = device.token.reveal()
    with running_site(access, Settings(), device=device) as site:
        idle, late, silent = site.client(), site.client(), site.client()
        for sequence, client in enumerate((idle, late), 1):
            assert client.ask(post(credential, device.envelope(sequence))).status == 201
    envelope = device.envelope(3)
    with idle, late, silent:
        assert idle.is_closed()
        assert silent.is_closed()
        late.send(post(credential, envelope))
        assert late.is_closed()
    with running_site(access, Settings(), device=device) as site:
        assert site.ask(post(credential, envelope)).document["outcome"] == "accepted"


@pytest.mark.parametrize("sent", [b"POST /v1/envelopes HTTP/1.1\r\nHo", None], ids=["head", "body"])
def test_a_slow_sender_is_cut(
    access: Access, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: bytes | None
) -> None:
    """In the middle of a body at the end of the grace, long before its own deadline; nothing of it is kept."""
    monkeypatch.setattr(server, "GRACE_S", HOLD_S)
    device = enrol(access)
    half = post(device.token.reveal(), device.envelope(1))[:-100]
    with running_site(access, Settings(receive_deadline_s=600), device=device) as site:
        client = site.client()
        client.send(sent or half)
        assert site.ask(get("/healthz")).status == 200
    with client:
        assert client.is_closed()
    assert stored(access, device).audits == []
    assert caplog.records == []


def test_the_last_groups_are_committed(access: Access) -> None:
    """All that had come before the end is answered after it, and is there."""
    device = enrol(access)
    statuses: list[int] = []
    with as_owner(access) as locker:
        locker.execute("BEGIN")
        locker.execute("SELECT 1 FROM streams FOR UPDATE")
        with running_site(access, Settings(), device=device) as site:
            clients = [site.client() for _ in range(REQUESTS)]
            for sequence, client in enumerate(clients, 1):
                client.send(post(device.token.reveal(), device.envelope(sequence)))
            assert site.ask(get("/healthz")).status == 200
            threading.Timer(HOLD_S, locker.execute, ["COMMIT"]).start()
        for client in clients:
            with client:
                statuses.append(client.answer().status)
                assert client.is_closed()
    assert statuses == [201] * REQUESTS
    assert stored(access, device).payloads == set(range(1, REQUESTS + 1))


def test_what_is_written_while_a_connection_closes_is_ignored() -> None:
    """An answer that comes late, in the middle of a request, finds our side closed."""
    faults: list[dict[str, Any]] = []

    async def write_late() -> bytes:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: faults.append(context))
        ours, theirs = socket.socketpair()
        with theirs:
            inner, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
            transport = LingeringTransport(inner, loop, is_mid_request=lambda: True)
            transport.write(b"answer")
            transport.close()
            transport.write(b"late")
            await asyncio.sleep(0)
            transport.lost()
            inner.close()
            await asyncio.sleep(0)
            return theirs.recv(100)

    assert asyncio.run(write_late()) == b"answer"
    assert faults == []


def test_a_process_may_open_as_many_files_as_it_needs() -> None:
    """The soft limit rises to what it and its worker need, within the hard one; it is never lowered."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = server.files(Settings())
    assert wanted == server.files(Settings(worker=False)) + worker_files(Settings())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_open_files(wanted)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == wanted or soft == hard < wanted
        allow_open_files(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("files", "alone", "beside_a_worker"), [(64, 1, 1), (1024, 896, 568), (8192, 4000, 4000)])
def test_connections_leave_descriptors_to_the_worker(files: int, alone: int, beside_a_worker: int) -> None:
    """Where there are too few for both, each has its share of them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
        assert server._max_connections(Settings(worker=False)) == alone
        assert server._max_connections(Settings()) == beside_a_worker
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

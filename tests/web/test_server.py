"""Beginning, ending and being ready; and that ordinary clients can talk to it."""

import asyncio
import http.client
import socket
import threading
from collections.abc import Sequence

import psycopg
import pytest
import uvloop
from psycopg import sql
from served import Site, running_site
from wire import ENVELOPE, get, post

from fleet import Device, as_owner, enrol, issue
from postseal.errors import StartupError
from postseal.inbound import waiting
from postseal.postgres.access import Access
from postseal.postgres.ingest import StreamKey
from postseal.postgres.reading import read_contiguous
from postseal.postgres.transaction import Connection
from postseal.service import running_service
from postseal.settings import Settings
from postseal.web.dealing import Channel
from postseal.web.server import address_of, bind, listening, serve
from until import until, waits_for_lock

PATIENCE_S = 20.0


def test_a_taken_port_stops_the_start() -> None:
    """One line that names host and port."""
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_stops_the_start() -> None:
    """The same for a host that is not this one, or is none."""
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(StartupError, match=host):
            bind(host, 0)


def test_the_address_that_was_taken_is_told() -> None:
    """Port 0 takes a free one; an IPv6 address is bracketed."""
    with bind("127.0.0.1", 0) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with bind("::1", 0) as listener:
        assert address_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_serve_tells_when_it_is_ready_and_ends_when_told(access: Access) -> None:
    """From `ready` on requests are answered; once `stop` is set it returns and the port is free again."""

    async def run() -> None:
        stop, ready = asyncio.Event(), asyncio.Event()
        async with running_service(Settings(), access) as service:
            listener = bind("127.0.0.1", 0)
            port: int = listener.getsockname()[1]
            serving = asyncio.create_task(serve(service, listener, stop=stop, ready=ready.set))
            await ready.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/healthz"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            stop.set()
            await serving
            writer.close()
            bind("127.0.0.1", port).close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_what_is_in_flight_at_the_end_is_answered(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    """An envelope that waits for its stream's lock is committed and answered; a waiting reader gets its page."""
    device = enrol(access)
    consumer = issue(access, "acme", None, ["apollo"], "consumer").reveal()
    answers: list[tuple[int, bytes]] = []
    looked = threading.Event()

    async def look(connection: Connection, wanted: Sequence[StreamKey]) -> dict[int, int]:
        reached = await read_contiguous(connection, wanted)
        looked.set()
        return reached

    monkeypatch.setattr(waiting, "read_contiguous", look)

    def ask(site: Site, raw: bytes) -> None:
        answer = site.ask(raw)
        answers.append((answer.status, answer.body))

    with as_owner(access) as owner:
        with running_site(access, Settings(), device=device) as site:
            owner.execute("BEGIN")
            owner.execute("SELECT 1 FROM streams FOR UPDATE")
            requests = [
                post(device.token.reveal(), device.envelope(1)),
                get(f"/v1/projects/apollo/streams/{device.name}/envelopes?wait=30", consumer),
            ]
            threads = [threading.Thread(target=ask, args=(site, raw)) for raw in requests]
            for thread in threads:
                thread.start()
            until(lambda: waits_for_lock(access))
            assert looked.wait(PATIENCE_S)
            release = threading.Timer(0.3, owner.execute, ("COMMIT",))
            release.start()
        for thread in [*threads, release]:
            thread.join()
    assert sorted(status for status, _ in answers) == [200, 201]


def test_what_was_dealt_before_the_end_is_answered(access: Access) -> None:
    """A request that lies in a channel when the end comes is taken out, read and answered."""
    answers: list[bytes] = []

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with (
            ours,
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), PATIENCE_S) as client,
        ):
            async with running_service(Settings(), access) as service, listening(service, Channel(theirs)):
                client.sendall(get("/healthz"))
                with listener.accept()[0] as accepted:
                    socket.send_fds(ours, [b"."], [accepted.fileno()])
            while part := client.recv(4096):
                answers.append(part)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert b"".join(answers).startswith(b"HTTP/1.1 200")


def test_without_a_database_everything_is_unavailable_and_comes_back(access: Access) -> None:
    """503 with Retry-After for envelopes and readiness, while the process itself is well; ready again by itself."""
    device = enrol(access)
    with running_site(access, Settings(), device=device) as site:
        assert site.ask(post(device.token.reveal(), device.envelope(1))).status == 201
        allow_connections(access, "false")
        answer = site.ask(post(device.token.reveal(), device.envelope(2)))
        assert (answer.status, answer.reason, answer.headers["retry-after"]) == (503, "unavailable", "1")
        until(lambda: site.ask(get("/readyz")).status == 503)
        assert site.ask(get("/healthz")).status == 200
        allow_connections(access, "true")
        until(lambda: site.ask(get("/readyz")).status == 200)
        assert site.ask(post(device.token.reveal(), device.envelope(2))).status == 201


def allow_connections(access: Access, allowed: str) -> None:
    """Let the database take connections, or cut them all off."""
    name = str(psycopg.conninfo.conninfo_to_dict(access.owner)["dbname"])
    elsewhere = psycopg.conninfo.make_conninfo(access.owner, dbname="postgres")
    with psycopg.connect(elsewhere, autocommit=True) as owner:
        owner.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(sql.Identifier(name), sql.SQL(allowed)))
        if allowed == "false":
            owner.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])


def test_the_standard_client_can_talk_to_it(site: Site) -> None:
    """http.client: an acknowledgement, a problem, a chunked body and an early refusal, on one connection object."""
    device: Device = enrol(site.access, "http-client")
    fields = {"Authorization": f"Bearer {device.token.reveal()}", "Content-Type": ENVELOPE}
    client = http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
    bodies = [device.envelope(1), b"{}", iter([device.envelope(2)]), bytes(500_000)]
    statuses: list[int] = []
    for body in bodies:
        client.request("POST", "/v1/envelopes", body=body, headers=fields)
        with client.getresponse() as response:
            response.read()
            statuses.append(response.status)
    client.close()
    assert statuses == [201, 400, 201, 413]

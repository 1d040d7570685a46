"""What a service answers that has too many callers, too slow ones, or a database that does not commit."""

import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psycopg
from client import ENVELOPE, Answer, Caller, Device
from program import Program
from promises import assert_problem, assert_refused, audited, audited_undecodable, told
from psycopg import sql
from world import PROJECT, TENANT, World

SCARCE = {
    "sync_permits_per_s": "0.001",
    "sync_burst": "100",
    "peer_permits_per_s": "0.001",
    "peer_burst": "3",
    "receive_deadline_s": "1",
}
NO_ROOM = {"min_free_disk_mb": str(10**9)}
SOCKET_TIMEOUT_S = 10


def test_permits_are_counted_by_line_and_by_stranger(world: World):
    """A batch takes a permit a line, all or none; strangers end at their limit; a body must arrive in time."""
    with world.program.serve(**SCARCE) as address:
        device = replace(world.devices["faulty"], address=address)
        assert [line["reason"] for line in device.send_batch(b"\n" * 98).lines] == ["envelope_malformed"] * 98
        slow = sent_in_part(device, b"half")
        two = device.send_batch(b"{\n{\n")
        assert two.headers["ratelimit"].startswith('"sync";r=1;')
        assert two.headers["ratelimit-policy"] == '"sync";q=100;w=100000'
        assert device.send(device.seal(highest_of(device) + 1)).word == "accepted"
        for answer in (two, device.send(b"{"), device.send_batch(b"")):
            assert_refused(answer, "sync_rate_limited")
        assert_refused(device.send(b"{", "application/json"), "unsupported_media_type")
        for number in range(3):
            assert_refused(Caller(address, f"ps_{number}").send(b"{}"), "unauthenticated")
        json_body = {"Content-Type": "application/json"}
        for answer in (
            Caller(address, "ps_3").send(b"{}"),
            Caller(address, world.consumer.credential).send(b"{}"),
            Caller(address).get(f"/v1/projects/{PROJECT}/streams"),
            Caller(address).call("POST", "/v1/enrolments", b"no JSON", json_body),
        ):
            assert_refused(answer, "peer_rate_limited")
        assert_refused(device.send(b"{"), "sync_rate_limited")
    assert_refused(slow, "request_timeout")
    world.owes(slow.body, audited_undecodable(device, "request_timeout", b"half"))
    limited = [told(row) for row in world.program.trail(TENANT).values() if row["reason"] == "sync_rate_limited"]
    assert limited[:1] == [audited(device, "sync_rate_limited", None, None)]


def highest_of(device: Device) -> int:
    """Where the device's stream stands."""
    return device.get(f"/v1/projects/{PROJECT}/streams/{device.name}").body["highest"]


def sent_in_part(caller: Caller, part: bytes) -> Answer:
    """Begin a body, never end it, and take the answer that comes."""
    head = f"POST /v1/envelopes HTTP/1.1\r\nHost: {caller.address}\r\nAuthorization: Bearer {caller.credential}\r\n"
    head += f"Content-Type: {ENVELOPE}\r\nContent-Length: 1000\r\n\r\n"
    host, port = caller.address.split(":")
    with socket.create_connection((host, int(port)), timeout=SOCKET_TIMEOUT_S) as connection:
        connection.sendall(head.encode() + part)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    return Answer.parsed(received, part)


def test_without_room_on_the_disk_nothing_is_taken_in(world: World):
    """Every envelope is `unavailable` before all checks; reads go on, and so does a service that has room."""
    device = world.devices["faulty"]
    with world.program.serve(**NO_ROOM) as address:
        full = replace(device, address=address)
        for answer in (
            full.send(full.seal(9)),
            full.send_batch(full.seal(9)),
            full.send(b"", "application/json"),
            Caller(address).send(b""),
        ):
            assert_refused(answer, "unavailable")
        assert full.get(f"/v1/projects/{PROJECT}/streams/{full.name}").status == 200
        assert device.send(b"{").word == "envelope_malformed"


def test_a_database_that_stands_still_is_unavailable(world: World):
    """Acceptance and refusal alike, in no trail; the same bytes are taken in once it moves."""
    device = world.devices["faulty"]
    highest = highest_of(device)
    assert device.send(device.seal(highest + 1)).word == "accepted"
    body = device.seal(highest + 2)
    with standing_still(world.program), ThreadPoolExecutor(3) as pool:
        single, malformed = pool.submit(device.send, body), pool.submit(device.send, b"{")
        lines = pool.submit(device.send_batch, body + b"\n{").result().lines
    for answer in (single.result(), malformed.result()):
        assert_refused(answer, "unavailable")
    assert [line["status"] for line in lines] == [503, 503]
    for line in lines:
        assert_problem(line, "unavailable")
    assert device.send(body).word == "accepted"
    for problem in (single.result().body, malformed.result().body, *lines):
        world.owes(problem, None)


@contextmanager
def standing_still(program: Program) -> Generator[None]:
    """Keep every table of the service locked, as the superuser of its embedded database."""
    password = (program.home / "pgpass").read_text().strip().rsplit(":", 1)[1]
    socket_folder = str(program.home / "run")
    with psycopg.connect(host=socket_folder, user="postgres", password=password, dbname="postseal") as owner:
        rows = owner.execute("SELECT schemaname, tablename FROM pg_tables WHERE schemaname = 'postseal'").fetchall()
        tables = sql.SQL(", ").join(sql.Identifier(*row) for row in rows)
        owner.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(tables))
        try:
            yield
        finally:
            owner.rollback()

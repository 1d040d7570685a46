"""A parent's side and a child's side of dealing, in one event loop: whole connections, exact bounds, no copies."""

import asyncio
import os
import resource
import socket
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import structlog
import uvloop
from structlog.testing import capture_logs

from postseal.web import dealing
from postseal.web.dealing import MAX_UNTAKEN, Channel, Dealer
from postseal.web.server import bind
from until import until_async

PATIENCE_S = 15.0


class Seen(asyncio.Protocol):
    """A connection as its child has it."""

    def __init__(self, all_seen: "list[Seen]") -> None:
        self._all_seen = all_seen

    def connection_made(self, transport: Any) -> None:
        """Note what the transport says."""
        self.transport = transport
        self.peer = transport.get_extra_info("peername")
        held: socket.socket = transport.get_extra_info("socket")
        self.no_delay = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        self.inheritable = os.get_inheritable(held.fileno())
        self.received = b""
        self._all_seen.append(self)

    def data_received(self, data: bytes) -> None:
        """Note what has come."""
        self.received += data


def run(main: Awaitable[None]) -> None:
    """Run it as a process of the service would."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main
        await asyncio.sleep(0.01)  # transports that were closed end in the next turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


@contextmanager
def dealer_on(listener: socket.socket) -> Iterator[Dealer]:
    """A dealer, closed at the end."""
    dealer = Dealer(listener, structlog.get_logger())
    try:
        yield dealer
    finally:
        dealer.close()


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A channel: the parent's end and the child's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        theirs.settimeout(0)
        yield ours, theirs


def lying_in(end: socket.socket) -> int:
    """Take what lies in a channel without a word to the parent: how many connections that were."""
    count = 0
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        except BlockingIOError:
            return count
        for descriptor in descriptors:
            os.close(descriptor)
        count += 1


async def dealt(end: socket.socket) -> int:
    """How many connections come when the parent has had time for more."""
    await asyncio.sleep(0.05)
    return lying_in(end)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_dealt_connection_is_as_an_accepted_one(host: str) -> None:
    """Its peer's address, no delay of small writes, not inherited; and nobody else holds it open."""

    async def main() -> None:
        seen: list[Seen] = []
        with pair() as (ours, theirs), dealer_on(bind(host, 0)) as dealer:
            channel = Channel(theirs)
            channel.open(lambda: Seen(seen))
            dealer.deal_to(ours)
            with socket.create_connection(dealer._listener.getsockname()[:2], PATIENCE_S) as client:
                await until_async(lambda: bool(seen))
                assert (seen[0].peer, seen[0].no_delay, seen[0].inheritable) == (client.getsockname(), 1, False)
                seen[0].transport.close()
                assert await asyncio.to_thread(client.recv, 1) == b""
            await channel.close()

    run(main())


def test_a_full_channel_is_passed_over_and_the_rest_waits() -> None:
    """Neither gets more than it has room for; what is taken makes room for as many, in turn."""

    async def main() -> None:
        with (
            pair() as (first, frozen),
            pair() as (second, busy),
            dealer_on(bind("127.0.0.1", 0)) as dealer,
            ExitStack() as held,
        ):
            dealer.deal_to(first)
            dealer.deal_to(second)
            for _ in range(2 * MAX_UNTAKEN + 10):
                held.enter_context(socket.create_connection(dealer._listener.getsockname()))
            assert await dealt(busy) == MAX_UNTAKEN
            busy.send(b"...")
            assert await dealt(busy) == 3
            busy.send(b"." * MAX_UNTAKEN)
            assert await dealt(busy) == 7
            assert await dealt(frozen) == MAX_UNTAKEN

    run(main())


def test_all_that_is_taken_makes_room() -> None:
    """A channel holds as many again after each burst."""

    async def main() -> None:
        seen: list[Seen] = []
        with pair() as (ours, theirs), dealer_on(bind("127.0.0.1", 0)) as dealer, ExitStack() as held:
            channel = Channel(theirs)
            channel.open(lambda: Seen(seen))
            dealer.deal_to(ours)
            for bursts in range(1, 4):
                for _ in range(MAX_UNTAKEN):
                    held.enter_context(socket.create_connection(dealer._listener.getsockname()))
                await until_async(lambda expected=bursts * MAX_UNTAKEN: len(seen) == expected)
            await until_async(lambda: dealer._untaken[ours] == 0)
            await channel.close()
            for connection in seen:
                connection.transport.close()

    run(main())


def test_what_an_ended_child_cannot_take_goes_to_the_next() -> None:
    """Also before the parent has heard of the end; and while none is left, connections wait for a successor."""

    async def main() -> None:
        with pair() as (first, ended), pair() as (second, living), dealer_on(bind("127.0.0.1", 0)) as dealer:
            address = dealer._listener.getsockname()
            dealer.deal_to(first)
            dealer.deal_to(second)
            ended.close()
            with socket.create_connection(address):
                dealer._accept()
                assert lying_in(living) == 1
            living.close()
            await until_async(lambda: not dealer._looking)
            with socket.create_connection(address), pair() as (third, successor):
                await asyncio.sleep(0.05)
                dealer.deal_to(third)
                assert await dealt(successor) == 1
                dealer.leave_out(third)

    run(main())


def test_without_descriptors_accepting_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a try, no spinning; the connection waits, and is dealt once there is room."""
    monkeypatch.setattr(dealing, "RESTED_S", 0.2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        with pair() as (ours, theirs), dealer_on(bind("127.0.0.1", 0)) as dealer:
            dealer.deal_to(ours)
            with socket.create_connection(dealer._listener.getsockname()):
                next_free = os.dup(ours.fileno())
                os.close(next_free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, before[1]))
                try:
                    await until_async(lambda: dealer._resting)
                    await asyncio.sleep(0.05)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, before)
                await until_async(lambda: dealer._untaken[ours] == 1)
                assert lying_in(theirs) == 1

    with capture_logs() as events:
        run(main())
    assert events == [
        {"event": "no connections are accepted for now", "error": "Too many open files", "log_level": "error"}
    ]


def test_at_its_end_a_child_takes_what_was_dealt_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits a moment for the requests; what the parent would deal after that goes to another one."""
    monkeypatch.setattr(dealing, "READ_S", 0.5)

    async def main() -> None:
        seen: list[Seen] = []
        with pair() as (ours, theirs), pair() as (others, other), dealer_on(bind("127.0.0.1", 0)) as dealer:
            channel = Channel(theirs)
            channel.open(lambda: Seen(seen))
            dealer.deal_to(ours)
            address = dealer._listener.getsockname()
            with socket.create_connection(address) as client, socket.create_connection(address):
                dealer._accept()
                closing = asyncio.create_task(channel.close())
                await asyncio.sleep(0)
                dealer.deal_to(others)
                with socket.create_connection(address):
                    dealer._accept()
                    assert lying_in(other) == 1
                await until_async(lambda: len(seen) == 2)
                client.sendall(b"request")
                await closing
                assert b"request" in [connection.received for connection in seen]
                for connection in seen:
                    connection.transport.close()

    run(main())


def test_a_parent_that_is_gone_leaves_nothing_to_spin_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had dealt is served; then the channel is left alone."""
    calls: list[bool] = []

    async def main() -> None:
        seen: list[Seen] = []
        with pair() as (ours, theirs), socket.create_server(("127.0.0.1", 0)) as listener:
            channel = Channel(theirs)
            take = channel._take
            monkeypatch.setattr(channel, "_take", lambda: calls.append(True) or take())
            channel.open(lambda: Seen(seen))
            with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
                socket.send_fds(ours, [b"."], [connection.fileno()])
                ours.close()
                await until_async(lambda: bool(seen))
                await asyncio.sleep(0.05)
                await channel.close()
                seen[0].transport.close()

    run(main())
    assert len(calls) <= 5

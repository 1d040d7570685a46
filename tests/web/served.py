"""A real server on a real socket, in a thread of its own, over a database of its own; shared by one module's tests."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop
from fleet import Device, enrol
from wire import Client

from postseal.postgres.access import Access
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.web.server import bind, listening

STARTED_S = 30.0


@dataclass(frozen=True, slots=True)
class Site:
    """A running server: where it listens, its database, and a device that is enrolled."""

    port: int
    access: Access
    device: Device

    def client(self) -> Client:
        """A new connection."""
        return Client(self.port)


@contextmanager
def running_site(access: Access, settings: Settings) -> Iterator[Site]:
    """Serve until the block ends; what the server raised fails the test."""
    listener = bind("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    started, failures = threading.Event(), list[BaseException]()
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        stop = asyncio.Event()
        ends.append((asyncio.get_running_loop(), stop))
        async with running_service(settings, access) as service, listening(service, listener):
            started.set()
            await stop.wait()

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert started.wait(STARTED_S)
        assert not failures, failures
        yield Site(port, access, enrol(access))
    finally:
        for loop, stop in ends:
            if thread.is_alive():
                loop.call_soon_threadsafe(stop.set)
        thread.join(STARTED_S)
        listener.close()
    assert not thread.is_alive()
    assert not failures, failures

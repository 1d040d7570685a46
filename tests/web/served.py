"""A real server on a real socket, in a thread of its own, over a database of its own; shared by one module's tests."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop
from wire import Answer, Client

from fleet import Device, as_owner, enrol
from postseal.postgres.access import Access
from postseal.service import running_service
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

    def ask(self, raw: bytes) -> Answer:
        """One request on a connection of its own."""
        with self.client() as client:
            return client.ask(raw)

    def audits(self, correlation_id: str) -> list[tuple[str, str | None, str | None, bytes | None, bool]]:
        """Outcome, reason, project, event identity and whether it was undecodable, of one correlation id."""
        with as_owner(self.access) as owner:
            rows = owner.execute(
                "SELECT outcome, reason, project, event_identity, undecodable FROM audit_events"
                " WHERE correlation_id = %s",
                [correlation_id],
            ).fetchall()
        return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]


@contextmanager
def running_site(access: Access, settings: Settings, *, device: Device | None = None) -> Iterator[Site]:
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
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert started.wait(STARTED_S)
        assert not failures, failures
        yield Site(port, access, device or enrol(access))
    finally:
        for loop, stop in ends:
            if thread.is_alive():
                loop.call_soon_threadsafe(stop.set)
        thread.join(STARTED_S)
        listener.close()
    assert not thread.is_alive()
    assert not failures, failures

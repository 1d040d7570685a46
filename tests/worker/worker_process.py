"""`postseal worker` as a process, and a receiver for what it pushes."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postseal.postgres.access import Access

POSTSEAL = Path(sys.executable).with_name("postseal")
READY_WITHIN_S = 60.0
DONE_WITHIN_S = 60.0


@dataclass
class Receiver:
    """A server on loopback that answers 204 while its gate is open, and keeps the others waiting."""

    url: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter[str])
    """How often each delivery came in, by its id."""
    answered: Counter[str] = field(default_factory=Counter[str])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                await reader.readexactly(int(headers["content-length"]))
                delivery = headers["webhook-id"]
                self.asked[delivery] += 1
                await self.gate.wait()
                self.answered[delivery] += 1
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving() -> AsyncGenerator[Receiver]:
    """A receiver, open."""
    receiver = Receiver()
    receiver.gate.set()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.close()


@dataclass
class Setting:
    """Where the workers of one test work."""

    access: Access
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Their settings: short waits, loopback allowed."""
        return os.environ | {
            "POSTSEAL_DATABASE_URL": self.access.owner,
            "POSTSEAL_ROLES_FILE": str(self.access.passfile),
            "POSTSEAL_DATA_DIR": str(self.folder),
            "POSTSEAL_DEPLOYMENT_KEY_FILE": str(self.folder / "deployment.key"),
            "POSTSEAL_ALLOW_HTTP": "true",
            "POSTSEAL_ALLOWED_CIDRS": "127.0.0.0/8",
            "POSTSEAL_POLL_S": "0.05",
            "POSTSEAL_LEASE_S": "30",
            "POSTSEAL_STOP_GRACE_S": "5",
        }

    @asynccontextmanager
    async def worker(self, *arguments: str) -> AsyncGenerator[Process]:
        """A worker, ready to deliver; killed at the end if it still runs."""
        process = await asyncio.create_subprocess_exec(
            POSTSEAL, "worker", "--json", *arguments, env=self.environment, stdout=PIPE, stderr=PIPE
        )
        try:
            if not arguments:
                assert process.stdout is not None
                async with asyncio.timeout(READY_WITHIN_S):
                    assert json.loads(await process.stdout.readline()) == {"delivering": True}
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.communicate()

    async def once(self) -> dict[str, Any]:
        """What one turn reports."""
        async with self.worker("--once") as process:
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return json.loads(out)


def make_key(folder: Path) -> Path:
    """The deployment key under which the boxes have their secrets."""
    key = folder / "deployment.key"
    key.touch(0o600)
    key.write_bytes(bytes(range(32)))
    return key


async def logged(process: Process, event: str) -> dict[str, Any]:
    """What the process logs of an event, once it does."""
    assert process.stderr is not None
    async with asyncio.timeout(DONE_WITHIN_S):
        async for line in process.stderr:
            if (entry := json.loads(line))["event"] == event:
                return entry
    raise AssertionError(f"{event} was not logged")


async def stop(process: Process) -> None:
    """Stop it as an operator does; it ends well."""
    process.terminate()
    await ended_well(process)


async def ended_well(process: Process) -> None:
    """Wait for its end."""
    async with asyncio.timeout(DONE_WITHIN_S):
        assert await process.wait() == 0

"""A service on an embedded database of its own, the load that it is under, and the faults that it must live through."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import structlog
from holders import stop_servers_in
from structlog.testing import CapturingLogger

from fleet import Device, enrol, stored
from postseal.errors import Refused, Unavailable
from postseal.outcomes import Reason
from postseal.postgres import embedded, postmaster, watchdog
from postseal.postgres.access import Access, open_access
from postseal.postgres.home import Home
from postseal.postgres.postmaster import living_pid
from postseal.service import Service, running_service
from postseal.settings import load_settings
from postseal.verdicts import Receipt

WAIT_SECONDS = 40
RETRY_SECONDS = 0.02
SENDERS = 4

SYNC_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>
static int sync_by(const char *name, int descriptor) {
    if (access(FLAG, F_OK) == 0) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(descriptor);
}
int fsync(int descriptor) { return sync_by("fsync", descriptor); }
int fdatasync(int descriptor) { return sync_by("fdatasync", descriptor); }
"""


def short_steps() -> tuple[tuple[signal.Signals, float], ...]:
    """The steps that end a stuck server, with less patience but for the last."""
    return tuple((step, 10 if step is signal.SIGKILL else 0.5) for step, _ in postmaster.STUCK_STEPS_SECONDS)


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the watchdog the patience of a test."""
    monkeypatch.setattr(postmaster, "STUCK_STEPS_SECONDS", short_steps())
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "LONGEST_PAUSE_SECONDS", 0.4)
    monkeypatch.setattr(watchdog, "RESTARTS_A_WINDOW", 1000)
    monkeypatch.setattr(watchdog, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(embedded, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "SILENT_SECONDS", 1.0)


class Log:
    """What was logged, and a way to wait for it."""

    def __init__(self) -> None:
        self._lines = CapturingLogger()
        self.logger = structlog.wrap_logger(self._lines, processors=[structlog.stdlib.render_to_log_kwargs])

    def events(self) -> list[str]:
        """The events, oldest first."""
        return [str(call.args[0] if call.args else call.kwargs["msg"]) for call in list(self._lines.calls)]

    async def wait_for(self, event: str, times: int = 1) -> None:
        """Wait until `event` was logged so many times; another thread logs it."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.events().count(event) < times:
                await asyncio.sleep(0.01)


class Load:
    """Devices that send one envelope after another, each until it is acknowledged."""

    def __init__(self, service: Service, access: Access) -> None:
        self.service = service
        self._access = access
        self._acknowledged: dict[Device, set[int]] = {enrol(access, uuid4().hex): set() for _ in range(SENDERS)}
        self._unavailable = 0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as senders:
            for device in self._acknowledged:
                senders.create_task(self._send(device))

    async def more_acknowledged(self, count: int = 40) -> None:
        """Wait for `count` further acknowledgements."""
        goal = self._count() + count
        await self._until(lambda: self._count() >= goal)

    async def more_unavailable(self, count: int = 4) -> None:
        """Wait for `count` further answers that say `unavailable`."""
        goal = self._unavailable + count
        await self._until(lambda: self._unavailable >= goal)

    def acknowledged(self) -> dict[Device, frozenset[int]]:
        """The sequences that were acknowledged so far."""
        return {device: frozenset(sequences) for device, sequences in self._acknowledged.items()}

    def require_all_stored(self) -> None:
        """Whatever was acknowledged is there."""
        assert missing(self._access, self.acknowledged()) == 0

    def _count(self) -> int:
        return sum(map(len, self._acknowledged.values()))

    async def _send(self, device: Device) -> None:
        sequence = 0
        while True:
            sequence += 1
            body = device.envelope(sequence)
            while not await self._is_acknowledged(device, body):
                await asyncio.sleep(RETRY_SECONDS)
            self._acknowledged[device].add(sequence)
            await self._tell()

    async def _is_acknowledged(self, device: Device, body: bytes) -> bool:
        try:
            verdict = await self.service.inbox.receive(device.inbound(body))
        except Unavailable:
            reason = Reason.UNAVAILABLE
        except Refused as refused:
            reason = refused.reason
        else:
            if isinstance(verdict, Receipt):
                return True
            reason = verdict.reason
        assert reason.retryable, reason
        self._unavailable += reason is Reason.UNAVAILABLE
        await self._tell()
        return False

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS), self._changed:
            await self._changed.wait_for(holds)


def missing(access: Access, acknowledged: dict[Device, frozenset[int]]) -> int:
    """How many of `acknowledged` are not in the database with their payload and behind their stream's cursor."""
    count = 0
    for device, sequences in acknowledged.items():
        found = stored(access, device)
        behind_cursor = {sequence for sequence in sequences if sequence <= found.cursor[1]}
        count += len(sequences - (found.sequences.keys() & found.payloads & behind_cursor))
    return count


@asynccontextmanager
async def loaded_service(home: Path, log: Log, **settings: Any) -> AsyncGenerator[tuple[Load, Access]]:
    """A service in this process on its own embedded database, under load until the block ends."""
    chosen = load_settings({}, overrides={"data_dir": str(home), "min_free_disk_mb": 0, "ballast_mb": 0} | settings)
    with open_access(chosen, log=log.logger) as access:
        async with running_service(chosen, access) as service:
            load = Load(service, access)
            sending = asyncio.create_task(load.run())
            try:
                await load.more_acknowledged()
                yield load, access
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            assert sending.cancelled(), sending


async def survives(home: Path, log: Log, fault: Callable[[Load], Awaitable[None]], **settings: Any) -> None:
    """Under load, let `fault` happen and end: the same process works again, and what it acknowledged is there."""
    async with loaded_service(home, log, **settings) as (load, _):
        await fault(load)
        await load.more_acknowledged()
        load.require_all_stored()


def kill_postmaster(home: Path, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the postmaster of the home."""
    pid = living_pid(Home(home))
    assert pid is not None
    os.kill(pid, how)


def build_sync_shim(folder: Path) -> tuple[Path, Path]:
    """A library to preload, and the file in whose presence each fsync fails."""
    library, flag = folder / "sync_shim.so", folder / "sync_is_broken"
    command = ["gcc", "-shared", "-fPIC", f'-DFLAG="{flag}"', "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SYNC_SHIM, text=True, check=True)
    library.chmod(0o755)
    return library, flag


@contextmanager
def small_disk(folder: Path, mib: int) -> Generator[Path]:
    """A file system of `mib` MiB in memory, mounted on `folder` until the block ends. Needs root or its namespace."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={mib}m,mode=711".encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    try:
        yield folder
    finally:
        stop_servers_in(folder)
        libc.umount2(bytes(folder), 2)  # MNT_DETACH: also where a process is left on it


def in_own_namespace(test: str) -> bool:
    """For a normal user: run `test` (file::name) again where it may mount, and tell that this was done."""
    if os.geteuid() == 0 or os.environ.get("POSTSEAL_TEST_NAMESPACE"):
        return False
    unshare = ["unshare", "--user", "--map-current-user", "--keep-caps", "--mount"]
    command = [*unshare, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", test]
    subprocess.run(command, check=True, env=os.environ | {"POSTSEAL_TEST_NAMESPACE": "1"}, timeout=100)
    return True

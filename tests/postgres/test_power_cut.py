"""A power cut: what was acknowledged is on the disk itself, not in the memory of the system above it.

The home is on an ext4 file system in a file. The cut is a copy of that file, taken while the server is frozen: what
was written and not synced is in the page cache of the mounted file system, and so not in the copy. Needs root.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from faults import Log, loaded_service, missing
from holders import own_folder, start, stop_servers_in

from postseal.postgres import postmaster
from postseal.postgres.database import conninfo_for
from postseal.postgres.home import Home
from postseal.postgres.postmaster import living_pid

pytestmark = [pytest.mark.soak, pytest.mark.anyio]

IMAGE_MIB = 512
ENVELOPES = 3000


@pytest.fixture
def anyio_backend() -> str:
    """Psycopg needs asyncio."""
    return "asyncio"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of this test alone."""
    with own_folder() as folder:
        yield folder


@contextmanager
def mounted(image: Path, folder: Path) -> Generator[Path]:
    """The ext4 file system in `image`, at `folder`; no server is left on it at the end."""
    folder.mkdir()
    # A commit of the journal's own within the test would write what nobody asked to be synced.
    subprocess.run(["mount", "-o", "loop,commit=300", image, folder], check=True)
    try:
        yield folder
    finally:
        stop_servers_in(folder)
        subprocess.run(["umount", folder], check=True)


@contextmanager
def frozen(home: Path) -> Generator[None]:
    """The postmaster and all its children stand still."""
    pid = living_pid(Home(home))
    assert pid is not None
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pids = [pid, *map(int, children)]
    for each in pids:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in pids:
            os.kill(each, signal.SIGCONT)


async def lost_by_power_cut(place: Path) -> int:
    """Acknowledge under load, cut the power, recover from what the disk has: how many acknowledged are not there."""
    image, copy = place / "image", place / "copy"
    with image.open("wb") as file:
        file.truncate(IMAGE_MIB * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    with mounted(image, place / "before") as disk:
        disk.chmod(0o711)
        async with loaded_service(disk / "home", Log()) as (load, access):
            os.sync()  # tables and devices are not what is tested
            await load.more_acknowledged(ENVELOPES)
            with frozen(disk / "home"):
                acknowledged = load.acknowledged()
                shutil.copyfile(image, copy)
    with mounted(copy, place / "after") as disk:
        server = start(disk / "home")
        try:
            return missing(replace(access, owner=conninfo_for(server.dsn)), acknowledged)
        finally:
            server.release()


async def test_acknowledged_envelopes_survive_a_power_cut(place: Path):
    """Every envelope that was acknowledged before the cut is there after the recovery."""
    assert await lost_by_power_cut(place) == 0


async def test_power_cut_shows_what_was_not_synced(place: Path, monkeypatch: pytest.MonkeyPatch):
    """The same without fsync loses envelopes: the cut is a real one."""
    monkeypatch.setitem(postmaster.SETTINGS, "fsync", "off")
    assert await lost_by_power_cut(place) >= ENVELOPES // 2

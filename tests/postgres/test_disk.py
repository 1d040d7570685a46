"""A disk that runs low is noticed in time, and a full one is lived through."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from faults import (
    Log,
    build_sync_shim,
    hasten,
    in_own_namespace,
    kill_postmaster,
    loaded_service,
    small_disk,
)
from holders import own_folder, query

from fleet import as_owner
from postseal.errors import Unavailable
from postseal.postgres.access import Access
from postseal.postgres.disk import MIB, Disk, free_on
from postseal.postgres.embedded import start_or_join
from postseal.postgres.home import Home, open_home, server_lives
from postseal.postgres.watchdog import Watchdog
from until import until

RELEASED = "embedded_database_ballast_released"
MADE = "embedded_database_ballast_made"
LOW = "embedded_database_disk_low"
HAS_ROOM = "embedded_database_disk_has_room"
BACK = "embedded_database_answers_again"
SESSION_AND_RECOVERY = 2


@pytest.fixture
def anyio_backend() -> str:
    """Psycopg needs asyncio."""
    return "asyncio"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of this test alone."""
    with own_folder() as folder:
        yield folder


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A log to look at, and a watchdog with little patience."""
    hasten(monkeypatch)
    return Log()


def fill(disk: Path, *, leave_mib: int) -> None:
    """Take all but `leave_mib` of the disk with one file, in the place of an earlier one."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    size = free_on(disk) - leave_mib * MIB
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def use_up(access: Access) -> None:
    """Have the server begin one segment of its write-ahead log after another, until it fails."""
    switch = "PERFORM pg_switch_wal(), pg_logical_emit_message(true, 'test', 'x')"
    with as_owner(access) as owner, pytest.raises(psycopg.OperationalError):
        owner.execute(f"DO $$ BEGIN FOR i IN 1..100 LOOP {switch}; END LOOP; END $$".encode())


def test_bound_with_hysteresis_and_ballast(place: Path, log: Log):
    """Low below the bound, room again from a quarter more; the ballast comes with room and goes on a full disk only."""
    if in_own_namespace(f"{__file__}::test_bound_with_hysteresis_and_ballast"):
        return
    with small_disk(place / "disk", 120) as mount:
        home = open_home(mount / "home")
        fill(mount, leave_mib=50)
        disk = Disk(home, min_free_bytes=40 * MIB, ballast_bytes=20 * MIB, log=log.logger)
        assert disk.accepting()
        assert disk.state.free_bytes == free_on(mount)
        disk.keep_ballast()
        assert not home.ballast.exists(), "there is no room for it beside the bound"
        for leave_mib, accepts in [(41, True), (39, False), (41, False), (49, False), (51, True), (41, True)]:
            fill(mount, leave_mib=leave_mib)
            disk.check()
            assert disk.accepting() is accepts
            assert (disk.state.reason is None) is accepts
        assert log.events() == [LOW, HAS_ROOM]
        fill(mount, leave_mib=80)
        disk.keep_ballast()
        assert home.ballast.stat().st_blocks * 512 >= 20 * MIB
        assert not disk.make_room_if_full()
        fill(mount, leave_mib=1)
        assert disk.make_room_if_full()
        assert free_on(mount) >= 20 * MIB
        assert disk.make_room_if_full(), "still too little for a recovery"
        disk.check()
        assert log.events()[2:] == [MADE, RELEASED, LOW]
        fill(mount, leave_mib=110)
        disk.keep_ballast()
        Disk(home, min_free_bytes=0, ballast_bytes=0, log=log.logger).keep_ballast()
        assert not home.ballast.exists(), "who asks for none has none"


def test_disk_that_cannot_be_measured(place: Path, log: Log):
    """It accepts nothing, and says why."""
    home = open_home(place / "home")
    disk = Disk(home, min_free_bytes=0, ballast_bytes=0, log=log.logger)
    home.root.rename(place / "away")
    disk.check()
    assert not disk.accepting()
    assert disk.state.reason == "the disk of the database cannot be measured: No such file or directory"


@pytest.mark.anyio
async def test_low_disk_stops_acceptance_before_any_work(place: Path, log: Log):
    """`unavailable` to all, before any check; the server goes on and what was taken is there."""
    if in_own_namespace(f"{__file__}::test_low_disk_stops_acceptance_before_any_work"):
        return
    with small_disk(place / "disk", 200) as mount:
        async with loaded_service(mount / "home", log, min_free_disk_mb=32) as (load, access):
            fill(mount, leave_mib=24)
            await log.wait_for(LOW)
            await load.more_unavailable(40)  # by now each sender has had an answer
            before, device = audit_events(access), next(iter(load.acknowledged()))
            await load.more_unavailable(40)
            with pytest.raises(Unavailable, match="almost full"):
                await load.service.inbox.receive(device.inbound(b""))
            with pytest.raises(Unavailable, match="almost full"):
                await load.service.inbox.receive_batch(device.inbound(b""))
            assert audit_events(access) == before
            load.require_all_stored()
            (mount / "filler").unlink()
            await load.more_acknowledged()
            load.require_all_stored()
    assert [event for event in log.events() if event in {LOW, HAS_ROOM, BACK}] == [LOW, HAS_ROOM]


@pytest.mark.anyio
async def test_full_disk_under_load(place: Path, log: Log):
    """PostgreSQL panics for want of space, recovers on the ballast's, and works on once there is room again."""
    if in_own_namespace(f"{__file__}::test_full_disk_under_load"):
        return
    with small_disk(place / "disk", 220) as mount:
        async with loaded_service(mount / "home", log, ballast_mb=40) as (load, access):
            await log.wait_for(MADE)
            fill(mount, leave_mib=1)
            use_up(access)
            await load.more_unavailable()
            await log.wait_for(RELEASED)
            await log.wait_for(BACK)
            (mount / "filler").unlink()
            await log.wait_for(MADE, 2)
            await load.more_acknowledged()
            load.require_all_stored()


@pytest.mark.anyio
async def test_full_disk_without_ballast(place: Path, log: Log):
    """Nothing helps until there is room; then the same process works on by itself."""
    if in_own_namespace(f"{__file__}::test_full_disk_without_ballast"):
        return
    with small_disk(place / "disk", 200) as mount:
        async with loaded_service(mount / "home", log) as (load, access):
            fill(mount, leave_mib=0)
            use_up(access)
            await load.more_unavailable()
            await log.wait_for("embedded_database_restarting")
            (mount / "filler").unlink()
            await log.wait_for(BACK)
            await load.more_acknowledged()
            load.require_all_stored()


def test_stuck_on_a_full_disk_that_swallowed_the_log(place: Path, log: Log, monkeypatch: pytest.MonkeyPatch):
    """A recovery that got stuck is ended too where there was no room for the line that tells of it."""
    if in_own_namespace(f"{__file__}::test_stuck_on_a_full_disk_that_swallowed_the_log"):
        return
    library, flag = build_sync_shim(place)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with small_disk(place / "disk", 200) as mount:
        server = start_or_join(mount / "home", log=log.logger)
        home = Home(server.home)
        dog = Watchdog(home, Disk(home, min_free_bytes=0, ballast_bytes=0, log=log.logger), log.logger)
        try:
            dog.check()
            fill(mount, leave_mib=16)
            flag.touch()
            with pytest.raises(psycopg.OperationalError):
                query(server, "CREATE TABLE kept ()")
            until(lambda: home.log_file.read_text().count("PANIC:") == SESSION_AND_RECOVERY)
            os.truncate(home.log_file, 0)
            flag.unlink()
            until(lambda: dog.check() or BACK in log.events())
        finally:
            dog.close()
            assert server.release() is True


def test_start_on_a_full_disk_uses_the_ballast(place: Path, log: Log):
    """Who starts a database that filled its disk needs to delete nothing by hand."""
    if in_own_namespace(f"{__file__}::test_start_on_a_full_disk_uses_the_ballast"):
        return
    with small_disk(place / "disk", 200) as mount:
        server = start_or_join(mount / "home", log=log.logger)
        home = Home(server.home)
        Disk(home, min_free_bytes=0, ballast_bytes=40 * MIB, log=log.logger).keep_ballast()
        with closing(psycopg.connect(server.dsn, autocommit=True)) as client:
            client.execute("CREATE TABLE kept AS SELECT 42 AS row")
        kill_postmaster(home.root)
        fill(mount, leave_mib=0)
        again = start_or_join(home.root, log=log.logger)
        try:
            with closing(psycopg.connect(again.dsn)) as client:
                assert client.execute("SELECT row FROM kept").fetchall() == [(42,)]
            assert RELEASED in log.events()
        finally:
            assert [server.release(), again.release()] == [False, True]
        assert not server_lives(home)


def audit_events(access: Access) -> int:
    """How many audit events there are."""
    with as_owner(access) as owner:
        row = owner.execute("SELECT count(*) FROM audit_events").fetchone()
    assert row is not None
    return row[0]

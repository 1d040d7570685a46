"""The parent of several processes: whom it deals connections to, and what it cleans up after others."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from wire import Client, get

from postseal.postgres.access import Access
from postseal.settings import Settings
from postseal.web.dealing import MAX_UNTAKEN
from postseal.web.processes import FOLDER_PREFIX, _remove_left_behind
from until import until

FAMILY = """
import sys, msgspec, structlog
from postseal.settings import Settings
from postseal.web import processes, server
listener = server.bind("127.0.0.1", 0)
port = listener.getsockname()[1]
settings = msgspec.json.decode(sys.argv[1], type=Settings)
processes.Family(settings, listener, 2, structlog.get_logger()).run(lambda: print(port, flush=True))
"""
PATIENCE_S = 30.0
WATCHED_S = 0.4


@dataclass(frozen=True, slots=True)
class Family:
    """A parent with two children that answer on a port."""

    parent: subprocess.Popen[bytes]
    port: int

    def children(self) -> list[int]:
        """Their process ids."""
        pid = self.parent.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def connections(self) -> list[int]:
        """How many connections each child has."""
        return [len(self.connections_of(pid)) for pid in self.children()]

    def connections_of(self, pid: int) -> list[Path]:
        """The descriptors of one process that are connections to the port."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = [line for line in lines if line[1].endswith(f":{self.port:04X}") and line[3] == "01"]
        established = {f"socket:[{line[9]}]" for line in ours}
        return [link for link in Path(f"/proc/{pid}/fd").iterdir() if target(link) in established]

    def clients(self, count: int, held: ExitStack) -> list[Client]:
        """New connections, each with a request on its way."""
        clients = [held.enter_context(Client(self.port)) for _ in range(count)]
        for client in clients:
            client.send(get("/healthz"))
        return clients

    def freeze(self, pid: int) -> None:
        """Stop a child, and return when it has stopped."""
        os.kill(pid, signal.SIGSTOP)
        until(lambda: stat_of(pid)[0] == "T")


def target(link: Path) -> str:
    """Where a link points; nowhere if it is gone by now."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def stat_of(pid: int) -> list[str]:
    """What /proc says behind a process's name, its state first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def answered(clients: list[Client]) -> list[Client]:
    """Those to whom something has come."""
    ready, _, _ = select.select([client._socket for client in clients], [], [], 0)
    return [client for client in clients if client._socket in ready]


@pytest.fixture
def family(access: Access) -> Iterator[Family]:
    """A family of two that has started, and must end well, whatever state its children are in."""
    settings = Settings(database_url=access.owner, roles_file=str(access.passfile))
    command = [sys.executable, "-c", FAMILY, msgspec.json.encode(settings).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            family = Family(parent, int(parent.stdout.readline()))
            yield family
            for child in family.children() if parent.poll() is None else []:
                os.kill(child, signal.SIGCONT)
            parent.terminate()
            assert parent.wait(PATIENCE_S) == 0
        finally:
            if parent.poll() is None:
                for child in family.children():
                    os.kill(child, signal.SIGKILL)
            parent.kill()


def test_connections_are_dealt_in_turn(family: Family) -> None:
    """Sixteen that stay open are eight for each child. The parent has none, nor would a program that a child starts."""
    with ExitStack() as held:
        for client in family.clients(16, held):
            assert client.answer().status == 200
        assert family.connections() == [8, 8]
        assert family.connections_of(family.parent.pid) == []
        for pid in family.children():
            for link in family.connections_of(pid):
                info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
                assert int(info.partition("flags:")[2].split()[0], 8) & os.O_CLOEXEC


def test_a_frozen_child_keeps_no_more_than_its_channel_holds(family: Family) -> None:
    """All others are served meanwhile by the rest; those in the channel are answered when it goes on."""
    frozen, _ = family.children()
    family.freeze(frozen)
    with ExitStack() as held:
        clients = family.clients(2 * MAX_UNTAKEN + 10, held)
        until(lambda: len(answered(clients)) == MAX_UNTAKEN + 10)
        for client in family.clients(10, held):
            assert client.answer().status == 200
        assert len(answered(clients)) == MAX_UNTAKEN + 10
        os.kill(frozen, signal.SIGCONT)
        assert [client.answer().status for client in clients] == [200] * len(clients)


def test_while_no_child_takes_any_connections_wait(family: Family) -> None:
    """In the backlog, without the parent spinning; each is answered when the children go on."""
    for pid in family.children():
        family.freeze(pid)
    with ExitStack() as held:
        clients = family.clients(2 * MAX_UNTAKEN + 10, held)
        time.sleep(WATCHED_S)
        user, system = stat_of(family.parent.pid)[11:13]
        time.sleep(WATCHED_S)
        later_user, later_system = stat_of(family.parent.pid)[11:13]
        used_s = (int(later_user) + int(later_system) - int(user) - int(system)) / os.sysconf("SC_CLK_TCK")
        assert used_s < WATCHED_S / 4
        assert answered(clients) == []
        for pid in family.children():
            os.kill(pid, signal.SIGCONT)
        assert [client.answer().status for client in clients] == [200] * len(clients)


def test_a_killed_child_is_replaced_and_gets_its_share_again(family: Family) -> None:
    """Until its successor answers it is left out: no connection is lost, and none waits for it."""
    killed, other = family.children()
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in family.children())
    until(lambda: len(family.children()) == 2)
    [successor] = [pid for pid in family.children() if pid != other]
    # Frozen before it runs its own program, it would hold up its parent, which waits for that.
    until(lambda: b"postseal.web.process" in Path(f"/proc/{successor}/cmdline").read_bytes())
    family.freeze(successor)
    with ExitStack() as held:
        for client in family.clients(4, held):
            assert client.answer().status == 200
    os.kill(successor, signal.SIGCONT)
    with ExitStack() as held:

        def successor_serves() -> bool:
            [client] = family.clients(1, held)
            assert client.answer().status == 200
            return bool(family.connections_of(successor))

        until(successor_serves)
    until(lambda: family.connections() == [0, 0])
    with ExitStack() as held:
        for client in family.clients(16, held):
            assert client.answer().status == 200
        assert family.connections() == [8, 8]


def test_a_stop_answers_what_was_dealt_and_not_read(family: Family) -> None:
    """Its child was frozen when the stop came; once it goes on it takes the connection, answers and ends."""
    frozen, _ = family.children()
    family.freeze(frozen)
    with ExitStack() as held:
        clients = family.clients(2, held)
        until(lambda: len(answered(clients)) == 1)
        family.parent.terminate()
        until(lambda: family.children() == [frozen])
        os.kill(frozen, signal.SIGCONT)
        for client in clients:
            assert client.answer().status == 200
            assert client.is_closed()
        assert family.parent.wait(PATIENCE_S) == 0


def test_folders_of_killed_parents_are_removed(tmp_path: Path) -> None:
    """A parent that was killed leaves its metrics in memory; the next one removes them, and those alone."""
    past_every_process = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    left_behind = tmp_path / f"{FOLDER_PREFIX}{past_every_process}-a"
    living = tmp_path / f"{FOLDER_PREFIX}{os.getpid()}-b"
    strange = tmp_path / f"{FOLDER_PREFIX}x-c"
    for folder in (left_behind, living, strange):
        folder.mkdir()
        (folder / "counter.db").touch()
    _remove_left_behind(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, strange])

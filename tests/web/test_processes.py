"""The parent of several processes: whom it deals connections to, and what it cleans up after others."""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from wire import Client, get

from family import Family, cpu_s, running_family
from postseal.postgres.access import Access
from postseal.web.dealing import MAX_UNTAKEN
from postseal.web.processes import FOLDER_PREFIX, _remove_left_behind
from until import until

PATIENCE_S = 30.0
WATCHED_S = 0.4


@pytest.fixture
def family(access: Access, tmp_path: Path) -> Iterator[Family]:
    """A family of two that has started."""
    with running_family(access, tmp_path) as family:
        yield family


def asking(family: Family, count: int, held: ExitStack) -> list[Client]:
    """New connections, each with a request on its way."""
    clients = [held.enter_context(Client(family.port)) for _ in range(count)]
    for client in clients:
        client.send(get("/healthz"))
    return clients


def answered(clients: list[Client]) -> list[Client]:
    """Those to whom something has come."""
    ready, _, _ = select.select([client._socket for client in clients], [], [], 0)
    return [client for client in clients if client._socket in ready]


def test_connections_are_dealt_in_turn(family: Family) -> None:
    """Sixteen that stay open are eight for each child. The parent has none, nor would a program that a child starts."""
    with ExitStack() as held:
        for client in asking(family, 16, held):
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
        clients = asking(family, 2 * MAX_UNTAKEN + 10, held)
        until(lambda: len(answered(clients)) == MAX_UNTAKEN + 10)
        for client in asking(family, 10, held):
            assert client.answer().status == 200
        assert len(answered(clients)) == MAX_UNTAKEN + 10
        os.kill(frozen, signal.SIGCONT)
        assert [client.answer().status for client in clients] == [200] * len(clients)


def test_while_no_child_takes_any_connections_wait(family: Family) -> None:
    """In the backlog, without the parent spinning; each is answered when the children go on."""
    for pid in family.children():
        family.freeze(pid)
    with ExitStack() as held:
        clients = asking(family, 2 * MAX_UNTAKEN + 10, held)
        time.sleep(WATCHED_S)
        before_s = cpu_s(family.parent.pid)
        time.sleep(WATCHED_S)
        assert cpu_s(family.parent.pid) - before_s < WATCHED_S / 4
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
        for client in asking(family, 4, held):
            assert client.answer().status == 200
    os.kill(successor, signal.SIGCONT)
    with ExitStack() as held:

        def successor_serves() -> bool:
            [client] = asking(family, 1, held)
            assert client.answer().status == 200
            return bool(family.connections_of(successor))

        until(successor_serves)
    until(lambda: family.connections() == [0, 0])
    with ExitStack() as held:
        for client in asking(family, 16, held):
            assert client.answer().status == 200
        assert family.connections() == [8, 8]


def test_a_stop_answers_what_was_dealt_and_not_read(family: Family) -> None:
    """Its child was frozen when the stop came; once it goes on it takes the connection, answers and ends."""
    frozen, _ = family.children()
    family.freeze(frozen)
    with ExitStack() as held:
        clients = asking(family, 2, held)
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

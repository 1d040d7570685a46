"""`postseal serve`, alone and with several processes: signals, deaths, and what is in flight meanwhile."""

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from running import DEADLINE_S, Lines, children_of, is_open, lives, on, started

from family import cpu_s
from fleet import Device, as_owner, enrol, stored
from own_server import own_server
from postseal.ending import ENDED_AT_ONCE
from postseal.postgres.access import Access
from postseal.settings import Settings
from postseal.web import process
from sender import ENVELOPE, require_each_once, sending
from until import until, waits_for_lock

ALONE_AND_FAMILY = pytest.mark.parametrize("processes", [1, 2])
LOAD_S = 1.0
WATCHED_S = 0.4


@contextmanager
def serving(access: Access, processes: int) -> Iterator[tuple[subprocess.Popen[str], int, Lines, Lines]]:
    """A service that answers: its process, port, and the lines of its stdout and stderr."""
    with started("serve", "--port", "0", "--processes", str(processes), "--json", **on(access)) as (service, out, err):
        yield service, int(json.loads(out.next())["url"].rpartition(":")[2]), out, err


class InFlight(threading.Thread):
    """An envelope on its way; `status` stays None where the connection ends without an answer."""

    def __init__(self, device: Device, port: int, release: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.status: int | None = None
        self._device, self._port, self._release = device, port, release

    def run(self) -> None:
        """Send it, and wait for the answer."""
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=DEADLINE_S)
        fields = {"Authorization": f"Bearer {self._device.token.reveal()}", "Content-Type": ENVELOPE}
        try:
            client.request("POST", "/v1/envelopes", self._device.envelope(1), fields)
            self.status = client.getresponse().status
        except (OSError, http.client.HTTPException):
            pass
        finally:
            client.close()

    def release(self) -> int | None:
        """Let go of what holds it up, and return what was answered."""
        self._release()
        self.join()
        return self.status


@contextmanager
def in_flight(access: Access, device: Device, port: int) -> Iterator[InFlight]:
    """An envelope that has come as far as its stream's lock."""
    with as_owner(access) as locker:
        locker.execute("BEGIN")
        locker.execute("SELECT 1 FROM streams FOR UPDATE")
        envelope = InFlight(device, port, lambda: locker.execute("COMMIT"))
        envelope.start()
        try:
            until(lambda: waits_for_lock(access))
            yield envelope
        finally:
            locker.close()
            envelope.join()


@ALONE_AND_FAMILY
def test_the_first_signal_answers_what_is_in_flight(access: Access, processes: int) -> None:
    """SIGTERM closes the port at once; an envelope that waits for its stream is committed and answered; exit code 0."""
    device = enrol(access)
    with serving(access, processes) as (service, port, out, err), in_flight(access, device, port) as envelope:
        service.send_signal(signal.SIGTERM)
        until(lambda: not is_open(port))
        assert envelope.release() == 201
        assert service.wait(DEADLINE_S) == 0
        assert out.rest() == []
        assert json.loads(err.rest()[-1])["event"] == "stopped"
    assert stored(access, device).payloads == {1}


@ALONE_AND_FAMILY
def test_the_second_signal_ends_it_at_once(access: Access, processes: int) -> None:
    """What is in flight is cut, nothing of it lives on, and the exit code is 143."""
    device = enrol(access)
    with serving(access, processes) as (service, port, _, _), in_flight(access, device, port) as envelope:
        children = children_of(service)
        assert len(children) == (processes if processes > 1 else 0)
        service.send_signal(signal.SIGTERM)
        until(lambda: not is_open(port))
        assert service.poll() is None
        service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 143
        assert not any(lives(child) for child in children)
        envelope.join(DEADLINE_S)
        assert envelope.status is None


@ALONE_AND_FAMILY
def test_ctrl_c_stops_it_cleanly(access: Access, processes: int) -> None:
    """A terminal sends SIGINT to the whole process group: the same as SIGTERM, exit code 0."""
    device = enrol(access)
    with serving(access, processes) as (service, port, _, err), in_flight(access, device, port) as envelope:
        os.killpg(service.pid, signal.SIGINT)
        until(lambda: not is_open(port))
        assert envelope.release() == 201
        assert service.wait(DEADLINE_S) == 0
        assert "Traceback" not in "".join(err.rest())


def test_a_signal_to_every_process_at_once_is_one_signal(access: Access) -> None:
    """Service managers signal a whole control group: no child takes that for a second signal."""
    device = enrol(access)
    with serving(access, 2) as (service, port, _, _), in_flight(access, device, port) as envelope:
        for pid in [*children_of(service), service.pid]:
            os.kill(pid, signal.SIGTERM)
        until(lambda: not is_open(port))
        assert envelope.release() == 201
        assert service.wait(DEADLINE_S) == 0


def test_a_signal_ends_a_family_that_waits_to_restart_a_child(access: Access) -> None:
    """No child is started any more, and none that lives is forgotten."""
    with serving(access, 2) as (service, _, _, err):
        children = children_of(service)
        os.kill(children[0], signal.SIGKILL)
        err.until("is started again")
        service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 0
        assert not lives(children[1])


def test_a_family_that_is_stopped_while_it_starts(access: Access) -> None:
    """Children that have not come up yet end as well, without a word."""
    with started("serve", "--port", "0", "--processes", "2", **on(access)) as (service, out, err):
        until(lambda: len(children_of(service)) == 2)
        children = children_of(service)
        service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 0
        assert not any(lives(child) for child in children)
        assert "Traceback" not in "".join(err.rest())
        assert len(out.rest()) <= 1


def test_a_child_that_cannot_start_is_told_in_one_line(access: Access) -> None:
    """What is at fault comes from the child, that it ends from the parent; nothing lives on."""
    environment = on(access) | {"POSTSEAL_KINDS_DIR": "/nowhere", "POSTSEAL_LOG_LEVEL": "error"}
    with started("serve", "--port", "0", "--processes", "2", **environment) as (service, out, err):
        assert service.wait(DEADLINE_S) == 1
        assert out.rest() == []
        lines = err.rest()
    assert len(lines) == 3
    assert all(line.startswith("postseal: cannot read ") for line in lines[:2])
    assert lines[2] == "postseal: a process of the service could not start: see the lines before\n"


def test_children_finish_when_their_parent_was_killed(access: Access) -> None:
    """What is in flight is answered, without spinning meanwhile; then they end, and the port is free."""
    device = enrol(access)
    with serving(access, 2) as (service, port, _, err), in_flight(access, device, port) as envelope:
        children = children_of(service)
        service.kill()
        service.wait(DEADLINE_S)
        until(lambda: not is_open(port))
        [busy] = [child for child in children if lives(child)][:1]
        before_s = cpu_s(busy)
        time.sleep(WATCHED_S)
        assert cpu_s(busy) - before_s < WATCHED_S / 2
        assert envelope.release() == 201
        until(lambda: not any(lives(child) for child in children))
        assert "Traceback" not in "".join(err.rest())
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_killed_child_is_replaced_under_load(access: Access) -> None:
    """Twice: another takes its place, and every envelope is acknowledged and there once."""
    devices = [enrol(access, f"device-{n}") for n in range(4)]
    with serving(access, 2) as (service, port, _, err):
        with sending(devices, port) as senders:
            for _ in range(2):
                victim = children_of(service)[0]
                os.kill(victim, signal.SIGKILL)
                assert '"status": -9' in err.until("is started again")
                until(lambda: len(children_of(service)) == 2)
            time.sleep(LOAD_S)
        service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 0
    require_each_once(access, senders)


def test_only_a_worker_gets_its_grace() -> None:
    """The end is cut after END_S; with a worker, as long after that as its pushes may take to end."""
    assert process.end_s(Settings(worker=False, stop_grace_s=7)) == process.END_S
    assert process.end_s(Settings(stop_grace_s=7)) == process.END_S + 7


@pytest.mark.soak
def test_a_database_that_answers_nothing_does_not_hold_up_the_end() -> None:
    """The end is cut if it must be; it does not take longer than it says."""
    with own_server() as server:
        device = enrol(server.access)
        with serving(server.access, 1) as (service, port, _, err):
            with server.frozen():
                envelope = InFlight(device, port)
                envelope.start()
                time.sleep(WATCHED_S)
                begun_s = time.monotonic()
                service.send_signal(signal.SIGTERM)
                code = service.wait(process.END_S + DEADLINE_S)
                took_s = time.monotonic() - begun_s
                envelope.join()
            print(f"exit code {code} after {took_s:.1f} s")
            assert took_s < process.END_S + 2
            assert code in (0, ENDED_AT_ONCE)
            assert "Traceback" not in "".join(err.rest())

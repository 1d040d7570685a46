"""Two services on one database, each restarted in turn under load: nobody notices but by sending again."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from running import DEADLINE_S, on, started

from fleet import enrol
from postseal.postgres.access import Access
from sender import require_each_once, sending

CUT_OFF = {"ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
"""What a client meets whose request was not taken: no answer that stops in the middle, no wait, no 503."""
BETWEEN_S = 0.2


@contextmanager
def restarted(access: Access) -> Iterator["Restarted"]:
    """A service that can be restarted on its port."""
    with ExitStack() as held:
        service = Restarted(access, held)
        service.start()
        yield service
        service.stop()


class Restarted:
    """It runs between `start` and `stop`."""

    def __init__(self, access: Access, held: ExitStack) -> None:
        self.port = 0
        self._access = access
        self._held = held
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        arguments = ("serve", "--port", str(self.port), "--json")
        self._process, out, _ = self._held.enter_context(started(*arguments, **on(self._access)))
        self.port = int(json.loads(out.next())["url"].rpartition(":")[2])

    def stop(self) -> None:
        """Returns when it has ended, and well."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(DEADLINE_S) == 0


def restart_under_load(access: Access, rounds: int) -> None:
    """Restart both services in turn, `rounds` times, and require that nothing is lost or there twice."""
    devices = [enrol(access, f"device-{n}") for n in range(4)]
    with restarted(access) as left, restarted(access) as right:
        ports = left.port, right.port
        with sending(devices[:2], *ports) as first, sending(devices[2:], *reversed(ports)) as second:
            for service in [left, right] * rounds:
                service.stop()
                service.start()
                time.sleep(BETWEEN_S)
        senders = first + second
    require_each_once(access, senders)
    met = {why for sender in senders for why in sender.retried}
    print(f"{sum(len(s.acknowledged) for s in senders)} acknowledged, sent again: {[dict(s.retried) for s in senders]}")
    assert met
    assert met <= CUT_OFF


def test_a_rolling_restart_loses_nothing(access: Access) -> None:
    """Both services, twice."""
    restart_under_load(access, 2)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_rolling_restarts_for_long(access: Access) -> None:
    """Both services, sixty times."""
    restart_under_load(access, 60)

"""Several processes behind one port, without the command line around them; and what /proc says of a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from postseal.postgres.access import Access
from postseal.settings import Settings
from until import until

PROGRAM = """
import sys, msgspec, structlog
from postseal.settings import Settings
from postseal.web import processes, server
processes.MEMORY_FOLDER = sys.argv[2]
settings = msgspec.json.decode(sys.argv[1], type=Settings)
listener = server.bind("127.0.0.1", 0)
port = listener.getsockname()[1]
processes.Family(settings, listener, 2, structlog.get_logger()).run(lambda: print(port, flush=True))
"""
ENDED_S = 30.0


@dataclass(frozen=True, slots=True)
class Family:
    """A parent with two children that answer on a port."""

    parent: subprocess.Popen[bytes]
    port: int

    def children(self) -> list[int]:
        """Their process ids."""
        return _children_of(self.parent.pid)

    def connections(self) -> list[int]:
        """How many connections each child has."""
        return [len(self.connections_of(pid)) for pid in self.children()]

    def connections_of(self, pid: int) -> list[Path]:
        """The descriptors of one process that are connections to the port."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = [line for line in lines if line[1].endswith(f":{self.port:04X}") and line[3] == "01"]
        established = {f"socket:[{line[9]}]" for line in ours}
        return [link for link in Path(f"/proc/{pid}/fd").iterdir() if _target(link) in established]

    def freeze(self, pid: int) -> None:
        """Stop a child, and return when it has stopped."""
        os.kill(pid, signal.SIGSTOP)
        until(lambda: stat_of(pid)[:1] == ["T"])


@contextmanager
def running_family(access: Access, folder: Path) -> Generator[Family]:
    """A family that keeps its numbers in `folder`; it must end well, whatever state its children are in."""
    settings = Settings(database_url=access.owner, roles_file=str(access.passfile))
    command = [sys.executable, "-c", PROGRAM, msgspec.json.encode(settings).decode(), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            yield Family(parent, int(parent.stdout.readline()))
            for child in _children_of(parent.pid) if parent.poll() is None else []:
                os.kill(child, signal.SIGCONT)
            parent.terminate()
            assert parent.wait(ENDED_S) == 0
        finally:
            if parent.poll() is None:
                for child in _children_of(parent.pid):
                    os.kill(child, signal.SIGKILL)
            parent.kill()


def stat_of(pid: int) -> list[str]:
    """What /proc says behind a process's name, its state first; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def cpu_s(pid: int) -> float:
    """The CPU seconds that a process has used."""
    user, system = stat_of(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _target(link: Path) -> str:
    """Where a link points; nowhere if it is gone by now."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""

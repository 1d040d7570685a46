"""Other queues on PostgreSQL, each driven by a program of its own in a process of its own.

They are installed into a folder beside the project's environment, in the exact versions of `requirements.txt` and
`package-lock.json`, and stay there for the next run. Each program `drive_*` does one action on the database that the
environment names (libpq's variables) with the payload BENCH_PAYLOAD, and prints how many seconds the action took.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import LiteralString

HERE = Path(__file__).parent
PINS = ("requirements.txt", "package.json", "package-lock.json")
ACTION_DEADLINE_S = 1_800


@dataclass(frozen=True)
class Peer:
    """One of them: its name in its registry, its driver, and what tells how many of its jobs are not done."""

    name: str
    driver: str
    pending: LiteralString
    part: float = 1.0
    """How much it is given of the jobs that the others get."""


PEERS = (
    Peer("pgqueuer", "drive_pgqueuer.py", "SELECT count(*) FROM pgqueuer"),
    # It settles one job a time, and would be at it for minutes. A shorter queue can only help it.
    Peer("procrastinate", "drive_procrastinate.py", "SELECT count(*) FROM procrastinate_jobs", part=0.1),
    Peer("pg-boss", "drive_pg_boss.mjs", "SELECT count(*) FROM pgboss.job WHERE state < 'completed'"),
    Peer("graphile-worker", "drive_graphile_worker.mjs", "SELECT count(*) FROM graphile_worker._private_jobs"),
    Peer("pgmq", "drive_pgmq.py", "SELECT count(*) FROM pgmq.q_bench"),
)


class Installed:
    """The peers in a folder, ready to be driven."""

    def __init__(self, folder: Path) -> None:
        """Install what is pinned, unless it is there. Raises CalledProcessError."""
        self._folder = folder
        self._python = folder / "venv" / "bin" / "python"
        pins = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in PINS)).hexdigest()
        done = folder / "installed"
        if not (done.exists() and done.read_text() == pins):
            print(f"installing the peers into {folder}", file=sys.stderr)
            self._install()
            done.write_text(pins)
        for driver in HERE.glob("drive_*"):
            shutil.copy(driver, folder)  # Node.js looks for packages beside the program

    def _install(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", str(self._python.parents[1])], check=True)
        pip = [str(self._python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, "--require-hashes", "-r", str(HERE / "requirements.txt")], check=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, self._folder)
        npm = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"]
        subprocess.run(npm, cwd=self._folder, stdout=subprocess.DEVNULL, check=True)

    def versions(self) -> dict[str, str]:
        """Of each peer, and of the Node.js that runs some of them."""
        (packages,) = self._folder.glob("venv/lib/*/site-packages")
        found = {each.name: each.version for each in distributions(path=[str(packages)])}
        for manifest in self._folder.glob("node_modules/*/package.json"):
            package = json.loads(manifest.read_text())
            found.setdefault(package["name"], package["version"])
        node = {"node": subprocess.run([self._node(), "--version"], capture_output=True, text=True, check=True).stdout}
        return {peer.name: found[peer.name] for peer in PEERS} | {"node": node["node"].strip().removeprefix("v")}

    def drive(self, peer: Peer, action: str, jobs: int, environment: Mapping[str, str]) -> float:
        """Let the peer do `action` with so many jobs; gives its seconds. Raises RuntimeError with what it printed."""
        program = str(self._folder / peer.driver)
        command = [str(self._python) if program.endswith(".py") else self._node(), program, action, str(jobs)]
        done = subprocess.run(
            command,
            env=os.environ | environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=ACTION_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{peer.name}: {action} failed: {done.stderr or done.stdout}")
        return float(done.stdout.split()[-1]) if action != "install" else 0.0

    def _node(self) -> str:
        (program,) = self._folder.glob("node_modules/node-linux-*/bin/node")
        return str(program)

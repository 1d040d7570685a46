"""The program as a stranger runs it: `postseal serve` beside other commands, one home, in processes of their own."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = Path(sys.executable).with_name("postseal")
COMMAND_TIMEOUT_S = 60
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30
PAGE_ROWS = 1000
COMMANDS_AT_ONCE = 4


@dataclass
class Program:
    """The command line on one home, and the services that run there."""

    home: Path
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def run(self, *words: str) -> dict[str, Any]:
        """What a command prints with `--json`; fails unless its exit code is 0."""
        done = subprocess.run(
            [COMMAND, *words, "--json"],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)

    def run_all(self, *commands: str) -> list[dict[str, Any]]:
        """What these commands print, in their order; they run beside each other."""

        def run(command: str) -> dict[str, Any]:
            return self.run(*command.split())

        with ThreadPoolExecutor(COMMANDS_AT_ONCE) as pool:
            return list(pool.map(run, commands))

    def trail(self, tenant: str) -> dict[str, dict[str, Any]]:
        """The tenant's audit events by correlation id, which each has to itself."""
        rows = self.rows.setdefault(tenant, [])
        while True:
            after = ["--after", str(rows[-1]["id"])] if rows else ["--after", "0"]
            page = self.run("audit", "list", tenant, "--limit", str(PAGE_ROWS), *after)["events"]
            rows.extend(page)
            if len(page) < PAGE_ROWS:
                break
        found = {row["correlationId"]: row for row in rows}
        assert len(found) == len(rows)
        return found

    @contextmanager
    def serve(self, **settings: str) -> Generator[str]:
        """Run the service with these settings on a free port; yields its address, stops it at the end."""
        log = self.home.parent / f"serve-{time.time_ns()}.log"
        with (
            log.open("wb") as messages,
            subprocess.Popen(
                [COMMAND, "serve", "--port", "0", "--json"],
                env=self.environment() | {f"POSTSEAL_{name.upper()}": value for name, value in settings.items()},
                stdout=subprocess.PIPE,
                stderr=messages,
            ) as process,
        ):
            try:
                line = first_line(process)
                assert line, f"the service ended with {process.wait(STOP_TIMEOUT_S)}: {log.read_text()[-500:]}"
                yield json.loads(line)["url"].removeprefix("http://")
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise

    def environment(self) -> dict[str, str]:
        """Nothing of the caller's own settings, and this home."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("POSTSEAL_")}
        return others | {"POSTSEAL_DATA_DIR": str(self.home)}


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    """The first line on stdout, awaited for at most START_TIMEOUT_S; empty if the process ended without one."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(START_TIMEOUT_S), "the service said nothing in time"
    return process.stdout.readline()

"""Programs that stand on a page in parts, and the `postseal` that they are run beside."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tables

from postseal.postgres.access import Access

BIN = Path(sys.executable).parent
ENDED_S = 60


def program(page: str, name: str, folder: Path) -> Path:
    """Put the parts of a program together, in a file of that name in `folder`."""
    text = (tables.DOCS / page).read_text()
    parts = re.findall(rf"<!-- part: {re.escape(name)} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert parts
    file = folder / name
    file.write_text("\n\n".join(parts))
    return file


def of_deployment(access: Access, folder: Path) -> dict[str, str]:
    """The environment of a deployment on a test's database, whose files are in `folder`."""
    key = folder / "deployment.key"
    if not key.exists():
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(32))
    return {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "POSTSEAL_DATABASE_URL": access.owner,
        "POSTSEAL_ROLES_FILE": str(access.passfile),
        "POSTSEAL_DEPLOYMENT_KEY_FILE": str(key),
        "POSTSEAL_SIGNING_KEYS_DIR": str(folder / "signing"),
        "POSTSEAL_PORT": "0",
    }


@contextmanager
def running(command: list[object], environment: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program in `folder`, its lines on `stdout`; ended at the end, if it runs so long."""
    with subprocess.Popen(
        [str(word) for word in command],
        env={"PATH": os.environ["PATH"]} | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(ENDED_S)


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints, waited for; none means that it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line
    return line.rstrip("\n")


@contextmanager
def serving(environment: Mapping[str, str], folder: Path) -> Iterator[str]:
    """The address of a `postseal serve` that leaves delivering to others."""
    with running([BIN / "postseal", "serve", "--no-worker", "--json"], environment, folder) as process:
        yield json.loads(line_of(process))["url"]

"""docs/recovery.md: its walks are typed as they stand there, and print what stands there."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tables
from programs import BIN
from typed import Typed, blocks_of, commands, free_port, shell

from postseal.postgres.home import Home, server_lives
from postseal.postgres.postmaster import stop_postmaster

PAGE = (tables.DOCS / "recovery.md").read_text()
BLOCKS = blocks_of(PAGE)
LOST_SERVER = blocks_of(PAGE.partition("\n## To a point in time\n")[0])
PLACES = ("srv", "backup", "elsewhere")
"""Folders of the page, which are in one of this test's."""
COUNTS = re.compile(r"(sizeBytes|schemaVersion|rows) \d+")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the database's account can pass through; at the end no server of its homes lives, and it is gone."""
    folder = Path(tempfile.mkdtemp(prefix="postseal-docs-", dir="/tmp")).resolve()
    folder.chmod(0o711)
    for name in PLACES:
        (folder / name).mkdir(mode=0o711)
    try:
        yield folder
    finally:
        for lock in folder.glob("srv/*/lock/server"):
            if server_lives(home := Home(lock.parents[1])):
                stop_postmaster(home)
        shutil.rmtree(folder)


@pytest.fixture
def typed(folder: Path) -> Iterator[Typed]:
    """A shell that knows nothing but where the programs are."""
    port = free_port()
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "POSTSEAL_PORT": port}
    ours = {"127.0.0.1:8080": f"127.0.0.1:{port}"} | {f"/{name}/": f"{folder}/{name}/" for name in PLACES}
    with shell(ours, environment, folder) as typed:
        yield typed


def walk(typed: Typed, blocks: list[tuple[str, str]], folder: Path) -> None:
    """Each command prints what stands below it, but for ids, times, counts and the widths of columns."""
    for number, (kind, block) in enumerate(blocks):
        for command, expected in commands(block):
            if kind == "beside":
                typed.begin(command, expected.strip(), folder / f"beside-{number}.log")
            else:
                theirs, ours = (COUNTS.sub(r"\1 N", text) for text in typed.run(command, expected))
                assert ours == theirs, command


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_lost_server(typed: Typed, folder: Path):
    """From a service that runs, over backup, loss and restore, to its device that talks to another machine."""
    assert len(LOST_SERVER) > 5
    walk(typed, LOST_SERVER, folder)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_to_a_point_in_time(typed: Typed, folder: Path):
    """On from there: streamed WAL, full and incremental backups, and a recovery to the moment before a mistake."""
    assert len(BLOCKS) > len(LOST_SERVER)
    walk(typed, BLOCKS, folder)


def test_every_block_is_run():
    """No command with its output stands there that the walk leaves out."""
    assert PAGE.count("```console") == len(BLOCKS)

"""docs/delivering.md: its walk is typed as it stands there, and prints what stands there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tables
from programs import of_deployment, serving
from typed import Typed, blocks_of, commands, free_port, shell

from postseal.postgres.access import Access
from postseal.rules.delivery import Code, SealCode

PAGE = (tables.DOCS / "delivering.md").read_text()
BLOCKS = blocks_of(PAGE)


@pytest.fixture
def typed(access: Access, tmp_path: Path) -> Iterator[Typed]:
    """A shell beside a service that leaves delivering to others."""
    deployment = of_deployment(access, tmp_path)
    with (
        serving(deployment, tmp_path) as url,
        shell({"http://127.0.0.1:8080": url, "9000": free_port()}, deployment, tmp_path) as typed,
    ):
        yield typed


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_the_walk(typed: Typed, tmp_path: Path):
    """Each command prints what stands below it, but for ids, times and the widths of columns."""
    printed: list[tuple[str, str]] = []
    for kind, block in BLOCKS:
        for command, expected in commands(block):
            if kind == "beside":
                typed.begin(command, expected, tmp_path / "beside.log")
            else:
                printed.append(typed.run(command, expected))
    assert [ours for _, ours in printed] == [theirs for theirs, _ in printed]
    assert "both signatures hold" in (tmp_path / "beside.log").read_text()


def test_every_code_is_told():
    """The tables of the page name each code, and no other."""
    told = "".join(
        line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `") and line[2:8] != "`code`"
    )
    codes = set(re.findall(r"`([a-z0-9_]+)`", told)) - set(re.findall(r"`(postseal_[a-z_]+)", told))
    assert codes == {*Code, *SealCode}


def test_every_block_is_run():
    """No command with its output stands there that the walk leaves out."""
    assert PAGE.count("```console") == len(BLOCKS)

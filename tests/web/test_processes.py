"""The parent of several processes: what it cleans up after others."""

import os
from pathlib import Path

from postseal.web.processes import FOLDER_PREFIX, _remove_left_behind


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

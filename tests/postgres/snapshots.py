"""Text files that are checked in and held against the database; a change to one is read in review.

To renew them after a migration: POSTSEAL_RENEW_SNAPSHOTS=1 .venv/bin/pytest tests/postgres -k snapshot
"""

import os
from pathlib import Path


def require_same(file: Path, lines: list[str]) -> None:
    """Fail with a readable difference unless `file` holds exactly `lines`; or write them, if that is asked for."""
    if os.environ.get("POSTSEAL_RENEW_SNAPSHOTS"):
        file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    assert lines == file.read_text("utf-8").splitlines(), f"{file.name} differs; see {__file__} to renew it"

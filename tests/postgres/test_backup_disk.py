"""A disk that is full while a backup is taken."""

from pathlib import Path

import pytest
from faults import in_own_namespace, small_disk

from fleet import as_owner, enrol
from postseal.backup import back_up
from postseal.errors import ArchiveError
from postseal.postgres.access import Access
from postseal.postgres.disk import MIB


def test_a_disk_that_fills_up(access: Access, tmp_path: Path):
    """One line says so, though a program that dies may not say why; and what was written is taken away again."""
    if in_own_namespace(f"{__file__}::test_a_disk_that_fills_up"):
        return
    enrol(access)
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO payloads SELECT 'acme', 1, n, NULL, decode(md5(n::text) || md5((-n)::text), 'hex'), ''"
            " FROM generate_series(1, %s) AS n",
            [3 * MIB // 32],
        )
    with small_disk(tmp_path / "disk", 1) as disk:
        with pytest.raises(ArchiveError, match=r"pg_dump failed: .*(No space left on device|worker process died)"):
            back_up(access, disk / "archive", jobs=2)
        assert list(disk.iterdir()) == []

"""Backup: one snapshot of the database becomes an archive, while the service goes on.

1. nothing stands at the archive's name; it is written under another one, `<name>.unfinished`
2. a snapshot is exported; pg_dump writes it with several connections, and meanwhile its rows are counted
3. the manifest, with each file's digest, goes to the disk last
4. the folder gets its name

Cut off anywhere, it leaves at most the unfinished folder, which the next backup of that name clears away.
"""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from postseal.archive import DUMP, MANIFEST, MS_A_SECOND, Manifest, stored_files, write_manifest
from postseal.errors import ArchiveError
from postseal.postgres.access import Access
from postseal.postgres.binaries import find_client_programs
from postseal.postgres.home import try_lock
from postseal.postgres.programs import running
from postseal.postgres.snapshot import LOCK_WAIT_MS, Snapshot, audit_heads, count_rows, exported_snapshot
from postseal.private_files import sync_folder

UNFINISHED = ".unfinished"
COMPRESSION = 1
"""gzip's quickest level: signatures and digests do not get smaller, and the service needs the processor too."""


def back_up(access: Access, archive: Path, *, jobs: int) -> Manifest:
    """Write the archive `archive`, whose folder must be there and which must not; returns its manifest.

    Raises ArchiveError, StartupError, psycopg.Error where rows may not be read, and OSError.
    """
    if os.path.lexists(archive):
        raise ArchiveError(f"{archive} is there already: name another folder")
    with (
        _unfinished(archive) as (folder, lock),
        exported_snapshot(access.owner, access.prefix) as snapshot,
    ):
        programs = find_client_programs(snapshot.server_major)
        arguments = _arguments(snapshot, folder, jobs)
        # A pg_dump that outlives this process keeps the folder locked.
        with running(programs, "pg_dump", arguments, access.owner, keep_fds=[lock]) as dump:
            rows = count_rows(snapshot.connection)
            head, platform_head = audit_heads(snapshot.connection)
            dump.finish()
        manifest = Manifest(
            postseal_version=metadata.version("postseal"),
            schema_version=snapshot.schema_version,
            role_prefix=access.prefix,
            server_version=snapshot.server_version,
            programs_version=programs.version,
            taken_at_ms=round(snapshot.taken_at.timestamp() * MS_A_SECOND),
            rows=rows,
            audit_head=head,
            platform_audit_head=platform_head,
            files=stored_files(folder),
        )
        write_manifest(folder, manifest)
        folder.rename(archive)
        sync_folder(archive.parent)
    return manifest


def _arguments(snapshot: Snapshot, folder: Path, jobs: int) -> list[str]:
    return [
        "--format=directory",
        f"--file={folder / DUMP}",
        f"--jobs={jobs}",
        f"--compress={COMPRESSION}",
        f"--snapshot={snapshot.id}",
        "--schema=postseal",
        f"--lock-wait-timeout={LOCK_WAIT_MS}",
        *([f"--role={snapshot.role}"] if snapshot.role else []),
    ]


@contextmanager
def _unfinished(archive: Path) -> Generator[tuple[Path, int]]:
    """Make the folder in which the archive is written, and lock it; it is removed where the block fails."""
    folder = archive.with_name(archive.name + UNFINISHED)
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # One that has just been renamed leaves its lock with whoever waited for it.
        if not try_lock(lock, fcntl.LOCK_EX) or not _is(folder, lock):
            raise ArchiveError(f"another backup is writing to {folder}: let it end")
        _clear(folder)
        try:
            yield folder, lock
        except BaseException:
            shutil.rmtree(folder)
            raise
    finally:
        os.close(lock)


def _is(folder: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), folder.stat(follow_symlinks=False))
    return False


def _clear(folder: Path) -> None:
    """Take away what a backup that was killed left; anything else is somebody's. ArchiveError."""
    others = sorted({path.name for path in folder.iterdir()} - {DUMP, MANIFEST})
    if others:
        raise ArchiveError(f"{folder} holds {others[0]}, which is no backup's: move it away")
    (folder / MANIFEST).unlink(missing_ok=True)
    if (folder / DUMP).exists():
        shutil.rmtree(folder / DUMP)

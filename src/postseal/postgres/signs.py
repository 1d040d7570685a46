"""What the server's log tells of a recovery: that it works, or that it got stuck.

A PANIC ends a session or a recovery. After a session's, the postmaster ends all others and begins a recovery. After a
recovery's own, as a failed fsync or a full disk brings it, the postmaster stays "in recovery mode" for ever and
ignores a fast shutdown. A recovery that works tells every ten seconds how far it is.
"""

import re

from postseal.postgres.home import Home

STUCK_SECONDS = 10.0
"""A PANIC that nothing followed for so long; the postmaster takes up to 5 s to end the others and go on."""
READ_BYTES = 1024 * 1024

_PANIC, _AGAIN = b"PANIC:", b"reinitializing"
_SIGN = re.compile(rb"PANIC:|reinitializing|starting PostgreSQL|elapsed time:")


class LogSigns:
    """Reads one home's log on and on, at first from the last MiB."""

    def __init__(self, home: Home) -> None:
        self._path = home.log_file
        self._read_to = max(0, self._size() - READ_BYTES)
        self.panicked = False
        """Whether a PANIC is the last that was told."""

    def skip(self) -> None:
        """The server answers: what stands in the log is past."""
        self._read_to = self._size()
        self.panicked = False

    def progressed(self) -> bool:
        """Read on; whether a new server or a recovery's progress was told. A PANIC is none, nor is what follows it."""
        size = self._size()
        if size < self._read_to:
            self._read_to = 0  # a restart began a new file
        if size == self._read_to:
            return False
        with self._path.open("rb") as log:
            log.seek(self._read_to)
            text = log.read(READ_BYTES)
        whole = text.rfind(b"\n") + 1
        self._read_to += whole
        signs = _SIGN.findall(text[:whole])
        if signs:
            self.panicked = signs[-1] == _PANIC
        return any(sign not in {_PANIC, _AGAIN} for sign in signs)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

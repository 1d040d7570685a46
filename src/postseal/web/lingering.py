"""A transport that writes an answer at once, and closes so that the other side can read it.

A socket that is closed while something unread lies in it is reset, and the reset takes with it an answer that is still
on its way. So in the middle of a request only our side is closed at first, and what still comes is thrown away.

uvicorn writes the head and the body of an answer apart. uvloop would make a system call of each (12 to 30 us when
measured), so what is written in one turn of the loop goes out together.
"""

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_S = 2.0
"""How long the other side may go on sending."""
UNREAD_S = 30.0
"""How long what was written may lie unread."""


class LingeringTransport(asyncio.Transport):
    """`inner` with another way to close. `is_mid_request` says whether more is expected to come."""

    def __init__(
        self,
        inner: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_mid_request: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._is_mid_request = is_mid_request
        self._closing = False
        self._unsent: list[bytes | bytearray | memoryview] = []
        self._timers: list[asyncio.TimerHandle] = []

    def close(self) -> None:
        """Close within LINGER_S, or within UNREAD_S if what was written is not read."""
        if self.is_closing():
            return
        self._flush()
        self._closing = True
        self._timers.append(self._loop.call_later(UNREAD_S, self._inner.abort))
        if self._is_mid_request():
            self._inner.write_eof()
            self._inner.resume_reading()
            self._timers.append(self._loop.call_later(LINGER_S, self._inner.close))
        else:
            self._inner.close()

    def lost(self) -> None:
        """The connection is gone: no timer holds it any more."""
        self._closing = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._unsent.clear()

    def is_closing(self) -> bool:
        """Whether `close` was called, or the connection is closing by itself."""
        return self._closing or self._inner.is_closing()

    def abort(self) -> None:
        """Close at once; what was not written is lost."""
        self._closing = True
        self._inner.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What `inner` says."""
        return self._inner.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write with all else that is written in this turn of the loop; nothing more once it closes."""
        if self.is_closing():
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def pause_reading(self) -> None:
        """Read nothing for now."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._inner.resume_reading()

    def _flush(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            if not self._inner.is_closing():
                self._inner.write(data)

"""How a process comes to its end: asked for by a signal, which interrupts nothing, and bounded in time.

An exception raised by a signal's handler can come up anywhere: in a clean-up, which then fails, or in a call-back,
which swallows it. So from where there is something to release, SIGTERM and SIGINT are held: they are noted, and
answered where the code says so.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

ENDED_AT_ONCE = 128 + signal.SIGTERM
"""The exit code of a process that did not come to its end by itself."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class _Signals:
    """What came to this process while signals were held."""

    came: bool = False
    unanswered: int | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        if self.came:
            os._exit(128 + number)
        self.came, self.unanswered = True, number


_signals = _Signals()


@contextmanager
def signals_held() -> Generator[None]:
    """SIGTERM and SIGINT interrupt nothing within it; in a process's main thread.

    One that nobody answered ends the process with 128 + its number, at `end_if_asked` or behind the block; a second one
    at once.
    """
    before = {number: signal.signal(number, _signals.note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    end_if_asked()


def end_if_asked() -> None:
    """Raise SystemExit if a signal came that nobody answered: said where all can be undone."""
    if _signals.unanswered is not None:
        sys.exit(128 + _signals.unanswered)


@contextmanager
def answering(answer: Callable[[int], None]) -> Generator[None]:
    """In an event loop: each signal is answered with its number, and so is one that was held before."""
    loop = asyncio.get_running_loop()

    def answer_it(number: int) -> None:
        _signals.came, _signals.unanswered = True, None
        answer(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, answer_it, number)
    try:
        if _signals.unanswered is not None:
            answer_it(_signals.unanswered)
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def run_until_asked(flow: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run) -> T:
    """The result of `flow`, run in an event loop of its own by `run`; a signal cancels it: then SystemExit."""
    asked_by: list[int] = []

    async def cancelled_if_asked() -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - it runs

        def cancel(number: int) -> None:
            if asked_by:
                os._exit(128 + number)
            asked_by.append(number)
            task.cancel()

        with answering(cancel):
            return await flow

    try:
        return run(cancelled_if_asked())
    except asyncio.CancelledError:
        if asked_by:
            sys.exit(128 + asked_by[0])
        raise


class Ending:
    """The end of what serves or delivers: `asked` is set once it shall end.

    `within_s` after that the process is ended in any case, whatever hangs.
    """

    def __init__(self, within_s: float) -> None:
        self.asked = asyncio.Event()
        self._within_s = within_s

    def ask(self) -> None:
        """Let it end."""
        if not self.asked.is_set():
            asyncio.get_running_loop().call_later(self._within_s, _cut)
        self.asked.set()


@contextmanager
def ending_asked_by_signals(within_s: float, *, insist: bool = True) -> Generator[Ending]:
    """An Ending that is asked for by a signal. A second one ends the process at once where `insist` says so."""
    ending = Ending(within_s)

    def answer(_number: int) -> None:
        if insist and ending.asked.is_set():
            os._exit(ENDED_AT_ONCE)
        ending.ask()

    with answering(answer):
        yield ending


def _cut() -> None:
    structlog.get_logger().error("the end took too long and was cut")
    os._exit(ENDED_AT_ONCE)

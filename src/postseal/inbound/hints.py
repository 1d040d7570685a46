"""Hints: how far streams reach, told after a certain commit to whoever waits, here and in other processes.

1. a lane says which cursors moved; readers that wait in this process are woken at once
2. what gathered meanwhile is told to the other processes, at most every TELL_EVERY_S, on a connection of its own
3. a session of its own hears what others tell, from the first reader on that waits here

Nothing relies on a hint: `waiting.py` looks into the database as well.
"""

import asyncio
from collections.abc import Mapping
from typing import Self

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.inbound.waiting import Waiting
from postseal.logs import where
from postseal.postgres.database import Database
from postseal.postgres.hint import MAX_HINT_BYTES, listen, tell
from postseal.postgres.ingest import StreamKey
from postseal.rules.stream import Cursor

TELL_EVERY_S = 0.05
UNHEARD_S = 1.0
"""How long nothing is told once nobody listened. A reader who comes meanwhile looks for itself as often."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.hints")


class Hints:
    """The hints of one process. Enter it to tell and to hear."""

    def __init__(self, database: Database, waiting: Waiting) -> None:
        self._database = database
        self._waiting = waiting
        self._untold: dict[StreamKey, Cursor] = {}
        self._moved = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._tell()), asyncio.create_task(self._listen())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def moved(self, cursors: Mapping[StreamKey, Cursor]) -> None:
        """These are committed for certain. Takes less than half a microsecond where nobody waits."""
        if not cursors:
            return
        if self._waiting.places:
            for key, cursor in cursors.items():
                self._waiting.reached(key.stream, cursor.contiguous)
        self._untold.update(cursors)
        self._moved.set()

    async def _tell(self) -> None:
        while True:
            await self._moved.wait()
            self._moved.clear()
            untold, self._untold = self._untold, {}
            hint = write_hint({key.stream: cursor.contiguous for key, cursor in untold.items()})
            try:
                heard = await tell(self._database, hint)
            except Exception as fault:  # noqa: BLE001 - whatever fails here must not end all hints
                _log.warning("hint_not_told", error=type(fault).__name__, at=where(fault))
                heard = False
            await asyncio.sleep(TELL_EVERY_S if heard else UNHEARD_S)

    async def _listen(self) -> None:
        await self._waiting.begun.wait()
        await listen(self._database, self._hear)

    def _hear(self, hint: str) -> None:
        try:
            positions = read_hint(hint)
        except ValueError:
            positions = {}  # anybody who may connect can write on the channel
        for stream, contiguous in positions.items():
            self._waiting.reached(stream, contiguous)
        if not positions:
            self._waiting.look_at_all()


def write_hint(positions: Mapping[int, int]) -> str:
    """`stream:contiguous` of each, between commas; nothing, which stands for any stream, where that is too long."""
    hint = ",".join(f"{stream}:{contiguous}" for stream, contiguous in positions.items())
    return hint if len(hint) <= MAX_HINT_BYTES else ""


def read_hint(hint: str) -> dict[int, int]:
    """What `write_hint` wrote. Raises ValueError for any other text."""
    pairs = (pair.split(":") for pair in hint.split(",") if hint)
    return {int(stream): int(contiguous) for stream, contiguous in pairs}

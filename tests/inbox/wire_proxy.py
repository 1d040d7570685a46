"""A proxy between libpq and PostgreSQL that does one thing to the next COMMIT of a group, then nothing any more.

It stands on a unix socket. Statements must not be prepared, so that each COMMIT is seen as the text of a Parse message
(protocol 3: `P`, length, name, text).
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postseal.postgres.access import Access

CHUNK_BYTES = 1 << 16
COMMIT = b"P\0\0\0\x0e\0COMMIT\0\0\0"
ROLLBACK = b"P\0\0\0\x10\0ROLLBACK\0\0\0"
COMMITTED = b"C\0\0\0\x0bCOMMIT\0"
AUDITED = b"INSERT INTO audit_events"
"""Marks the chunk that closes a group; look-ups of keys and credentials commit too."""


class Deed(StrEnum):
    """What is done to the next COMMIT."""

    NOTHING = "nothing"
    CUT_BEFORE = "the connection is cut before the COMMIT reaches the server"
    CUT_AFTER = "the connection is cut after the server has committed, before its answer"
    TURN = "the COMMIT becomes a ROLLBACK, as a failed transaction makes it"
    SWALLOW = "the COMMIT never arrives, and nothing is cut"
    KEEP_ANSWER = "the server's answer is kept back, and nothing is cut"


@dataclass
class WireProxy:
    """Set `deed`; it is done once and `done` tells."""

    deed: Deed = Deed.NOTHING
    done: int = 0

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter, socket: str) -> None:
        """Carry one connection until either side ends it."""
        server, to_server = await asyncio.open_unix_connection(socket)
        line = _Line(self, to_client, to_server)
        ways = [asyncio.create_task(line.upwards(client)), asyncio.create_task(line.downwards(server))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_server.close()
            to_client.close()


@dataclass
class _Line:
    proxy: WireProxy
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter
    closing: Deed = Deed.NOTHING
    """The deed that is being done on this connection."""
    is_group: bool = False

    async def upwards(self, client: asyncio.StreamReader) -> None:
        """From the client to the server."""
        while chunk := await client.read(CHUNK_BYTES):
            self.is_group = self.is_group or AUDITED in chunk
            if COMMIT in chunk:
                if self.is_group and self.proxy.deed is not Deed.NOTHING:
                    self.closing, self.proxy.deed = self.proxy.deed, Deed.NOTHING
                    self.proxy.done += 1
                self.is_group = False
                chunk = self._spoiled(chunk)
            self.to_server.write(chunk)
            await self.to_server.drain()
            if self.closing is Deed.CUT_BEFORE:
                return

    def _spoiled(self, chunk: bytes) -> bytes:
        before, commit, after = chunk.partition(COMMIT)
        match self.closing:
            case Deed.CUT_BEFORE | Deed.SWALLOW:
                return before
            case Deed.TURN:
                self.closing = Deed.NOTHING
                return before + ROLLBACK + after
            case _:
                return before + commit + after

    async def downwards(self, server: asyncio.StreamReader) -> None:
        """From the server to the client."""
        while chunk := await server.read(CHUNK_BYTES):
            if self.closing in (Deed.CUT_AFTER, Deed.KEEP_ANSWER):
                if COMMITTED in chunk and self.closing is Deed.CUT_AFTER:
                    return
                continue
            self.to_client.write(chunk)
            await self.to_client.drain()


@asynccontextmanager
async def proxied(access: Access, folder: Path) -> AsyncGenerator[tuple[Access, WireProxy]]:
    """The same database through a proxy."""
    parameters = conninfo_to_dict(access.owner)
    name = f".s.PGSQL.{parameters['port']}"
    proxy = WireProxy()

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        await proxy.serve(client, to_client, f"{parameters['host']}/{name}")

    server = await asyncio.start_unix_server(serve, folder / name)
    try:
        yield replace(access, owner=make_conninfo(access.owner, host=str(folder))), proxy
    finally:
        server.close()
        await server.wait_closed()

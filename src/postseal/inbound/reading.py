"""Reading streams, envelopes and keys, inside what a credential is for.

A device reads its own stream in each of its projects, a consumer all streams of its projects. Whatever lies outside of
that is `not_found`, as if it were not there. Nothing is skipped silently: what expired and what the replay floor closed
stand in their place.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from postseal.door import require_role
from postseal.errors import Refused
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.outcomes import Reason
from postseal.postgres import streams
from postseal.postgres.database import Connection, Database
from postseal.postgres.ingest import StreamKey
from postseal.postgres.reading import EnvelopeRow, KeyRow, list_keys, read_envelopes
from postseal.postgres.streams import Stream

T = TypeVar("T")

PAGE_PAYLOAD_BYTES = 256 * 1024
"""A page ends after the envelope with which its payloads reach this."""


@dataclass(frozen=True, slots=True)
class ClosedRange:
    """Sequences that will never be there, both ends included: the replay floor rose over them."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Page:
    """Envelopes and closed ranges of a stream in order, through the contiguous cursor at most."""

    stream: StreamKey
    items: list[EnvelopeRow | ClosedRange]
    contiguous: int
    next_after: int
    """What the next page comes after."""


async def read_streams(
    database: Database, caller: VerifiedIdentity, project: str, *, after: str, limit: int
) -> list[Stream]:
    """At most `limit` streams that the caller may see, by producer, from the first one behind `after` on.

    Raises Refused `role_forbidden` or `not_found`, and Unavailable; so do the functions below.
    """
    require_role(caller, Role.DEVICE, Role.CONSUMER)
    if caller.role is Role.DEVICE:
        own = caller.device or ""
        return [await read_stream(database, caller, project, own)] if after < own else []
    _require_project(caller, project)
    return await database.transact(
        lambda connection: streams.page(connection, caller.tenant, project, after=after, rows=limit)
    )


async def read_stream(database: Database, caller: VerifiedIdentity, project: str, producer: str) -> Stream:
    """Where one stream stands."""
    require_role(caller, Role.DEVICE, Role.CONSUMER)
    if caller.role is Role.DEVICE and producer != caller.device:
        raise _not_found()

    async def stream(_connection: Connection, stream: Stream) -> Stream:
        return stream

    return await _with_stream(database, caller, project, producer, stream)


async def read_page(
    database: Database, caller: VerifiedIdentity, project: str, producer: str, *, after: int, limit: int
) -> Page:
    """At most `limit` items behind `after`."""
    require_role(caller, Role.CONSUMER)

    async def page(connection: Connection, stream: Stream) -> Page:
        cursor = stream.cursor
        rows = await read_envelopes(
            connection,
            stream.key,
            after=after,
            through=cursor.contiguous,
            limit=limit,
            max_bytes=PAGE_PAYLOAD_BYTES,
        )
        items = list(_in_order(rows, after=after, through=cursor.contiguous, limit=limit))[:limit]
        return Page(stream.key, items, cursor.contiguous, _end(items[-1]) if items else after)

    return await _with_stream(database, caller, project, producer, page)


async def read_keys(database: Database, caller: VerifiedIdentity, project: str, producer: str) -> list[KeyRow]:
    """The public keys with which a producer's envelopes are verified, tombstones included, oldest first."""
    require_role(caller, Role.CONSUMER)

    async def keys(connection: Connection, _stream: Stream) -> list[KeyRow]:
        return await list_keys(connection, tenant=caller.tenant, device=producer)

    return await _with_stream(database, caller, project, producer, keys)


async def _with_stream(
    database: Database,
    caller: VerifiedIdentity,
    project: str,
    producer: str,
    read: Callable[[Connection, Stream], Awaitable[T]],
) -> T:
    _require_project(caller, project)

    async def work(connection: Connection) -> T:
        stream = await streams.find(connection, caller.tenant, project, producer)
        if stream is None:
            raise _not_found()
        return await read(connection, stream)

    return await database.transact(work)


def _in_order(rows: list[EnvelopeRow], *, after: int, through: int, limit: int) -> Iterator[EnvelopeRow | ClosedRange]:
    """The rows that fit, and what is missing before and behind them, which only the replay floor can have closed."""
    expected = after + 1
    for row in rows:
        if not row.fits:
            return
        if expected < row.sequence:
            yield ClosedRange(expected, row.sequence - 1)
        yield row
        expected = row.sequence + 1
    if len(rows) < limit and expected <= through:
        yield ClosedRange(expected, through)


def _end(item: EnvelopeRow | ClosedRange) -> int:
    return item.last if isinstance(item, ClosedRange) else item.sequence


def _require_project(caller: VerifiedIdentity, project: str) -> None:
    if project not in caller.projects:
        raise _not_found()


def _not_found() -> Refused:
    return Refused(Reason.NOT_FOUND, "there is no such thing, or it is not the caller's")

"""`postseal inbox`: tail.

Whoever may open the database reads as a consumer does: through each stream's contiguous cursor, in order, with what
expired and what the replay floor closed in its place.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from typer import BadParameter, Option, Typer, echo

from postseal.admin.names import require_projects
from postseal.cli.arguments import ProjectName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, text
from postseal.errors import Unavailable
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.inbound.reading import ClosedRange, Page, read_page, read_stream, read_streams
from postseal.postgres.database import Database, Part
from postseal.postgres.hint import listen
from postseal.postgres.reading import EnvelopeRow
from postseal.postgres.streams import Stream

PAGE_STREAMS = 500
PAGE_ENVELOPES = 500
POLL_S = 0.5
"""How often `--follow` looks when no hint comes."""
GAP_S = 0.1
"""How long it gathers what the next look will show."""

app = Typer()


class _Data(msgspec.Struct):
    kind: str


class _Payload(msgspec.Struct):
    data: _Data


@command(app, "tail")
def tail(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    *,
    producer: Annotated[str | None, Option(metavar="PRODUCER", help="Only what this device sent.")] = None,
    after: Annotated[int, Option(metavar="SEQUENCE", min=0, help="Begin behind it; with --producer.")] = 0,
    follow: Annotated[bool, Option("--follow", help="Go on with what arrives, until interrupted.")] = False,
) -> None:
    """Show what devices have sent to a project, each stream in its order."""
    if after and producer is None:
        raise BadParameter("--after counts in one stream: name it with --producer")
    reader = VerifiedIdentity(
        tenant, session.actor.account, None, Role.CONSUMER, session.actor.account, frozenset({project})
    )

    async def flow(database: Database) -> None:
        await database.transact(lambda connection: require_projects(connection, tenant, [project]))
        printer = _Printer(session, database, reader, project, producer, after)
        await (_follow(database, printer) if follow else printer.catch_up())

    session.run(Part.INGEST, flow)


@dataclass(slots=True)
class _Printer:
    """Prints each envelope once; after a failure it goes on behind the last one."""

    session: Session
    database: Database
    reader: VerifiedIdentity
    project: str
    producer: str | None
    after: int
    positions: dict[str, int] = field(default_factory=dict[str, int])
    told_of: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    async def catch_up(self) -> None:
        """Print what is new. Raises Unavailable."""
        async for stream in _streams(self.database, self.reader, self.project, self.producer):
            position = self.positions.get(stream.producer, self.after)
            async for page in _pages(self.database, self.reader, self.project, stream, position):
                for item in page.items:
                    _print(self.session, stream.producer, item)
                self.positions[stream.producer] = page.next_after
            self._tell_of_hole(stream)

    def _tell_of_hole(self, stream: Stream) -> None:
        """Say once what a stream waits for: what came behind a hole is retained and not shown yet."""
        holes = stream.cursor.holes()
        if holes and self.told_of.get(stream.producer) != holes[0]:
            self.told_of[stream.producer] = holes[0]
            first, last = holes[0]
            missing = f"sequence {first}" if first == last else f"sequences {first}-{last}"
            echo(f"postseal: {stream.producer} is retained up to {stream.cursor.highest}, {missing} missing", err=True)


async def _follow(database: Database, printer: _Printer) -> None:
    """Print what is new when a hint comes, and every POLL_S without one; an outage is told of once."""
    hinted = asyncio.Event()
    listening = asyncio.create_task(listen(database, lambda _hint: hinted.set()))
    told = False
    try:
        while True:
            hinted.clear()
            try:
                await printer.catch_up()
                told = False
            except Unavailable as error:
                if not told:
                    echo(f"postseal: {error}; going on once it can", err=True)
                told = True
            await asyncio.sleep(GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await hinted.wait()
    finally:
        listening.cancel()
        await asyncio.wait({listening})


async def _streams(
    database: Database, reader: VerifiedIdentity, project: str, producer: str | None
) -> AsyncIterator[Stream]:
    if producer is not None:
        yield await read_stream(database, reader, project, producer)
        return
    page = await read_streams(database, reader, project, after="", limit=PAGE_STREAMS)
    while page:
        for stream in page:
            yield stream
        page = await read_streams(database, reader, project, after=page[-1].producer, limit=PAGE_STREAMS)


async def _pages(
    database: Database, reader: VerifiedIdentity, project: str, stream: Stream, after: int
) -> AsyncIterator[Page]:
    """What stands behind `after`, at least as far as the stream was seen; each page comes nearer to its end."""
    while after < stream.cursor.contiguous:
        page = await read_page(database, reader, project, stream.producer, after=after, limit=PAGE_ENVELOPES)
        yield page
        after = page.next_after


def _print(session: Session, producer: str, item: EnvelopeRow | ClosedRange) -> None:
    if isinstance(item, ClosedRange):
        line: dict[str, Any] = {"from": item.first, "to": item.last, "closed": True}
        words = [f"{item.first}-{item.last}", "closed by the floor"]
    else:
        identity, kind = item.event_identity.hex(), _kind(item.payload)
        line = {"sequence": item.sequence, "acceptedAtMs": item.accepted_at, "eventIdentity": identity}
        line |= {"expired": True} if kind is None else {"kind": kind}
        words = [str(item.sequence), text(item.accepted_at), identity, kind or "expired"]
    if session.as_json:
        print_json({"producer": producer} | line)
    else:
        echo("  ".join([producer, *words]))


def _kind(payload: bytes | None) -> str | None:
    return None if payload is None else msgspec.json.decode(payload, type=_Payload).data.kind

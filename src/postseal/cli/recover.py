"""`postseal recover`: look around after a crash or a restore, and take ended leases back."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

import msgspec
from typer import Option, Typer, echo

from postseal.cli.arguments import parse_time
from postseal.cli.command import Session, command
from postseal.cli.output import Record, print_json, print_table, record, text
from postseal.cli.stream import ranges
from postseal.ending import run_until_asked
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.recovery import Listed
from postseal.postgres.streams import Stream
from postseal.recover import Recovery, recover
from postseal.web.documents import MAX_RANGES_IN_LISTS, of_stream

STREAM_COLUMNS = ("tenant", "project", "producer", "contiguousThrough", "highest", "replayFloor", "missing")

app = Typer()


@command(app, "recover")
def recover_database(
    session: Session,
    *,
    since: Annotated[
        datetime | None,
        Option(
            metavar="TIME",
            parser=parse_time,
            help="List the streams that nobody has written to since then; by default since the last restore.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only look; take no lease back.")] = False,
) -> None:
    """Show what waits and what is missing, and take ended leases back. Nothing is reset."""
    with session.access() as access:
        access.check()
        recovery = run_until_asked(_recover(session, access, since, releases=not dry_run))
    if session.as_json:
        print_json(of_recovery(recovery))
    else:
        print_recovery(recovery)


async def _recover(session: Session, access: Access, since: datetime | None, *, releases: bool) -> Recovery:
    prepare = session.settings.prepared_statements
    async with Database(access.of(Part.DELIVERY), prepare=prepare, size=1) as delivery:
        return await recover(access.of(Part.ADMIN), delivery, session.actor, since=since, releases=releases)


def of_recovery(recovery: Recovery) -> dict[str, Any]:
    """It as a JSON document."""
    return {
        "atMs": recovery.at,
        "sinceMs": recovery.since,
        "released": recovery.released,
        "leases": _of_listed(recovery.leases, map(record, recovery.leases.rows)),
        "deadLetters": _of_listed(recovery.dead_letters, map(record, recovery.dead_letters.rows)),
        "holes": _of_listed(recovery.holes, map(_of_stream, recovery.holes.rows)),
        "quiet": recovery.quiet and _of_listed(recovery.quiet, map(_of_stream, recovery.quiet.rows)),
    }


def _of_listed(listed: Listed[Any], rows: Iterable[Record]) -> dict[str, Any]:
    return {"total": listed.total, "rows": list(rows)}


def _of_stream(stream: Stream) -> dict[str, Any]:
    standing = msgspec.to_builtins(of_stream(stream, most_ranges=MAX_RANGES_IN_LISTS))
    return {"tenant": stream.key.tenant, **standing}


def print_recovery(recovery: Recovery) -> None:
    """What was found, one section after the other."""
    echo(f"released, since their leases had ended: {recovery.released}")
    _print("leases", recovery.leases, ("tenant", "project", "destination", "out", "lastEndsAtMs", "ended", "exhausted"))
    _print("dead letters", recovery.dead_letters, ("tenant", "project", "destination", "code", "number", "lastAtMs"))
    _print_streams("streams with holes", recovery.holes)
    if recovery.quiet is None:
        echo("\nno restore is on record; --since lists the streams that nobody has written to since")
    else:
        _print_streams(f"streams that nobody has written to since {text(recovery.since)}", recovery.quiet)


def _print(title: str, listed: Listed[Any], columns: tuple[str, ...]) -> None:
    _print_rows(title, listed, [record(row) for row in listed.rows], columns)


def _print_streams(title: str, listed: Listed[Stream]) -> None:
    rows = [_of_stream(stream) for stream in listed.rows]
    _print_rows(title, listed, [row | {"missing": ranges(row["missing"])} for row in rows], STREAM_COLUMNS)


def _print_rows(title: str, listed: Listed[Any], rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    echo(f"\n{title}: {listed.total or 'none'}")
    if rows:
        print_table(rows, columns)
    if listed.total > len(rows):
        echo(f"and {listed.total - len(rows)} further ones")

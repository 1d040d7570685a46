"""`postseal sweep`: delete expired payloads until it is stopped, or until nothing has expired any more.

On SIGTERM or SIGINT a batch that is under way comes to its end, where it runs until it is stopped. With `--once` a
signal cuts it off: what it was about to delete is there as before, or gone.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import structlog
import uvloop
from typer import BadParameter, Option, Typer, echo, progressbar

from postseal import logs
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_record, print_table, record
from postseal.ending import ending_asked_by_signals, run_until_asked
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.payloads import Expired
from postseal.retention import Counts, composed_sweep, running_sweep, survey
from postseal.settings import Settings

END_S = 25.0
"""How long the end may take, whatever hangs: longer than the two transactions of a step."""

app = Typer()


@command(app, "sweep")
def sweep(
    session: Session,
    *,
    once: Annotated[bool, Option("--once", help="End when nothing is left to delete.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Tell what has expired and delete nothing.")] = False,
) -> None:
    """Delete expired payloads until it is stopped."""
    if once and dry_run:
        raise BadParameter("say --once or --dry-run, not both")
    if dry_run:
        _print_expired(session, session.run(Part.SWEEP, survey))
        return
    settings = session.settings
    logs.configure(settings.log_level)
    with session.access() as access:
        access.check()
        if once:
            counts = run_until_asked(_once(settings, access), uvloop.run)
            (print_json if session.as_json else print_record)(_document(counts))
            return

        def announce() -> None:
            if session.as_json:
                print_json({"sweeping": True})
            else:
                echo("postseal sweeps")

        uvloop.run(_run(settings, access, announce))
    structlog.get_logger().info("stopped")


async def _once(settings: Settings, access: Access) -> Counts:
    """With a bar on a terminal, whose length is what had expired at the beginning."""
    async with composed_sweep(settings, access) as sweeper:
        if not sys.stderr.isatty():
            return await sweeper.once()
        async with Database(access.of(Part.SWEEP), prepare=settings.prepared_statements, size=1) as database:
            expired = sum(row.expired for row in await survey(database) if not row.held)
        with progressbar(length=expired, label="sweeping", file=sys.stderr) as bar:
            return await sweeper.once(bar.update)


async def _run(settings: Settings, access: Access, ready: Callable[[], None]) -> None:
    with ending_asked_by_signals(END_S) as ending:
        async with running_sweep(settings, access) as sweeper:
            ready()
            await ending.asked.wait()
    structlog.get_logger().info("sweep_stopped", **asdict(sweeper.counts))


def _document(counts: Counts) -> dict[str, Any]:
    return {"swept": counts.swept, "dated": counts.dated}


def _print_expired(session: Session, found: list[Expired]) -> None:
    rows = [record(row) for row in found]
    deleted = sum(row.expired for row in found if not row.held)
    if session.as_json:
        print_json({"toDelete": deleted, "tenants": rows})
    else:
        print_table(rows, ("tenant", "expired", "firstExpiredAtMs", "held"))
        echo(f"{deleted} payloads would be deleted")

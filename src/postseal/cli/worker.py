"""`postseal worker`: seal and deliver until it is stopped, or one turn.

On SIGTERM or SIGINT nothing more is claimed. What is being sent gets `stop_grace_s` to come to its end; what is known
is settled, what was not begun is released. A second signal ends the process at once: leases bring back what it had.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import structlog
import uvloop
from typer import Option, Typer, echo

from postseal import logs
from postseal.cli.command import Session, command
from postseal.cli.failures import fail
from postseal.cli.output import print_json, print_record
from postseal.ending import ending_asked_by_signals, run_until_asked
from postseal.open_files import allow_open_files
from postseal.outbound.cycle import CycleReport
from postseal.outbound.means import Counts
from postseal.postgres.access import Access
from postseal.settings import Settings
from postseal.worker_service import composed_worker, running_worker, worker_files

END_S = 15.0
"""How long the end may take beyond `stop_grace_s`, whatever hangs."""

app = Typer()


@command(app, "worker")
def worker(
    session: Session,
    *,
    once: Annotated[bool, Option("--once", help="Use one tenant's turn, report it and end.")] = False,
) -> None:
    """Seal and deliver until it is stopped."""
    settings = session.settings
    logs.configure(settings.log_level)
    log = structlog.get_logger()
    allow_open_files(worker_files(settings))
    with session.access() as access:
        access.check()
        if once:
            try:
                report = run_until_asked(_once(settings, access), uvloop.run)
            except TimeoutError:
                fail(f"the turn was cut off after {settings.cycle_timeout_s:g} s; what it had is handed back")
            (print_json if session.as_json else print_record)(_document(report))
            return

        def announce() -> None:
            if session.as_json:
                print_json({"delivering": True})
            else:
                echo("postseal delivers")

        uvloop.run(_run(settings, access, announce))
    log.info("stopped")


async def _once(settings: Settings, access: Access) -> CycleReport | None:
    async with composed_worker(settings, access) as delivery:
        return await delivery.once()


async def _run(settings: Settings, access: Access, ready: Callable[[], None]) -> None:
    log = structlog.get_logger()
    with ending_asked_by_signals(settings.stop_grace_s + END_S) as ending:
        async with running_worker(settings, access) as delivery:
            ready()
            await ending.asked.wait()
            log.info("worker_stops", out=delivery.worker.out)
    worker = delivery.worker
    log.info("worker_stopped", turns=worker.turns, **asdict(worker.totals))


def _document(report: CycleReport | None) -> dict[str, Any]:
    counts = asdict(report.counts if report else Counts())
    return {
        "tenant": report.tenant if report else None,
        **counts,
        "seconds": round(report.seconds, 3) if report else 0.0,
    }

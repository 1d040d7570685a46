"""`postseal verify`: prove the database."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from typer import Exit, Option, Typer, echo

from postseal.cli.command import Session, command
from postseal.cli.output import print_json, record
from postseal.ending import run_until_asked
from postseal.verify import MAX_NAMED, Progress, Report, Signatures, no_progress, verify

app = Typer()


@command(app, "verify")
def verify_database(
    session: Session,
    *,
    signatures: Annotated[
        Signatures, Option(help="Verify all signatures, one in a hundred, or none.")
    ] = Signatures.ALL,
) -> None:
    """Prove the database's invariants and name each breach; nothing is changed. Exit code 1 with breaches."""
    with session.access(migrates=False) as access, shown_progress() as progress:
        report = run_until_asked(verify(access.owner, signatures=signatures, progress=progress))
    if session.as_json:
        print_json(of_report(report))
    else:
        print_report(report)
    if not report.holds:
        raise Exit(1)


@contextmanager
def shown_progress() -> Generator[Progress]:
    """A bar on stderr for what is proved, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield no_progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def show(proof: str, done: int, of: int) -> None:
            bars.update(task, description=proof, completed=done, total=of)

        yield show


def of_report(report: Report) -> dict[str, Any]:
    """The report as a JSON document."""
    return {
        "holds": report.holds,
        "atMs": report.at,
        "schemaVersion": report.schema_version,
        "rows": report.rows,
        "signatures": report.signatures,
        "counts": dict(report.counts),
        "breaches": [record(breach) for breach in report.breaches],
    }


def print_report(report: Report) -> None:
    """The breaches, each on one line, or that there are none."""
    for breach in report.breaches:
        echo(str(breach))
    for invariant, count in report.counts.items():
        if count > MAX_NAMED:
            echo(f"{invariant}: {count - MAX_NAMED} more")
    rows = ", ".join(f"{table.replace('_', ' ')} {count}" for table, count in report.rows.items())
    if report.holds:
        echo(f"all invariants hold: {rows}; signatures verified {report.signatures}")
    else:
        echo(f"{report.counts.total()} breaches of {len(report.counts)} invariants")

"""`postseal audit`: list."""

from typing import Annotated, Any

from typer import BadParameter, Option, Typer

from postseal.admin import audit
from postseal.cli.arguments import Since, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_table, record
from postseal.outcomes import Outcome, Reason
from postseal.postgres.audit import MAX_PAGE_ROWS, AuditFilter

DEFAULT_ROWS = 100

COLUMNS = ("id", "atMs", "account", "device", "project", "action", "outcome", "reason", "occurrences", "about")

app = Typer()


OUTCOMES = (*Outcome, "refused", "done")


def parse_outcome(text: str) -> str:
    """One of the outcomes that the trail knows."""
    if text not in OUTCOMES:
        raise BadParameter(f"there are these outcomes: {', '.join(OUTCOMES)}")
    return text


def parse_reason(text: str) -> str:
    """One of the stable reasons."""
    if text not in set(Reason):
        raise BadParameter(f"there are these reasons: {', '.join(Reason)}")
    return text


@command(app, "list")
def list_page(
    session: Session,
    tenant: TenantName,
    *,
    project: Annotated[str | None, Option(metavar="PROJECT", help="Only of this project.")] = None,
    outcome: Annotated[
        str | None, Option(metavar="WORD", parser=parse_outcome, help=f"Only with this outcome: {', '.join(OUTCOMES)}.")
    ] = None,
    reason: Annotated[
        str | None,
        Option(metavar="WORD", parser=parse_reason, help="Only with this reason, a word of docs/reasons.md."),
    ] = None,
    since: Since = None,
    before: Annotated[int | None, Option(metavar="ID", help="The events before this one.")] = None,
    after: Annotated[int | None, Option(metavar="ID", help="The events behind this one.")] = None,
    limit: Annotated[int, Option(min=1, max=MAX_PAGE_ROWS, help="How many at most.")] = DEFAULT_ROWS,
) -> None:
    """Show a tenant's audit trail, the newest last."""
    if before is not None and after is not None:
        raise BadParameter("give --before or --after, not both")
    wanted = AuditFilter(project=project, reason=reason, outcome=outcome, since=since)
    events = session.transact(
        lambda connection: audit.page(connection, tenant, wanted, rows=limit, before=before, after=after)
    )
    rows = [record(event) for event in events]
    if session.as_json:
        print_json({"tenant": tenant, "events": rows})
    else:
        print_table([row | {"about": _about(row)} for row in rows], COLUMNS)


def _about(row: dict[str, Any]) -> object:
    """What an event is about: an envelope's identity, or an act's details."""
    return row["eventIdentity"] or row["detail"]

"""`postseal intent`: list."""

from typing import Annotated

from typer import Option, Typer

from postseal.admin import deliveries
from postseal.cli.arguments import ProjectName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_table, record

MAX_INTENTS = 1_000
"""Of one list."""
COLUMNS = ("delivery", "destination", "code", "tries", "createdAtMs", "dueAtMs")

app = Typer()


@command(app, "list")
def list_unsealed(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    *,
    code: Annotated[str | None, Option("--code", metavar="CODE", help="Only with this code.")] = None,
    limit: Annotated[int, Option(min=1, max=MAX_INTENTS, help="How many at most.")] = 100,
) -> None:
    """Show the intents of a project that are not sealed, oldest first. What has no time any more is given up."""
    found = session.transact(
        lambda connection: deliveries.list_intents(connection, tenant, project, code=code, limit=limit)
    )
    rows = [record(row) for row in found]
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "intents": rows})
    else:
        print_table(rows, COLUMNS)

"""`postseal hold`: place, release, list."""

from typing import Annotated

from typer import Argument, Option, Typer, echo

from postseal.admin import holds
from postseal.cli.arguments import TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_table, record

HoldName = Annotated[str, Argument(metavar="HOLD", help="The hold's name, an id.", show_default=False)]
Why = Annotated[str, Option("--reason", metavar="TEXT", help="Why, for the audit trail.", show_default=False)]

app = Typer()


@command(app, "place")
def place(session: Session, tenant: TenantName, hold: HoldName, *, reason: Why) -> None:
    """Keep all payloads of a tenant until the hold is released."""
    session.transact(lambda connection: holds.place(connection, session.actor, tenant, hold, reason=reason))
    if session.as_json:
        print_json({"tenant": tenant, "hold": hold})
    else:
        echo(f"payloads of tenant {tenant} are held by {hold}")


@command(app, "release")
def release(session: Session, tenant: TenantName, hold: HoldName, *, reason: Why) -> None:
    """Let payloads be deleted again. Another hold of the tenant still keeps them."""
    session.transact(lambda connection: holds.release(connection, session.actor, tenant, hold, reason=reason))
    if session.as_json:
        print_json({"tenant": tenant, "hold": hold})
    else:
        echo(f"hold {hold} of tenant {tenant} released")


@command(app, "list")
def list_all(
    session: Session,
    tenant: Annotated[str | None, Argument(metavar="TENANT", help="Only of this tenant.", show_default=False)] = None,
) -> None:
    """Show the holds of a tenant, or of all."""
    rows = [record(row) for row in session.transact(lambda connection: holds.list_of(connection, tenant))]
    if session.as_json:
        print_json({"holds": rows})
    else:
        print_table(rows, ("tenant", "hold", "account", "placedAtMs", "reason"))

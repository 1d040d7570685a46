"""`postseal tenant`: create, list."""

from typer import Typer, echo

from postseal.admin import tenants
from postseal.cli.arguments import TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_table, record

app = Typer()


@command(app, "create")
def create(session: Session, tenant: TenantName) -> None:
    """Make a tenant."""
    session.transact(lambda connection: tenants.create(connection, session.actor, tenant))
    if session.as_json:
        print_json({"tenant": tenant})
    else:
        echo(f"tenant {tenant} made")


@command(app, "list")
def list_all(session: Session) -> None:
    """Show all tenants."""
    rows = [record(row) for row in session.transact(tenants.list_all)]
    if session.as_json:
        print_json({"tenants": rows})
    else:
        print_table(rows, ("tenant", "createdAtMs"))

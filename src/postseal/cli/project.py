"""`postseal project`: create, list."""

from typer import Typer, echo

from postseal.admin import tenants
from postseal.cli.arguments import ProjectName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_table, record

app = Typer()


@command(app, "create")
def create(session: Session, tenant: TenantName, project: ProjectName) -> None:
    """Make a project of a tenant."""
    session.transact(lambda connection: tenants.create_project(connection, session.actor, tenant, project))
    if session.as_json:
        print_json({"tenant": tenant, "project": project})
    else:
        echo(f"project {project} of tenant {tenant} made")


@command(app, "list")
def list_all(session: Session, tenant: TenantName) -> None:
    """Show the projects of a tenant."""
    found = session.transact(lambda connection: tenants.list_projects(connection, tenant))
    rows = [record(row) for row in found]
    if session.as_json:
        print_json({"tenant": tenant, "projects": rows})
    else:
        print_table(rows, ("project", "createdAtMs"))

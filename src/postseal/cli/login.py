"""`postseal login`: allow, list, disallow."""

from typing import Annotated

from typer import Argument, Typer, echo

from postseal.admin import logins
from postseal.cli.arguments import ProjectNames, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_table, record

LoginName = Annotated[
    str, Argument(metavar="LOGIN", help="A database role, a member of the role enqueue.", show_default=False)
]

app = Typer()


@command(app, "allow")
def allow(session: Session, tenant: TenantName, login: LoginName, project: ProjectNames) -> None:
    """Let a database login leave intents for these projects. It may for no others."""
    projects = session.transact(
        lambda connection: logins.allow(connection, session.actor, tenant, login, projects=project)
    )
    if session.as_json:
        print_json({"tenant": tenant, "login": login, "projects": projects})
    else:
        echo(f"login {login} may leave intents for {', '.join(projects)} of tenant {tenant}")


@command(app, "list")
def list_all(session: Session, tenant: TenantName) -> None:
    """Show the database logins that may leave intents for a tenant."""
    found = session.transact(lambda connection: logins.list_of_tenant(connection, tenant))
    rows = [record(row) for row in found]
    if session.as_json:
        print_json({"tenant": tenant, "logins": rows})
    else:
        print_table(rows, ("login", "projects"))


@command(app, "disallow")
def disallow(session: Session, tenant: TenantName, login: LoginName) -> None:
    """Let a database login leave nothing more for a tenant."""
    session.transact(lambda connection: logins.disallow(connection, session.actor, tenant, login))
    if session.as_json:
        print_json({"tenant": tenant, "login": login})
    else:
        echo(f"login {login} may leave nothing more for tenant {tenant}")

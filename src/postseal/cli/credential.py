"""`postseal credential`: create, list, revoke."""

from typing import Annotated, Literal

from typer import Argument, Option, Typer, echo

from postseal.admin import credentials
from postseal.cli.arguments import ProjectNames, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_record, print_table, record
from postseal.identity.verified import Role

app = Typer()


@command(app, "create")
def create(
    session: Session,
    tenant: TenantName,
    project: ProjectNames,
    role: Annotated[Literal["consumer", "sender", "operator"], Option(help="What it is for.", show_default=False)],
    *,
    account: Annotated[str | None, Option(metavar="ACCOUNT", help="Whom the audit names; by default the role.")] = None,
) -> None:
    """Make a credential; it is shown this once."""
    issued = session.transact(
        lambda connection: credentials.create(
            connection,
            session.actor,
            tenant,
            role=Role(role),
            projects=project,
            lifetime_s=session.settings.credential_lifetime_s,
            account=account,
        )
    )
    if session.as_json:
        print_json(record(issued))
    else:
        print_record(record(issued))


@command(app, "list")
def list_all(session: Session, tenant: TenantName) -> None:
    """Show the credentials of a tenant, devices' included."""
    found = session.transact(lambda connection: credentials.list_of_tenant(connection, tenant))
    rows = [record(row) for row in found]
    if session.as_json:
        print_json({"tenant": tenant, "credentials": rows})
    else:
        columns = ("credentialId", "role", "account", "device", "projects", "state", "createdAtMs", "expiresAtMs")
        print_table(rows, columns)


@command(app, "revoke")
def revoke(
    session: Session,
    tenant: TenantName,
    credential_id: Annotated[str, Argument(metavar="ID", help="Its id.", show_default=False)],
) -> None:
    """Revoke a credential; a running service notices within seconds."""
    session.transact(lambda connection: credentials.revoke(connection, session.actor, tenant, credential_id))
    if session.as_json:
        print_json({"tenant": tenant, "credentialId": credential_id})
    else:
        echo("credential revoked")

"""`postseal retention`: show, set."""

from typing import Annotated

from typer import BadParameter, Option, Typer, echo

from postseal.admin import retention
from postseal.cli.arguments import TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_table
from postseal.settings import MAX_RETENTION_DAYS

app = Typer()


@command(app, "show")
def show(session: Session, tenant: TenantName) -> None:
    """Show for how many days payloads are kept. That is by tenant, and by project."""
    rows = session.transact(lambda connection: retention.show(connection, tenant))
    of_tenant, default = rows[0].days, session.settings.payload_retention_days
    projects = [{"project": row.project, "days": row.days} for row in rows[1:]]
    if session.as_json:
        print_json({"tenant": tenant, "days": of_tenant, "defaultDays": default, "projects": projects})
        return
    kept = default if of_tenant is None else of_tenant
    echo(f"tenant {tenant}: {kept} days{' (the default)' if of_tenant is None else ''}")
    if projects:
        days = [kept if row["days"] is None else row["days"] for row in projects]
        of = ["tenant" if row["days"] is None else "project" for row in projects]
        lines = [{**row, "days": n, "setBy": who} for row, n, who in zip(projects, days, of, strict=True)]
        print_table(lines, ("project", "days", "setBy"))


@command(app, "set")
def change(
    session: Session,
    tenant: TenantName,
    *,
    project: Annotated[str | None, Option(metavar="PROJECT", help="Only for this project.", show_default=False)] = None,
    days: Annotated[
        int | None, Option(min=1, max=MAX_RETENTION_DAYS, help="Days that payloads are kept.", show_default=False)
    ] = None,
    default: Annotated[bool, Option("--default", help="Take the own setting away.")] = False,
) -> None:
    """Set for how many days payloads are kept. It counts for what comes from now on."""
    if (days is None) != default:
        raise BadParameter("say either --days or --default")
    session.transact(lambda connection: retention.change(connection, session.actor, tenant, project, days))
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "days": days})
    else:
        kept = "as long as by default" if days is None else f"{days} days"
        echo(f"new payloads of {f'project {project} of ' if project else ''}tenant {tenant} are kept {kept}")

"""`postseal migrate`: bring the database up to date."""

from typing import Annotated

from typer import Option, Typer, echo

from postseal.cli.command import Session, command
from postseal.cli.output import print_json
from postseal.postgres.access import Access, connect_at_startup
from postseal.postgres.home import home_of, make_data_folder
from postseal.postgres.migrate import Migration, pending
from postseal.senders.secrets import load_deployment_key
from postseal.settings import Settings
from postseal.worker_service import deployment_key_file

app = Typer()


@command(app, "migrate")
def migrate(
    session: Session,
    *,
    plan: Annotated[bool, Option("--plan", help="Only show what would be applied.")] = False,
    new_passwords: Annotated[
        bool, Option("--new-passwords", help="Give the service's roles new passwords; the old ones end at once.")
    ] = False,
) -> None:
    """Bring the database up to date, as its owner; an embedded one is whenever it is opened."""
    with session.access() as access:
        migrations = _pending(access) if plan else _apply(session.settings, access, new_passwords=new_passwords)
    if session.as_json:
        print_json({"pending" if plan else "applied": [migration.name for migration in migrations]})
        return
    for migration in migrations:
        echo(f"{'would apply' if plan else 'applied'} {migration.name}")
    if not migrations:
        echo("the database is up to date")


def _pending(access: Access) -> list[Migration]:
    with connect_at_startup(access.owner) as connection:
        return pending(connection)


def _apply(settings: Settings, access: Access, *, new_passwords: bool) -> list[Migration]:
    """What was applied. The files that only this deployment has are made with it, where they are missing."""
    make_data_folder(home_of(settings))
    for file in (access.passfile, deployment_key_file(settings)):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    applied = access.migrate(new_passwords=new_passwords)
    # After it: where the roles are another machine's, the deployment has its key there.
    load_deployment_key(deployment_key_file(settings), make=True)
    return applied

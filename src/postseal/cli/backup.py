"""`postseal backup`: write an archive of the database while the service runs."""

from pathlib import Path
from typing import Annotated

from typer import Option, Typer, echo

from postseal.backup import back_up
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_record
from postseal.postgres.access import Access
from postseal.postgres.home import Home, home_of
from postseal.settings import Settings
from postseal.signing.pem_folder import folder_of
from postseal.worker_service import deployment_key_file

MAX_JOBS = 64

app = Typer()


@command(app, "backup")
def backup(
    session: Session,
    *,
    to: Annotated[Path, Option(metavar="FOLDER", help="The archive: a folder that is not there yet.")],
    jobs: Annotated[int, Option(min=1, max=MAX_JOBS, help="Tables that are read at once.")] = 2,
) -> None:
    """Write an archive of the database while the service runs; secrets in files are not in it."""
    archive = to.expanduser().absolute()
    # As it is: a backup comes before a migration.
    with session.access(migrates=False) as access:
        manifest = back_up(access, archive, jobs=jobs)
        apart = _kept_apart(session.settings, access)
    if session.as_json:
        print_json(
            {
                "archive": str(archive),
                "takenAtMs": manifest.taken_at_ms,
                "schemaVersion": manifest.schema_version,
                "sizeBytes": manifest.size_bytes,
                "rows": manifest.rows,
                "notIncluded": apart,
            }
        )
        return
    print_record(
        {
            "archive": archive,
            "takenAt": manifest.taken_at,
            "schemaVersion": manifest.schema_version,
            "sizeBytes": manifest.size_bytes,
            "rows": sum(manifest.rows.values()),
        }
    )
    echo("not in it, so keep copies of them elsewhere:")
    print_record(apart)


def _kept_apart(settings: Settings, access: Access) -> dict[str, str]:
    """The files without which a restored database is of little use, and which no archive should lie beside."""
    files = {
        "deploymentKeyFile": deployment_key_file(settings),
        "signingKeysDir": folder_of(settings),
        "rolesFile": access.passfile,
    }
    if settings.database_url is None:
        files["superuserFile"] = Home(home_of(settings)).passfile
    if settings.kinds_dir is not None:
        files["kindsDir"] = Path(settings.kinds_dir)
    return {name: str(file) for name, file in files.items()}

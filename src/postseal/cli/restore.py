"""`postseal restore`: make a database of an archive."""

from pathlib import Path
from typing import Annotated

from typer import Option, Typer, echo

from postseal.cli.backup import MAX_JOBS
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_record
from postseal.restore import restore as restore_archive

app = Typer()


@command(app, "restore")
def restore(
    session: Session,
    *,
    archive: Annotated[Path, Option("--from", metavar="FOLDER", help="The archive that `backup` wrote.")],
    jobs: Annotated[int, Option(min=1, max=MAX_JOBS, help="Tables that are written at once.")] = 2,
) -> None:
    """Restore an archive into an empty database, and verify it; all of it or nothing."""
    with session.access() as access:
        restored = restore_archive(access, archive.expanduser().absolute(), session.actor, jobs=jobs)
    manifest = restored.manifest
    if session.as_json:
        print_json(
            {
                "database": restored.database,
                "takenAtMs": manifest.taken_at_ms,
                "schemaVersion": manifest.schema_version,
                "rows": manifest.rows,
                "missingLogins": restored.missing_logins,
            }
        )
        return
    print_record(
        {
            "database": restored.database,
            "takenAt": manifest.taken_at,
            "schemaVersion": manifest.schema_version,
            "rows": sum(manifest.rows.values()),
            "missingLogins": restored.missing_logins,
        }
    )
    echo("what was written after that time is not in it: `postseal recover` shows what waits and what is missing")

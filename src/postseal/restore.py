"""Restore: an archive becomes a database, as a whole or not at all.

1. the archive: whole, unchanged, of this release's schema and this deployment's role prefix
2. the target: empty; what an earlier run left is cleared away
3. the roles, whose passwords are those of the roles file, or new ones
4. a scratch database, into which pg_restore writes with several connections
5. as many rows as the manifest says, and the audit ends where it did; then an act in the platform's trail, from which
   on the database goes its own way
6. `verify` finds no breach
7. the scratch database gets the target's name, and what had it, empty, is dropped

Until 7 the target is as it was, whatever happens; after it, all of the archive is in it.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import to_builtins

from postseal.admin.actor import Actor
from postseal.archive import DUMP, Manifest, read_manifest, require_whole
from postseal.ending import run_until_asked
from postseal.errors import ArchiveError
from postseal.postgres.access import Access, connect_at_startup
from postseal.postgres.binaries import FOLDER_VARIABLE, Binaries, find_client_programs
from postseal.postgres.database import Database
from postseal.postgres.migrate import make_roles, migrations
from postseal.postgres.programs import running
from postseal.postgres.recovery import RESTORED
from postseal.postgres.scratch import (
    analyze,
    clear_left_over,
    missing_logins,
    place_of_restore,
    replace_target,
    scratch_database,
    what_it_holds,
)
from postseal.postgres.snapshot import audit_heads, count_rows, server_major
from postseal.verify import verify

TIMEOUT_MAJOR = 17
"""From this version on pg_restore sets transaction_timeout, which older servers do not know."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, and where."""

    manifest: Manifest
    database: str
    missing_logins: list[str]
    """Logins of applications that may leave intents, and that this server does not have."""


def restore(access: Access, archive: Path, actor: Actor, *, jobs: int) -> Restored:
    """Restore an archive into the empty database of `access`.

    Raises ArchiveError and StartupError with one line, psycopg.Error where the owner's user may not do what is needed,
    and OSError; then the database is as it was.
    """
    manifest = read_manifest(archive)
    _require_ours(archive, manifest, access.prefix)
    require_whole(archive, manifest)
    with place_of_restore(access) as place:
        clear_left_over(place)
        holds = what_it_holds(place, place.target)
        if holds is not None:
            raise ArchiveError(f"the database {place.target} is not empty, it holds {holds}: restore into a new one")
        programs = _programs(server_major(place.maintenance), manifest)
        make_roles(place.maintenance, access.prefix, access.passfile, ours_alone=access.disk is not None)
        with scratch_database(place) as scratch:
            arguments = ["--format=directory", f"--jobs={jobs}", "--exit-on-error", "--no-owner", "--no-tablespaces"]
            with running(programs, "pg_restore", [*arguments, archive / DUMP], scratch) as program:
                program.finish()
            missing = _require_same(scratch, manifest)
            run_until_asked(_mark_and_prove(scratch, manifest, actor))
            replace_target(place)
    return Restored(manifest, place.target, missing)


def _require_ours(archive: Path, manifest: Manifest, prefix: str) -> None:
    """Raise ArchiveError unless this release, and this deployment's roles, can be what the archive is for."""
    ours, theirs = migrations()[-1].version, manifest.schema_version
    if theirs < ours:
        raise ArchiveError(
            f"{archive} has schema version {theirs}, older than this release's {ours}: restore it with postseal "
            f"{manifest.postseal_version}, and migrate then"
        )
    if theirs > ours:
        raise ArchiveError(f"{archive} has schema version {theirs}, newer than this release's {ours}: upgrade postseal")
    if manifest.role_prefix != prefix:
        raise ArchiveError(
            f"{archive} has grants to roles with the prefix {manifest.role_prefix}: set role_prefix to that"
        )


def _programs(target_major: int, manifest: Manifest) -> Binaries:
    """What reads the archive and speaks with the target's server. Raises ArchiveError and StartupError."""
    if manifest.programs_major > target_major:
        raise ArchiveError(
            f"the archive was written by pg_dump {manifest.programs_version} and the server has version "
            f"{target_major}: restore it into version {manifest.programs_major} or newer"
        )
    programs = find_client_programs(target_major)
    if target_major < TIMEOUT_MAJOR <= programs.major:
        raise ArchiveError(
            f"pg_restore {programs.version} does not restore into a server of version {target_major}: install "
            f"postgresql-client-{target_major}, or set {FOLDER_VARIABLE} to its bin folder"
        )
    return programs


def _require_same(scratch: str, manifest: Manifest) -> list[str]:
    """Raise ArchiveError unless what was restored is what the snapshot had; returns the logins that are missing."""
    with connect_at_startup(scratch) as connection:
        rows = count_rows(connection)
        for table in sorted(rows.keys() | manifest.rows):
            if rows.get(table) != manifest.rows.get(table):
                raise ArchiveError(
                    f"{rows.get(table, 'no')} rows of {table} were restored, the manifest says "
                    f"{manifest.rows.get(table, 'none')}"
                )
        if audit_heads(connection) != (manifest.audit_head, manifest.platform_audit_head):
            raise ArchiveError("the audit that was restored ends elsewhere than the manifest says")
        analyze(connection)
        return missing_logins(connection)


async def _mark_and_prove(scratch: str, manifest: Manifest, actor: Actor) -> None:
    detail = {
        "takenAtMs": manifest.taken_at_ms,
        "postsealVersion": manifest.postseal_version,
        "auditHead": to_builtins(manifest.audit_head),
    }
    async with Database(scratch, prepare=False, size=1) as database:
        await database.transact(partial(actor.acted_on_platform, action=RESTORED, **detail))
    report = await verify(scratch)
    if not report.holds:
        raise ArchiveError(f"what was restored has {report.counts.total()} breaches, first: {report.breaches[0]}")

"""Whatever hinders a command is one line that says what to do, exit code 1, and repeats no secret."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from ran import Cli

from fleet import as_owner
from postseal.postgres.access import Access
from postseal.postgres.postmaster import MAX_CONNECTIONS
from postseal.service import connections_a_process
from postseal.settings import Settings

CANARY = "c4nary-pa55word"


def no_server(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """Nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environment.setenv("POSTSEAL_DATABASE_URL", f"postgresql://u:{CANARY}@127.0.0.1:{port}/d")
    return "cannot reach the database: .*refused"


def no_database(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """The server has no such database."""
    environment.setenv("POSTSEAL_DATABASE_URL", make_conninfo(access.owner, dbname="nope"))
    return 'cannot reach the database: .*"nope" does not exist'


def wrong_password(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """The roles' file holds another password."""
    file = folder / "roles.pgpass"
    file.write_text("".join(f"*:*:*:postseal_{part}:{CANARY}\n" for part in ("ingest", "admin")))
    file.chmod(0o600)
    environment.setenv("POSTSEAL_ROLES_FILE", str(file))
    return "cannot reach the database: .*password authentication failed for user .postseal_admin."


def malformed_url(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """No URL that libpq could read."""
    environment.setenv("POSTSEAL_DATABASE_URL", f"postgresql://u:{CANARY}@[host/d")
    return r"the database URL cannot be read; write postgresql://user@host/name"


def no_roles(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """Nothing was migrated from here."""
    environment.setenv("POSTSEAL_ROLES_FILE", str(folder / "none.pgpass"))
    return "none.pgpass has no passwords of the service's roles: run `postseal migrate`"


def older_schema(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A migration is missing."""
    with as_owner(access) as owner:
        owner.execute("DELETE FROM schema_migrations")
    return "the database's schema is older than this release: run `postseal migrate`"


def newer_schema(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A later release was here."""
    with as_owner(access) as owner:
        owner.execute("INSERT INTO schema_migrations VALUES (9999, 'later')")
    return "the database's schema has version 9999, newer than .*: upgrade postseal"


def not_durable(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """Commits can be lost."""
    database = sql.Identifier(str(conninfo_to_dict(access.owner)["dbname"]))
    with as_owner(access) as owner:
        owner.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(database))
    return "PostgreSQL runs with synchronous_commit off, so commits can be lost: turn it on"


def not_durable_for_a_part(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """The role that commits envelopes has a setting of its own."""
    database = sql.Identifier(str(conninfo_to_dict(access.owner)["dbname"]))
    role = sql.Identifier(f"{access.prefix}_ingest")
    with as_owner(access) as owner:
        owner.execute(sql.SQL("ALTER ROLE {} IN DATABASE {} SET synchronous_commit = off").format(role, database))
    return "PostgreSQL runs with synchronous_commit off, so commits can be lost: turn it on"


def bad_setting(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A number where none can stand."""
    environment.setenv("POSTSEAL_WINDOW", CANARY)
    return "setting window is not valid: Expected `int`"


def turns_too_short(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """Pushes that take as long as they may would all be cut off."""
    environment.setenv("POSTSEAL_CYCLE_TIMEOUT_S", str(Settings().send_timeout_s))
    return "setting cycle_timeout_s is not valid: it must be more than send_timeout_s"


def nobodys_folder(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A path below the home folder of nobody here."""
    environment.setenv("POSTSEAL_KINDS_DIR", "~no-such-user/kinds")
    return "setting kinds_dir is not valid: there is no home folder for its `~`"


def unknown_setting(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A member of the file that there is not."""
    file = folder / "postseal.toml"
    file.write_text(f'databaseurl = "{CANARY}"\n')
    environment.setenv("POSTSEAL_CONFIG", str(file))
    return "there is no setting 'databaseurl'"


def misspelt_variable(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A variable that would be a setting but for a letter."""
    environment.setenv("POSTSEAL_DATABSE_URL", CANARY)
    return "the variable POSTSEAL_DATABSE_URL is no setting: mend its name, or take it out"


def no_settings_file(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A file that is not there."""
    environment.setenv("POSTSEAL_CONFIG", str(folder / "none.toml"))
    return "cannot read the settings file .*none.toml: No such file or directory"


def no_toml(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A file of another kind."""
    file = folder / "postseal.toml"
    file.write_text(f"password {CANARY}")
    environment.setenv("POSTSEAL_CONFIG", str(file))
    return "the settings file .*postseal.toml is not valid TOML"


def no_folder(access: Access, environment: pytest.MonkeyPatch, folder: Path) -> str:
    """A folder where a file is in the way."""
    environment.delenv("POSTSEAL_DATABASE_URL")
    (folder / "file").write_text("")
    environment.setenv("POSTSEAL_DATA_DIR", str(folder / "file" / "home"))
    return "cannot use .*/file/home: .*choose another --data-dir"


Hindrance = Callable[[Access, pytest.MonkeyPatch, Path], str]
HINDRANCES = [
    no_server,
    no_database,
    wrong_password,
    malformed_url,
    no_roles,
    older_schema,
    newer_schema,
    not_durable,
    not_durable_for_a_part,
    bad_setting,
    turns_too_short,
    nobodys_folder,
    unknown_setting,
    misspelt_variable,
    no_settings_file,
    no_toml,
    no_folder,
]


@pytest.mark.parametrize("arguments", [("tenant", "list"), ("serve", "--port", "0")], ids=["tenant list", "serve"])
@pytest.mark.parametrize("hindrance", HINDRANCES, ids=lambda hindrance: hindrance.__name__)
def test_a_start_that_fails_is_one_clear_line(
    on_database: Cli,
    access: Access,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hindrance: Hindrance,
    arguments: tuple[str, ...],
) -> None:
    """Commands and the service alike; no password is repeated, whatever holds it."""
    line = hindrance(access, monkeypatch, tmp_path)
    monkeypatch.setenv("POSTSEAL_LOG_LEVEL", "error")
    ran = on_database(*arguments)
    assert CANARY not in ran.out + ran.err
    assert re.search(line, ran.why)


def test_a_port_that_is_taken_is_told(on_database: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its number, before anything is started."""
    monkeypatch.setenv("POSTSEAL_LOG_LEVEL", "error")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        why = on_database("serve", "--port", port).why
    assert why.startswith(f"postseal: cannot listen on 127.0.0.1 port {port}: Address already in use")


def test_more_processes_than_the_embedded_database_has_connections_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Told before anything is started; as many as it says do fit."""
    monkeypatch.setenv("POSTSEAL_DATA_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("POSTSEAL_LOG_LEVEL", "error")
    why = cli("serve", "--port", "0", "--processes", 64).why
    found = re.search(r"has connections for (\d+) processes with commit_lanes 1", why)
    assert found
    assert int(found[1]) * connections_a_process(Settings()) < MAX_CONNECTIONS
    assert not (tmp_path / "home").exists()


def test_a_password_in_the_url_that_is_wrong_is_not_repeated(cli: Cli, access: Access) -> None:
    """Migrate connects as the owner of the URL."""
    url = make_conninfo(access.owner, password=CANARY)
    ran = cli("migrate", "--database-url", url)
    assert "password authentication failed" in ran.why
    assert CANARY not in ran.err


def test_a_database_that_blocks_is_told(on_database: Cli, access: Access) -> None:
    """What cannot have its lock in time fails with the word that nothing is known to be done."""
    on_database("tenant", "create", "acme")
    with as_owner(access) as owner, owner.transaction():
        owner.execute("LOCK TABLE projects")
        assert "nothing is known to be done" in on_database("project", "create", "acme", "apollo").why


def test_an_error_of_the_database_is_told_without_its_rows(on_database: Cli, access: Access) -> None:
    """The primary message alone: details quote whole rows."""
    with as_owner(access) as owner:
        owner.execute("ALTER TABLE tenants ADD CONSTRAINT forbidden CHECK (tenant <> 'acme')")
    why = on_database("tenant", "create", "acme").why
    assert "the database refused" in why
    assert "forbidden" in why
    assert "Failing row" not in why


@pytest.mark.parametrize(
    "arguments",
    [
        ("tenant", "create"),
        ("tenant", "destroy", "acme"),
        ("nonsense",),
        ("tenant", "list", "--yaml"),
        ("device", "invite", "acme", "d1"),
        ("credential", "create", "acme", "--role", "king", "--project", "p"),
        ("stream", "raise-floor", "acme", "p", "d1", "0", "--reason", "x"),
        ("serve", "--port", "70000"),
    ],
)
def test_wrong_usage_is_exit_code_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    """With a hint at --help on stderr and nothing on stdout; no database is looked for."""
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "--help" in ran.err

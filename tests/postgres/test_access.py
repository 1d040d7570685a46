"""How the parts reach the database, whatever the environment tells libpq and wherever the files lie."""

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import structlog
from holders import own_folder
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postseal.errors import StartupError
from postseal.postgres.access import Access, open_access
from postseal.postgres.home import home_of
from postseal.settings import PATHS, Settings, load_settings
from postseal.signing.pem_folder import folder_of
from postseal.worker_service import deployment_key_file

LOG = structlog.wrap_logger(structlog.ReturnLogger())
OF_ANOTHER_SERVER = {
    "PGPASSWORD": "made-up-secret",
    "PGHOSTADDR": "127.0.0.1",
    "PGSERVICE": "nowhere",
    "PGOPTIONS": "-c search_path=nowhere",
    "PGCHANNELBINDING": "require",
    "PGTZ": "Nowhere/At_All",
}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """One folder, with the home of an embedded database in it."""
    with own_folder() as folder:
        yield folder


@pytest.fixture
def settings(place: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of an embedded database below the user's home folder."""
    monkeypatch.setenv("HOME", str(place))
    return load_settings({"POSTSEAL_DATA_DIR": "~/home", "POSTSEAL_BALLAST_MB": "0", "POSTSEAL_MIN_FREE_DISK_MB": "0"})


def test_a_data_folder_below_the_users_own(settings: Settings, place: Path):
    """`~` is the user's home folder for everything that lies in the data folder."""
    home = place / "home"
    with open_access(settings, log=LOG) as access:
        access.check()
        assert access.passfile == home / "roles.pgpass"
        assert access.passfile.exists()
    found = (home_of(Settings(data_dir="~/home")), folder_of(settings), deployment_key_file(settings))
    assert found == (home, home / "signing", home / "deployment.key")


def test_the_embedded_database_is_reached_whatever_libpq_is_told(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    """Variables that mean another server count neither for the owner nor for a part; what only looks alike stays."""
    for name, value in (OF_ANOTHER_SERVER | {"PGP_KEY": "kept"}).items():
        monkeypatch.setenv(name, value)
    with open_access(settings, log=LOG) as access:
        access.check()
        with psycopg.connect(access.owner) as owner:
            assert owner.execute("SHOW search_path").fetchone() == ('"$user", public',)
    assert not OF_ANOTHER_SERVER.keys() & os.environ.keys()
    assert os.environ["PGP_KEY"] == "kept"


def test_the_embedded_database_makes_a_lost_roles_file_anew(settings: Settings):
    """Its roles are nobody else's, so it goes on by itself; a file that is there stays as it is."""
    with open_access(settings, log=LOG) as access:
        access.passfile.unlink()
    with open_access(settings, log=LOG) as access:
        access.check()
        made = access.passfile.read_bytes()
    with open_access(settings, log=LOG) as access:
        assert access.passfile.read_bytes() == made


def test_roles_have_their_passwords_from_their_file_alone(access: Access, monkeypatch: pytest.MonkeyPatch):
    """PGPASSWORD, which libpq prefers to a passfile, is for the user of the URL and for nobody else."""
    passfile = Path(str(conninfo_to_dict(access.owner)["passfile"]))
    monkeypatch.setenv("PGPASSWORD", passfile.read_text().strip().rpartition(":")[2])
    url = make_conninfo(access.owner, passfile="")
    with open_access(Settings(database_url=url, roles_file=str(access.passfile)), log=LOG) as reached:
        reached.check()
        with psycopg.connect(reached.owner) as owner:
            assert owner.execute("SELECT current_user").fetchone() == ("postgres",)


@pytest.mark.parametrize("name", sorted(PATHS))
def test_paths_below_a_home_folder(name: str):
    """`~` stands for it in every setting that names a file or a folder, and one that nobody has is told."""
    variable = f"POSTSEAL_{name.upper()}"
    assert getattr(load_settings({variable: "~/there"}), name) == str(Path.home() / "there")
    assert getattr(load_settings({variable: "there/~"}), name) == "there/~"
    with pytest.raises(StartupError, match=rf"\Asetting {name} is not valid: [^\n]*\Z"):
        load_settings({variable: "~no-such-user/there"})

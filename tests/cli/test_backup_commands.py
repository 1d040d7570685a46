"""`postseal backup` and `postseal restore`: what they print, and how they fail."""

from pathlib import Path
from uuid import uuid4

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from ran import Cli

from fleet import as_owner, enrol
from postseal.postgres.access import Access
from postseal.postgres.migrate import migrations

VERSION = migrations()[-1].version


def test_there_and_back(on_database: Cli, access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tell what they did, for people and for programs; the backup names the secrets that it leaves out."""
    enrol(access)
    monkeypatch.setenv("POSTSEAL_DATA_DIR", str(tmp_path / "data"))
    first = on_database("backup", "--to", tmp_path / "first").text.splitlines()
    assert [line.split()[0] for line in first[:5]] == ["archive", "takenAt", "schemaVersion", "sizeBytes", "rows"]
    assert first[5:] == [
        "not in it, so keep copies of them elsewhere:",
        f"deploymentKeyFile  {tmp_path}/data/deployment.key",
        f"signingKeysDir     {tmp_path}/data/signing",
        f"rolesFile          {access.passfile}",
    ]
    told = on_database("backup", "--to", tmp_path / "second", "--jobs", 1, "--json").document
    assert (told["archive"], told["schemaVersion"]) == (str(tmp_path / "second"), VERSION)
    assert (told["rows"]["devices"], told["notIncluded"]["rolesFile"]) == (1, str(access.passfile))
    assert "already" in on_database("backup", "--to", tmp_path / "first").why
    assert on_database("backup").code == 2

    name = f"elsewhere_{uuid4().hex}"
    with as_owner(access) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            monkeypatch.setenv("POSTSEAL_DATABASE_URL", make_conninfo(access.owner, dbname=name))
            assert "manifest" in on_database("restore", "--from", tmp_path).why
            restored = on_database("restore", "--from", tmp_path / "first", "--json").document
            assert (restored["database"], restored["takenAtMs"] > 0, restored["missingLogins"]) == (name, True, [])
            assert restored["rows"] == told["rows"]
            assert "is not empty" in on_database("restore", "--from", tmp_path / "first").why
            assert [row["device"] for row in on_database("device", "list", "acme", "--json").document["devices"]] == [
                "device-01"
            ]
        finally:
            owner.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

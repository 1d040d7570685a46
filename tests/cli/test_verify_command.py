"""`postseal verify` and `postseal recover`, run for real: what they print, and how they end."""

import asyncio
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ran import Cli
from running import DEADLINE_S, POSTSEAL, on, started
from test_commands import send
from test_program import answers

from fleet import as_owner, enrol
from healthy import Healthy, populate
from postseal.postgres.access import Access
from postseal.verify import MAX_NAMED


@pytest.fixture
def healthy(access: Access, tmp_path: Path) -> Healthy:
    """A database in which something of everything is."""
    return asyncio.run(populate(access, tmp_path))


def test_a_healthy_database_is_said_to_be_so(on_database: Cli, healthy: Healthy):
    """In one line with what was looked at, and as one document."""
    assert on_database("verify").text == (
        "all invariants hold: streams 3, identities 19, payloads 31, destinations 4, deliveries 13, queue 9, "
        "settlements 4, audit events 54; signatures verified 31\n"
    )
    document = on_database("verify", "--signatures", "none", "--json").document
    assert (document["holds"], document["counts"], document["breaches"]) == (True, {}, [])
    assert (document["rows"]["identities"], document["signatures"]) == (19, 0)


def test_breaches_are_lines_and_the_end_is_a_failure(on_database: Cli, healthy: Healthy):
    """Each has its place; of many a few are named; standard error says nothing."""
    with as_owner(healthy.access) as owner:
        owner.execute("DELETE FROM identities WHERE stream = %s AND sequence = 5", [healthy.whole.stream])
        owner.execute("INSERT INTO payloads SELECT 'acme', 999, n, NULL, '', '' FROM generate_series(1, 49) AS n")
    ran = on_database("verify")
    assert (ran.code, ran.err) == (1, "")
    lines = ran.out.splitlines()
    assert (
        "identity_missing: acme apollo device-01 5: of 10 sequences above the floor up to the contiguous cursor 9 "
        "are retained" in lines
    )
    assert lines[-2:] == ["payload_orphaned: 30 more", "52 breaches of 3 invariants"]
    ran = on_database("verify", "--json")
    assert (ran.code, ran.err) == (1, "")
    assert '"payload_orphaned":50' in ran.out
    assert ran.out.count('"invariant":"payload_orphaned"') == MAX_NAMED


def test_a_login_that_may_not_read_is_told_in_one_line(
    on_database: Cli, access: Access, monkeypatch: pytest.MonkeyPatch
):
    """And so is a database that is not there, and a word that is no choice."""
    monkeypatch.setenv("POSTSEAL_DATABASE_URL", access.of("delivery"))
    assert on_database("verify").why == "postseal: the database refused: permission denied for table streams\n"
    monkeypatch.setenv("POSTSEAL_DATABASE_URL", f"{access.owner} dbname=nowhere")
    assert "cannot reach the database" in on_database("verify").why
    assert on_database("verify", "--signatures", "some").code == 2


def test_an_older_schema_is_named_and_not_migrated(on_database: Cli, access: Access):
    """Whoever only wants to know changes nothing."""
    with as_owner(access) as owner:
        owner.execute("DELETE FROM schema_migrations WHERE version > 1")
    ran = on_database("verify")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("schema: version 1, where this release has ")


def test_an_embedded_database_is_taken_as_it_is(cli: Cli, run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """It is started for the proofs and stopped again, and has the schema that it had: a new one none."""
    home = run_folder / f"verify-{os.getpid()}"
    monkeypatch.setenv("POSTSEAL_DATA_DIR", str(home))
    monkeypatch.setenv("POSTSEAL_BALLAST_MB", "0")
    for _ in range(2):
        assert cli("verify").out.startswith("schema: version 0, where this release has ")
    assert cli("tenant", "create", "acme").code == 0
    assert cli("verify").text.startswith("all invariants hold: streams 0, ")
    assert cli("recover").text.startswith("released, since their leases had ended: 0\n")
    assert not answers(home)


def test_a_bar_is_drawn_on_a_terminal_alone(healthy: Healthy):
    """On standard error, so that the report can be kept."""
    leader, follower = pty.openpty()
    try:
        ran = subprocess.run(
            [POSTSEAL, "verify"],
            env=os.environ | on(healthy.access) | {"TERM": "xterm", "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=follower,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        drawn = os.read(leader, 1 << 16).decode()
    finally:
        os.close(follower)
        os.close(leader)
    assert ran.stdout.startswith("all invariants hold: ")
    assert "payloads are what was signed" in drawn


def test_proofs_end_on_a_signal(access: Access):
    """Within a statement, quietly, with the exit code of the signal; the server is not left at work."""
    device = enrol(access)
    send(access, device, 1)
    with as_owner(access) as owner, owner.transaction():
        owner.execute("LOCK TABLE payloads IN ACCESS EXCLUSIVE MODE")
        with started("verify", **on(access)) as (process, out, err):
            deadline = time.monotonic() + DEADLINE_S
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'payloads'::regclass"
            while owner.execute(waiting).fetchone() == (0,):
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 130
            assert (out.rest(), err.rest()) == ([], [])


def test_recovery_tells_and_releases(on_database: Cli, healthy: Healthy):
    """What it found as tables and as one document; a look alone first."""
    look = on_database("recover", "--dry-run", "--json").document
    assert look["released"] == 0
    assert (look["sinceMs"], look["quiet"]) == (None, None)
    assert look["deadLetters"]["total"] == 1
    assert [row["missing"] for row in look["holes"]["rows"]] == [
        [{"from": 11, "to": 11}, {"from": 14, "to": 14}],
        [{"from": 4, "to": 4}],
    ]
    lines = on_database("recover").text.splitlines()
    assert lines[:3] == ["released, since their leases had ended: 1", "", "leases: 1"]
    assert lines[4].split()[:4] == ["acme", "apollo", "orders", "1"]
    assert "no restore is on record; --since lists the streams that nobody has written to since" in lines
    ended = on_database("recover", "--since", "2000-01-01", "--json").document
    assert (ended["released"], ended["quiet"]) == (0, {"total": 0, "rows": []})
    text = on_database("recover", "--since", "2099-12-31T23:59:59Z").text
    assert "streams that nobody has written to since 2099-12-31 23:59:59Z: 3\n" in text

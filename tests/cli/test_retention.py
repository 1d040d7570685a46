"""`postseal retention`, `postseal hold`, `postseal sweep`: what they do, what they print, and how a sweep ends."""

import json
import os
import pty
import signal
import subprocess
import time
from typing import Any

import pytest
from ran import Cli
from running import DEADLINE_S, POSTSEAL, on, started

from fleet import Device, as_owner, enrol
from postseal.postgres.access import Access
from until import until


@pytest.fixture
def device(access: Access) -> Device:
    """An enrolled device of tenant acme, project apollo."""
    return enrol(access)


def stock(access: Access, device: Device, count: int) -> None:
    """So many expired payloads in the stream of a device."""
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO payloads SELECT %s, %s, n, '2026-01-02 03:04:05Z', '', '' FROM generate_series(1, %s) AS n",
            [device.tenant, device.stream, count],
        )


def left(access: Access) -> int:
    """How many payloads there are."""
    with as_owner(access) as owner:
        row = owner.execute("SELECT count(*) FROM payloads").fetchone()
    assert row is not None
    return row[0]


def trail(access: Access) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Action, project and detail of acme's acts, oldest first."""
    with as_owner(access) as owner:
        query = "SELECT action, project, detail FROM audit_events WHERE tenant = 'acme' ORDER BY id"
        return owner.execute(query).fetchall()


def test_retention_is_set_shown_and_audited(on_database: Cli, access: Access, device: Device) -> None:
    """A project's own days come before its tenant's, those before the default; taken away they fall back."""
    on_database("project", "create", "acme", "gemini")
    shown = ("retention", "show", "acme")
    assert on_database(*shown, "--json").document == {
        "tenant": "acme",
        "days": None,
        "defaultDays": 90,
        "projects": [{"project": "apollo", "days": None}, {"project": "gemini", "days": None}],
    }
    assert on_database(*shown).text.splitlines()[0] == "tenant acme: 90 days (the default)"
    said = on_database("retention", "set", "acme", "--days", 30).text
    assert said == "new payloads of tenant acme are kept 30 days\n"
    set_apollo = on_database("retention", "set", "acme", "--project", "apollo", "--days", 365, "--json")
    assert set_apollo.document == {"tenant": "acme", "project": "apollo", "days": 365}
    first, header, *rows = on_database(*shown).text.splitlines()
    assert first == "tenant acme: 30 days"
    assert [header.split(), *map(str.split, rows)] == [
        ["project", "days", "setBy"],
        ["apollo", "365", "project"],
        ["gemini", "30", "tenant"],
    ]
    said = on_database("retention", "set", "acme", "--project", "apollo", "--default").text
    assert said == "new payloads of project apollo of tenant acme are kept as long as by default\n"
    acts = [(project, detail) for action, project, detail in trail(access) if action == "retention.set"]
    assert acts == [
        (None, {"from": None, "to": 30}),
        ("apollo", {"from": None, "to": 365}),
        ("apollo", {"from": 365, "to": None}),
    ]


def test_retention_that_cannot_be_set(on_database: Cli, device: Device) -> None:
    """One line says why; what makes no sense is wrong usage."""
    assert on_database("retention", "show", "beta").why == "postseal: there is no tenant 'beta'\n"
    assert "no tenant 'beta'" in on_database("retention", "set", "beta", "--days", 1).why
    assert "no project 'zeus'" in on_database("retention", "set", "acme", "--project", "zeus", "--days", 1).why
    for words in ([], ["--days", 0], ["--days", 36501], ["--days", 1, "--default"]):
        assert on_database("retention", "set", "acme", *words).code == 2


def test_holds_are_placed_listed_released_and_audited(on_database: Cli, access: Access, device: Device) -> None:
    """By name and with a reason; a name is a tenant's once, and can be used again after the release."""
    place = ("hold", "place", "acme", "case-17", "--reason")
    assert on_database(*place, "claim of 3 March").text == "payloads of tenant acme are held by case-17\n"
    assert on_database(*place, "again").why == "postseal: tenant 'acme' has a hold 'case-17' already\n"
    assert on_database("hold", "place", "acme", "case-18", "--reason", "x", "--json").document == {
        "tenant": "acme",
        "hold": "case-18",
    }
    [first, second] = on_database("hold", "list", "--json").document["holds"]
    assert (first["tenant"], first["hold"], first["reason"]) == ("acme", "case-17", "claim of 3 March")
    assert first["account"].startswith("os:")
    assert first["placedAtMs"] == pytest.approx(time.time() * 1000, abs=60_000)
    assert second["hold"] == "case-18"
    assert on_database("hold", "list", "acme").text.splitlines()[1].endswith("claim of 3 March")
    release = ("hold", "release", "acme", "case-17", "--reason", "settled")
    assert on_database(*release).text == "hold case-17 of tenant acme released\n"
    assert on_database(*release).why == "postseal: tenant 'acme' has no hold 'case-17'\n"
    assert on_database(*place, "anew").code == 0
    acts = [(action, detail["hold"], detail["reason"]) for action, _, detail in trail(access)]
    assert acts == [
        ("hold.place", "case-17", "claim of 3 March"),
        ("hold.place", "case-18", "x"),
        ("hold.release", "case-17", "settled"),
        ("hold.place", "case-17", "anew"),
    ]


def test_holds_that_cannot_be(on_database: Cli, device: Device) -> None:
    """No such tenant, a name that is no id, no reason."""
    assert "no tenant 'beta'" in on_database("hold", "place", "beta", "case", "--reason", "x").why
    assert "cannot be a hold" in on_database("hold", "place", "acme", "Case!", "--reason", "x").why
    for verb in ("place", "release"):
        assert "the reason is one line" in on_database("hold", verb, "acme", "case", "--reason", " ").why
    assert on_database("hold", "place", "acme", "case").code == 2
    assert "no tenant 'beta'" in on_database("hold", "list", "beta").why


def test_a_dry_run_tells_and_changes_nothing(on_database: Cli, access: Access, device: Device) -> None:
    """By tenant, held ones among them, though they do not count."""
    held = enrol(access, tenant="beta")
    stock(access, device, 3)
    stock(access, held, 2)
    on_database("hold", "place", "beta", "case", "--reason", "x")
    first = 1_767_323_045_000
    assert on_database("sweep", "--dry-run", "--json").document == {
        "toDelete": 3,
        "tenants": [
            {"tenant": "acme", "expired": 3, "firstExpiredAtMs": first, "held": False},
            {"tenant": "beta", "expired": 2, "firstExpiredAtMs": first, "held": True},
        ],
    }
    header, *rows, total = on_database("sweep", "--dry-run").text.splitlines()
    assert header.split() == ["tenant", "expired", "firstExpiredAt", "held"]
    assert [row.split() for row in rows] == [
        ["acme", "3", "2026-01-02", "03:04:05Z", "no"],
        ["beta", "2", "2026-01-02", "03:04:05Z", "yes"],
    ]
    assert total == "3 payloads would be deleted"
    assert left(access) == 5
    assert on_database("sweep", "--dry-run", "--once").code == 2


def test_once_ends_when_nothing_is_left(on_database: Cli, access: Access, device: Device) -> None:
    """It tells how many payloads it deleted, and how many of ended deliveries it dated."""
    stock(access, device, 1200)
    assert on_database("sweep", "--once", "--json").document == {"swept": 1200, "dated": 0}
    assert on_database("sweep", "--once").text == "swept  0\ndated  0\n"
    assert left(access) == 0


def test_a_bar_on_a_terminal(access: Access, device: Device) -> None:
    """On stderr, and only there: what is printed stays one document."""
    stock(access, device, 1200)
    terminal, its = pty.openpty()
    try:
        command = [POSTSEAL, "sweep", "--once", "--json"]
        done = subprocess.run(
            command, env=os.environ | on(access), stdout=subprocess.PIPE, stderr=its, timeout=DEADLINE_S, check=True
        )
        shown = os.read(terminal, 65536).decode()
    finally:
        os.close(terminal)
        os.close(its)
    assert json.loads(done.stdout) == {"swept": 1200, "dated": 0}
    assert "sweeping" in shown
    assert "100%" in shown


def test_a_sweep_runs_until_it_is_stopped(access: Access, device: Device) -> None:
    """It deletes what expires, ends with 0 on SIGTERM, and logs what it did."""
    stock(access, device, 1200)
    with started("sweep", "--json", **on(access)) as (process, out, err):
        assert json.loads(out.next()) == {"sweeping": True}
        until(lambda: left(access) == 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        [totals, last] = map(json.loads, err.rest())
    assert (totals["event"], totals["swept"], totals["failed"]) == ("sweep_stopped", 1200, 0)
    assert last["event"] == "stopped"


def test_serve_sweeps_unless_it_is_told_not_to(access: Access, device: Device) -> None:
    """With `--no-sweep` it connects no sweep at all."""
    stock(access, device, 1200)
    with started("serve", "--port", "0", "--no-sweep", **on(access)) as (_, out, _):
        assert out.next().startswith("postseal listens")
        with as_owner(access) as owner:
            roles = owner.execute("SELECT DISTINCT usename FROM pg_stat_activity WHERE datname = current_database()")
            assert "postseal_sweep" not in {name for (name,) in roles}
    assert left(access) == 1200
    with started("serve", "--port", "0", **on(access)) as (_, out, _):
        assert out.next().startswith("postseal listens")
        until(lambda: left(access) == 0)

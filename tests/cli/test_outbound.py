"""Commands of the outbound half, run for real: signing keys, destinations, deliveries, dead letters, logins."""

import asyncio
import json
import os
import secrets
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from ran import Cli

from fleet import as_owner
from outgoing import Destination, decision, new_destination, new_tenant, require_whole
from postseal.envelope import ed25519
from postseal.postgres.access import Access
from postseal.signing.pem_folder import PemFolder

URL = "https://receiver.example.net/hook"


@pytest.fixture
def outbound(on_database: Cli, access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line where tenant acme has projects apollo and zeus, and keys have a folder."""
    new_tenant(access, "acme", "apollo", "zeus")
    key = tmp_path / "deployment.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(32))
    monkeypatch.setenv("POSTSEAL_SIGNING_KEYS_DIR", str(tmp_path / "signing"))
    monkeypatch.setenv("POSTSEAL_DEPLOYMENT_KEY_FILE", str(key))
    return on_database


def acts(access: Access) -> list[tuple[str, dict[str, Any]]]:
    """Action and detail of the acts on acme."""
    with as_owner(access) as owner:
        return owner.execute(
            "SELECT action, detail FROM audit_events WHERE tenant = 'acme' AND outcome = 'done' ORDER BY id"
        ).fetchall()


def data(**changes: Any) -> str:
    """What a delivery says."""
    return json.dumps(decision(**changes))


def test_a_signing_key(outbound: Cli, access: Access, tmp_path: Path) -> None:
    """Its file is the owner's alone and is registered under its id; a second one is a conflict and leaves no file."""
    made = outbound("key", "create", "acme", "--json").document
    file = Path(made["keyFile"])
    assert file == tmp_path / "signing" / "acme" / f"{made['keyid']}.pem"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    seed = ed25519.seed_from_pem(file.read_bytes())
    with as_owner(access) as owner:
        assert owner.execute("SELECT keyid, public_key, state FROM signing_keys").fetchall() == [
            (made["keyid"], ed25519.public_key(seed), "active")
        ]
    signature = asyncio.run(PemFolder(tmp_path / "signing").sign("acme", made["keyid"], b"message"))
    assert ed25519.verify(ed25519.public_key(seed), b"message", signature)
    assert outbound("key", "create", "acme").why == "postseal: tenant 'acme' has an active signing key already\n"
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert "no tenant 'nobody'" in outbound("key", "create", "nobody").why
    assert not (tmp_path / "signing" / "nobody").exists()
    assert acts(access) == [("signing-key.create", {"keyid": made["keyid"]})]


def test_a_signing_key_that_may_be_registered_is_kept(outbound: Cli, access: Access, tmp_path: Path) -> None:
    """Where nothing is known of the commit the file stays, and a crash between file and row leaves nothing unusable."""
    with as_owner(access) as owner, owner.transaction():
        owner.execute("LOCK TABLE signing_keys IN SHARE MODE")
        why = outbound("key", "create", "acme").why
    [kept] = (tmp_path / "signing" / "acme").iterdir()
    assert str(kept) in why
    assert outbound("key", "create", "acme", "--json").document["keyFile"] != str(kept)


def test_destinations(outbound: Cli, access: Access) -> None:
    """Made with what the receiver has to know, listed without it, disabled, enabled; each stands in the trail."""
    create = ("destination", "create", "acme", "apollo")
    made = outbound(*create, "orders", "--mode", "push", "--url", URL, "--scheme", "both", "--json").document
    assert [secret["scheme"] for secret in made["secrets"]] == ["v1", "v1a"]
    assert (made["url"], made["maxPending"]) == (URL, 100_000)
    text = outbound(*create, "bills", "--mode", "push", "--url", URL, "--max-pending", 7).text
    assert "whsec_" in text
    listed = outbound("destination", "list", "acme", "apollo", "--json")
    names = [(row["destination"], row["mode"], row["maxPending"]) for row in listed.document["destinations"]]
    assert names == [("bills", "push", 7), ("orders", "push", 100_000)]
    for secret in made["secrets"]:
        assert secret["receiver"] not in listed.out + str(acts(access))
    orders = ("acme", "apollo", "orders")
    assert outbound("destination", "disable", *orders).text == "destination orders is disabled\n"
    assert outbound("destination", "disable", *orders).text == "destination orders is disabled\n"
    assert "disabled (operator)" in outbound("destination", "list", "acme", "apollo").text
    assert outbound("destination", "enable", *orders, "--json").document["state"] == "enabled"
    rotated = outbound(
        "destination", "rotate-secret", *orders, "--scheme", "v1", "--overlap-hours", 0, "--json"
    ).document
    assert [secret["scheme"] for secret in rotated["secrets"]] == ["v1"]
    assert rotated["secrets"][0]["receiver"] != made["secrets"][0]["receiver"]
    assert [action for action, _ in acts(access)] == [
        "destination.create",
        "destination.create",
        "destination.disable",
        "destination.enable",
        "destination.rotate-secret",
    ]


def test_a_destination_is_changed(outbound: Cli, access: Access) -> None:
    """Its URL, its room or both; what may not be pushed to is refused, and nothing to change is wrong usage."""
    new_destination(access, max_pending=5)
    orders = ("destination", "change", "acme", "apollo", "orders")
    changed = outbound(*orders, "--url", "https://new.example.net/hook", "--json").document
    assert changed == {
        "tenant": "acme",
        "project": "apollo",
        "destination": "orders",
        "mode": "push",
        "url": "https://new.example.net/hook",
        "maxPending": 5,
    }
    assert "maxPending   7" in outbound(*orders, "--max-pending", 7).text
    [row] = outbound("destination", "list", "acme", "apollo", "--json").document["destinations"]
    assert (row["url"], row["maxPending"]) == ("https://new.example.net/hook", 7)
    assert outbound(*orders).code == 2
    assert "hush" not in outbound(*orders, "--url", "https://user:hush@receiver.example.net/").why
    assert "has no destination 'bills'" in outbound(*orders[:-1], "bills", "--max-pending", 7).why
    assert [action for action, _ in acts(access)] == ["destination.change", "destination.change"]


def test_destinations_that_are_not_made(outbound: Cli, access: Access) -> None:
    """One line says why, or the usage does; a URL is not repeated."""
    create = ("destination", "create", "acme", "apollo", "orders")
    assert outbound(*create, "--mode", "push").code == 2
    assert outbound(*create, "--mode", "pull", "--url", URL).code == 2
    why = outbound(*create, "--mode", "push", "--url", "http://user:hush@receiver.example.net/").why
    assert "hush" not in why
    assert "has no device 'orders'" in outbound(*create, "--mode", "pull").why
    Path(os.environ["POSTSEAL_DEPLOYMENT_KEY_FILE"]).unlink()
    assert "there is no deployment key file" in outbound(*create, "--mode", "push", "--url", URL).why
    assert outbound("destination", "list", "acme", "apollo", "--json").document["destinations"] == []


def test_a_device_that_pulls(outbound: Cli, access: Access, tmp_path: Path) -> None:
    """Enrolled at the command line it has its destination already; once it is retired that is disabled for ever."""
    options = ("--project", "apollo", "--generate", "--key-out", tmp_path / "d1.pem")
    assert outbound("device", "enroll", "acme", "d1", *options).code == 0
    [row] = outbound("destination", "list", "acme", "apollo", "--json").document["destinations"]
    assert (row["destination"], row["mode"], row["maxPending"]) == ("d1", "pull", 100_000)
    again = outbound("destination", "create", "acme", "apollo", "d1", "--mode", "pull")
    assert again.why == "postseal: project 'apollo' has a destination 'd1' already\n"
    assert "is pulled from" in outbound("destination", "test", "acme", "apollo", "d1").why
    assert outbound("device", "retire", "acme", "d1").code == 0
    assert "disabled (retired)" in outbound("destination", "list", "acme", "apollo").text
    enable = outbound("destination", "enable", "acme", "apollo", "d1")
    assert enable.why.startswith("postseal: device 'd1' is retired: ")


def test_a_test_of_a_destination(outbound: Cli) -> None:
    """Exit code 1 and the code where it fails, in JSON too; no special address is asked."""
    create = ("destination", "create", "acme", "apollo", "orders")
    assert outbound(*create, "--mode", "push", "--url", "https://127.0.0.1:9/").code == 0
    ran = outbound("destination", "test", "acme", "apollo", "orders", "--json")
    assert (ran.code, json.loads(ran.out)) == (
        1,
        {"destination": "orders", "delivered": False, "code": "address_refused"},
    )
    assert ran.err == "postseal: destination orders did not take the test: address_refused\n"


def enqueued(outbound: Cli, *options: object) -> dict[str, Any]:
    """A delivery, sealed at the command line."""
    return outbound("delivery", "enqueue", "acme", "apollo", "orders", *options, "--json").document


@pytest.fixture
def destination(outbound: Cli, access: Access) -> Destination:
    """A destination of a tenant that can sign."""
    assert outbound("key", "create", "acme").code == 0
    return new_destination(access)


def key_of(access: Access) -> bytes:
    """The public half of acme's signing key."""
    with as_owner(access) as owner:
        [(public_key,)] = owner.execute("SELECT public_key FROM signing_keys").fetchall()
    return public_key


def test_a_delivery_is_sealed(outbound: Cli, access: Access, destination: Destination) -> None:
    """Once for each key, in the name of whoever did it; what cannot be sealed says why."""
    said = data()
    made = enqueued(outbound, "--data", said, "--idempotency-key", "order:0001", "--attempt-limit", 2)
    assert (made["sequence"], made["state"], made["new"]) == (1, "pending", True)
    again = enqueued(outbound, "--data", said, "--idempotency-key", "order:0001")
    assert (again["delivery"], again["new"]) == (made["delivery"], False)
    assert enqueued(outbound, "--data", data())["sequence"] == 2
    rows = require_whole(destination, key_of(access))
    assert [row.attempt_limit for row in rows] == [2, 8]
    enqueue = ("delivery", "enqueue", "acme", "apollo", "orders")
    conflict = outbound(*enqueue, "--data", data(), "--idempotency-key", "order:0001")
    assert conflict.why.startswith("postseal: idempotency_conflict: ")
    assert outbound(*enqueue, "--data", data(kind="none")).why.startswith("postseal: payload_invalid: ")
    assert outbound(*enqueue, "--data", "[]").code == 2
    assert "no project 'nowhere'" in outbound("delivery", "enqueue", "acme", "nowhere", "orders", "--data", data()).why


def test_a_delivery_is_shown_and_cancelled(outbound: Cli, access: Access, destination: Destination) -> None:
    """How it stands and why it was not sent yet; once cancelled it never is."""
    made = enqueued(outbound, "--data", data())
    show, cancel = (
        ("delivery", "show", "acme", made["delivery"]),
        ("delivery", "cancel", "acme", "apollo", made["delivery"]),
    )
    shown = outbound(*show, "--json").document
    assert (shown["state"], shown["why"]["code"], shown["sequence"]) == ("pending", "waits_for_turn", 1)
    assert "It waits for its turn." in outbound(*show).text
    assert outbound(*cancel, "--json").document["ended"] == "cancelled"
    assert outbound(*show, "--json").document["state"] == "cancelled"
    assert "has no such delivery" in outbound("delivery", "show", "acme", uuid4()).why
    assert outbound("delivery", "show", "acme", "nonsense").code == 2
    zeus = outbound("delivery", "cancel", "acme", "zeus", made["delivery"])
    assert "has no such delivery" in zeus.why
    enqueued(outbound, "--data", data())
    destination.end(2, "dead", "status_5xx", attempts=2)
    text = outbound("delivery", "show", "acme", destination.rows()[1].delivery).text
    assert text.count("status_5xx") == 3


def test_intents_are_listed(outbound: Cli, access: Access, destination: Destination) -> None:
    """What is not sealed, with its code; what is given up has no time any more and stays until it is cancelled."""
    waiting, lost = str(uuid4()), str(uuid4())
    with as_owner(access) as owner:
        for identity, code, due_at in ((waiting, "destination_full", "now"), (lost, "expired", "infinity")):
            owner.execute(
                "INSERT INTO intents (tenant, delivery, project, destination, idempotency_key, data, code, due_at)"
                " VALUES ('acme', %s, 'apollo', 'orders', 'order:0001', '{}', %s, %s)",
                [identity, code, due_at],
            )
    intents = ("intent", "list", "acme", "apollo")
    listed = outbound(*intents, "--json").document["intents"]
    assert [(row["delivery"], row["code"], row["dueAtMs"] is None) for row in listed] == [
        (waiting, "destination_full", False),
        (lost, "expired", True),
    ]
    assert outbound(*intents, "--code", "expired").text.splitlines()[1].startswith(f"{lost}  orders       expired  ")
    assert "no project 'nowhere'" in outbound("intent", "list", "acme", "nowhere").why
    shown = outbound("delivery", "show", "acme", lost, "--json").document
    assert (shown["state"], shown["why"]["code"]) == ("unsealed", "sealing_given_up")
    assert outbound("delivery", "cancel", "acme", "apollo", lost, "--json").document["ended"] == "intent_cancelled"
    assert outbound(*intents, "--code", "expired", "--json").document["intents"] == []


def test_dead_letters(outbound: Cli, access: Access, destination: Destination) -> None:
    """Listed and counted; one is redriven by its id, all of a filter once that was confirmed."""
    ids = [enqueued(outbound, "--data", data())["delivery"] for _ in range(4)]
    for sequence, code in enumerate(("status_5xx", "status_4xx", "status_5xx", "rejected"), 1):
        destination.end(sequence, "dead", code)
    letters, redrive = ("dead-letter", "list", "acme", "apollo"), ("dead-letter", "redrive", "acme", "apollo")
    listed = outbound(*letters, "--json").document
    assert (listed["count"], [row["delivery"] for row in listed["deadLetters"]]) == (4, ids)
    assert outbound(*letters, "--code", "status_5xx", "--json").document["count"] == 2
    first = outbound(*letters, "--limit", 3, "--json").document
    [last] = outbound(*letters, "--limit", 3, "--after", first["next"], "--json").document["deadLetters"]
    assert (first["deadLetters"], last["delivery"]) == (listed["deadLetters"][:3], ids[3])
    assert f"4 in all; go on with --after {first['next']}\n" in outbound(*letters, "--limit", 3).text
    assert "this is no position" in outbound(*letters, "--after", "x").err
    settled = [datetime.fromtimestamp(row["settledAtMs"] / 1000, UTC) for row in listed["deadLetters"]]
    late = ("--since", (settled[-1] + timedelta(seconds=1)).isoformat())
    early = ("--until", (settled[0] - timedelta(seconds=1)).isoformat())
    for some, count in ((late, 0), (early, 0), (("--since", early[1], "--until", late[1]), 4)):
        assert outbound(*letters, *some, "--json").document["count"] == count
        assert outbound(*redrive, "--all", *late, "--yes").text == "0 redriven\n"

    assert outbound(*redrive).code == 2
    assert outbound(*redrive, ids[0], "--all").code == 2
    assert outbound(*redrive, ids[0], "--budget", 3, "--json").document["redriven"] == 1
    assert "has no such dead letter: the delivery is pending" in outbound(*redrive, ids[0]).why
    for command in (letters, (*redrive, "--all", "--yes"), ("intent", "list", "acme", "apollo")):
        assert "there is no code 'nonsense': it is one of " in outbound(*command, "--code", "nonsense").why
    refused = outbound(*redrive, "--all", "--code", "status_5xx")
    assert (refused.code, refused.out) == (1, "")
    assert "Redrive 1 dead letters?" in refused.err
    assert outbound(*letters, "--json").document["count"] == 3
    assert outbound(*redrive, "--all", "--code", "status_5xx", "--yes").text == "1 redriven\n"
    assert outbound(*redrive, "--all", "--yes", "--json").document["redriven"] == 2
    assert outbound(*letters, "--json").document["count"] == 0
    with as_owner(access) as owner:
        limits = owner.execute("SELECT attempt_limit FROM queue ORDER BY sequence").fetchall()
    assert limits == [(4,), (9,), (9,), (9,)]


def test_logins(outbound: Cli, access: Access) -> None:
    """Allowed for the projects that were named last and no others, listed, disallowed."""
    assert "no project 'nowhere'" in outbound("login", "allow", "acme", "billing", "--project", "nowhere").why
    allow = outbound("login", "allow", "acme", "billing", "--project", "zeus", "--project", "apollo")
    assert allow.text == "login billing may leave intents for apollo, zeus of tenant acme\n"
    assert outbound("login", "allow", "acme", "billing", "--project", "zeus", "--json").document["projects"] == ["zeus"]
    assert outbound("login", "list", "acme", "--json").document["logins"] == [
        {"login": "billing", "projects": ["zeus"]}
    ]
    assert outbound("login", "list", "acme").text.splitlines()[1].split() == ["billing", "zeus"]
    assert outbound("login", "disallow", "acme", "billing", "--json").document == {"tenant": "acme", "login": "billing"}
    assert outbound("login", "disallow", "acme", "billing").why == "postseal: tenant 'acme' allows no such login\n"
    assert acts(access) == [
        ("login.allow", {"login": "billing", "projects": ["apollo", "zeus"]}),
        ("login.allow", {"login": "billing", "projects": ["zeus"]}),
        ("login.disallow", {"login": "billing"}),
    ]

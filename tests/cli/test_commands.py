"""Each command, run for real on a database: what it does, and what it prints for people and for programs."""

import asyncio
import json
import os
import pwd
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from ran import Cli

from fleet import Device, as_owner, enrol
from postseal.envelope import ed25519
from postseal.postgres.access import Access
from postseal.postgres.home import open_home
from postseal.postgres.migrate import migrations
from postseal.service import running_service
from postseal.settings import Settings

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
SECOND_MS = 1000


def send(access: Access, device: Device, *sequences: int) -> None:
    """Let the device send a heartbeat under each sequence."""

    async def flow() -> None:
        async with running_service(Settings(), access) as service:
            for sequence in sequences:
                await service.inbox.receive(device.inbound(device.envelope(sequence)))

    asyncio.run(flow())


def near_ms(ahead_ms: int) -> Any:
    """A time in milliseconds, that far from now, to a minute."""
    return pytest.approx(time.time() * SECOND_MS + ahead_ms, abs=60 * SECOND_MS)


def test_tenants_and_projects(on_database: Cli) -> None:
    """Create tells what was made; list shows it by name."""
    assert on_database("tenant", "create", "acme").text == "tenant acme made\n"
    assert on_database("tenant", "create", "beta", "--json").document == {"tenant": "beta"}
    assert on_database("project", "create", "acme", "apollo").text == "project apollo of tenant acme made\n"
    assert on_database("project", "create", "acme", "gemini", "--json").document == {
        "tenant": "acme",
        "project": "gemini",
    }
    listed = on_database("tenant", "list", "--json").document["tenants"]
    assert [(row["tenant"], row["createdAtMs"]) for row in listed] == [("acme", near_ms(0)), ("beta", near_ms(0))]
    header, acme, beta = on_database("tenant", "list").text.splitlines()
    assert header.split() == ["tenant", "createdAt"]
    assert acme.startswith("acme    20")
    assert acme.endswith("Z")
    assert beta.startswith("beta    20")
    projects = on_database("project", "list", "acme", "--json").document
    assert [row["project"] for row in projects["projects"]] == ["apollo", "gemini"]
    assert on_database("project", "list", "beta").text.split() == ["project", "createdAt"]


def test_what_exists_is_a_conflict(on_database: Cli) -> None:
    """Creating it again fails with exit code 1 and says so."""
    assert on_database("tenant", "create", "acme").code == 0
    assert on_database("tenant", "create", "acme").why == "postseal: tenant 'acme' exists already\n"
    assert on_database("project", "create", "acme", "apollo").code == 0
    again = on_database("project", "create", "acme", "apollo", "--json")
    assert again.why == "postseal: tenant 'acme' has a project 'apollo' already\n"


def test_an_invitation(on_database: Cli, access: Access) -> None:
    """A code with the time at which it ends, an hour from now."""
    enrol(access, "d0", project="apollo")
    invitation = on_database("device", "invite", "acme", "d1", "--project", "apollo", "--json").document
    assert invitation == {
        "tenant": "acme",
        "device": "d1",
        "projects": ["apollo"],
        "code": invitation["code"],
        "expiresAtMs": near_ms(HOUR_MS),
    }
    text = on_database("device", "invite", "acme", "d2", "--project", "apollo", "--account", "ops").text
    assert dict(line.split(maxsplit=1) for line in text.splitlines()).keys() == {
        "tenant",
        "device",
        "projects",
        "code",
        "expiresAt",
    }
    added = on_database("device", "invite", "acme", "d0", "--project", "apollo", "--add-key", "--json").document
    assert added["code"] not in {invitation["code"], ""}
    for code in (invitation["code"], added["code"]):
        assert code not in on_database("audit", "list", "acme", "--json").out


def test_enrolling_on_this_machine(on_database: Cli, access: Access, tmp_path: Path) -> None:
    """The key is in a new file of the owner's alone; keyid, credential and projects are told; the device works."""
    enrol(access, "d0", project="apollo")
    on_database("project", "create", "acme", "gemini")
    file = tmp_path / "d1.pem"
    options = ("--project", "gemini", "--project", "apollo", "--generate", "--json")
    enrolled = on_database("device", "enroll", "acme", "d1", *options, "--key-out", file).document

    seed = ed25519.seed_from_pem(file.read_bytes())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert enrolled == {
        "tenant": "acme",
        "device": "d1",
        "projects": ["apollo", "gemini"],
        "keyid": ed25519.thumbprint(ed25519.public_key(seed)),
        "credential": enrolled["credential"],
        "expiresAtMs": near_ms(90 * DAY_MS),
        "keyFile": str(file),
    }
    [listed] = [
        row for row in on_database("device", "list", "acme", "--json").document["devices"] if row["device"] == "d1"
    ]
    assert (listed["account"], listed["projects"], listed["retiredAtMs"]) == ("d1", ["apollo", "gemini"], None)
    assert enrolled["credential"] not in on_database("audit", "list", "acme", "--json").out


def test_a_key_file_is_never_overwritten(on_database: Cli, access: Access, tmp_path: Path) -> None:
    """What is in the way stays as it is, and nobody is enrolled."""
    enrol(access, "d0", project="apollo")
    file = tmp_path / "key.pem"
    file.write_text("precious")
    words = ["device", "enroll", "acme", "d1", "--project", "apollo", "--generate", "--key-out"]
    assert (
        on_database(*words, file).why
        == f"postseal: {file} exists already and is not overwritten: choose another file\n"
    )
    assert file.read_text() == "precious"
    assert "d1" not in on_database("device", "list", "acme").text
    missing = tmp_path / "no" / "key.pem"
    assert on_database(*words, missing).why == f"postseal: {missing}: No such file or directory\n"


def test_a_key_that_may_be_enrolled_is_kept(on_database: Cli, access: Access, tmp_path: Path) -> None:
    """Where nothing is known of the commit its file stays, and the one line says how to go on."""
    on_database("tenant", "create", "acme")
    on_database("project", "create", "acme", "apollo")
    file = tmp_path / "d1.pem"
    words = ["device", "enroll", "acme", "d1", "--project", "apollo", "--generate", "--key-out"]
    with as_owner(access) as owner, owner.transaction():
        owner.execute("LOCK TABLE keys")
        why = on_database(*words, file).why
    assert f"{file} is kept, since its key may be enrolled" in why
    assert "--add-key" in why
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert on_database(*words, tmp_path / "another.pem", "--json").document["device"] == "d1"
    assert on_database(*words, tmp_path / "third.pem", "--add-key", "--json").document["device"] == "d1"


def test_a_key_that_was_not_enrolled_is_not_left_behind(on_database: Cli, access: Access, tmp_path: Path) -> None:
    """Where enrolling fails, its file goes again."""
    enrol(access, "d0", project="apollo")
    file = tmp_path / "key.pem"
    words = ["device", "enroll", "acme", "d0", "--project", "apollo", "--generate", "--key-out"]
    assert "ids are never used again" in on_database(*words, file).why
    assert not file.exists()
    unasked = on_database("device", "enroll", "acme", "d1", "--project", "apollo", "--key-out", file)
    assert unasked.code == 2
    assert "say --generate" in unasked.err
    assert not file.exists()


def test_retiring_a_device(on_database: Cli, access: Access) -> None:
    """It is shown as retired, and so are its streams."""
    enrol(access, "d1")
    enrol(access, "d2")
    assert on_database("device", "retire", "acme", "d1").text == "device d1 of tenant acme retired\n"
    assert on_database("device", "retire", "acme", "d2", "--json").document == {"tenant": "acme", "device": "d2"}
    assert [row["retiredAtMs"] for row in on_database("device", "list", "acme", "--json").document["devices"]] == [
        near_ms(0),
        near_ms(0),
    ]
    assert on_database("stream", "show", "acme", "apollo", "d1", "--json").document["retired"] is True


def test_credentials(on_database: Cli, access: Access) -> None:
    """Create shows the credential once; list never does; revoke takes its id."""
    enrol(access, "d1")
    create = ["credential", "create", "acme", "--project", "apollo", "--role"]
    issued = on_database(*create, "consumer", "--account", "reader", "--json").document
    assert issued == {
        "credentialId": issued["credentialId"],
        "tenant": "acme",
        "account": "reader",
        "role": "consumer",
        "projects": ["apollo"],
        "credential": issued["credential"],
        "expiresAtMs": near_ms(90 * DAY_MS),
    }
    assert "credential    ps_" in on_database(*create, "sender").text
    assert on_database("credential", "revoke", "acme", issued["credentialId"]).text == "credential revoked\n"
    rows = on_database("credential", "list", "acme", "--json").document["credentials"]
    assert [(row["role"], row["account"], row["state"]) for row in rows] == [
        ("device", "owner-1", "valid"),
        ("consumer", "reader", "revoked"),
        ("sender", "sender", "valid"),
    ]
    assert "ps_" not in on_database("credential", "list", "acme").text
    again = on_database("credential", "revoke", "acme", issued["credentialId"])
    assert "has no such credential that is not revoked already" in again.why
    pasted = on_database("credential", "revoke", "acme", issued["credential"])
    assert issued["credential"] not in pasted.why
    assert on_database(*create, "device").code == 2


def test_keys(on_database: Cli, access: Access) -> None:
    """List shows state and age; retire and revoke tell the new state."""
    device, other = enrol(access, "d1"), enrol(access, "d2")
    with as_owner(access) as owner:
        owner.execute("UPDATE keys SET registered_at = registered_at - interval '50 hours' WHERE device = 'd1'")
    [key] = on_database("key", "list", "acme", "--device", "d1", "--json").document["keys"]
    assert (key["keyid"], key["device"], key["state"], key["acceptUntilMs"]) == (device.keyid, "d1", "active", None)
    assert key["ageS"] == pytest.approx(50 * 3600, abs=60)
    header, first, _ = on_database("key", "list", "acme").text.splitlines()
    assert header.split()[:4] == ["keyid", "device", "state", "age"]
    assert first.split()[:4] == [device.keyid, "d1", "active", "2d"]
    assert on_database("key", "retire", "acme", device.keyid).text == f"key {device.keyid} is verify-only\n"
    assert on_database("key", "revoke", "acme", other.keyid, "--json").document == {
        "tenant": "acme",
        "keyid": other.keyid,
        "state": "revoked",
    }
    assert on_database("key", "retire", "acme", other.keyid).why == "postseal: the key is revoked already\n"


def test_streams(on_database: Cli, access: Access) -> None:
    """List and show tell where streams stand and what is missing; raise-floor closes it with a reason."""
    device = enrol(access, "d1")
    enrol(access, "d2", project="gemini")
    send(access, device, 1, 4, 5, 9)
    show = ["stream", "show", "acme", "apollo", "d1"]
    assert on_database(*show, "--json").document == {
        "tenant": "acme",
        "project": "apollo",
        "producer": "d1",
        "contiguousThrough": 1,
        "highest": 9,
        "replayFloor": 0,
        "nextSequence": 10,
        "missing": [{"from": 2, "to": 3}, {"from": 6, "to": 8}],
        "retired": False,
    }
    assert "\nmissing            2-3,6-8\n" in on_database(*show).text
    raised = on_database("stream", "raise-floor", "acme", "apollo", "d1", 3, "--reason", "disk lost", "--json").document
    assert (raised["replayFloor"], raised["contiguousThrough"], raised["missing"]) == (3, 5, [{"from": 6, "to": 8}])
    beyond = ["stream", "raise-floor", "acme", "apollo", "d1", "20", "--reason", "new"]
    assert on_database(*beyond).why == "postseal: 20 is above the highest sequence, 9: it must be forced\n"
    assert "contiguousThrough  20\n" in on_database(*beyond, "--force").text
    listed = on_database("stream", "list", "acme", "--json").document["streams"]
    assert [(row["producer"], row["highest"]) for row in listed] == [("d1", 20), ("d2", 0)]
    header, only = on_database("stream", "list", "acme", "--project", "gemini").text.splitlines()
    assert header.split()[:3] == ["project", "producer", "contiguousThrough"]
    assert only.split() == ["gemini", "d2", "0", "0", "0", "-", "no"]
    unreasoned = on_database("stream", "raise-floor", "acme", "apollo", "d1", 21)
    assert unreasoned.code == 2
    assert "--reason" in unreasoned.err


def test_the_audit_trail(on_database: Cli, access: Access) -> None:
    """Envelopes and acts in one trail, the newest last, filtered and paged; acts name who ran the command."""
    device = enrol(access, "d1")
    send(access, device, 1, 1)
    on_database("device", "retire", "acme", "d1")
    trail = on_database("audit", "list", "acme", "--json").document["events"]
    assert [(event["action"], event["outcome"], event["reason"]) for event in trail] == [
        ("envelope", "accepted", None),
        ("envelope", "refused", "sequence_conflict"),
        ("device.retire", "done", None),
    ]
    assert trail[-1]["account"] == f"os:{pwd.getpwuid(os.geteuid()).pw_name}"
    assert trail[-1]["detail"] == {"device": "d1"}
    assert len(trail[0]["eventIdentity"]) == 64

    def ids(*options: object) -> list[int]:
        events = on_database("audit", "list", "acme", "--json", *options).document["events"]
        return [event["id"] for event in events]

    first, second, third = (event["id"] for event in trail)
    assert ids("--limit", 1) == [third]
    assert ids("--limit", 1, "--before", third) == [second]
    assert ids("--after", first) == [second, third]
    assert ids("--reason", "sequence_conflict") == [second]
    assert ids("--outcome", "accepted", "--project", "apollo") == [first]
    assert ids("--since", "2026-01-01") == [first, second, third]
    assert ids("--since", "2999-12-31T23:59:59Z") == []
    header, *lines = on_database("audit", "list", "acme").text.splitlines()
    assert header.split()[:4] == ["id", "at", "account", "device"]
    assert lines[0].endswith(trail[0]["eventIdentity"])
    assert lines[2].endswith('{"device":"d1"}')
    for wrong in (("--since", "yesterday"), ("--limit", 1001), ("--before", 1, "--after", 1)):
        assert on_database("audit", "list", "acme", *wrong).code == 2


def test_the_inbox(on_database: Cli, access: Access) -> None:
    """Through the contiguous cursor alone, in order; what expired and what the floor closed in its place."""
    device, other = enrol(access, "d1"), enrol(access, "d2")
    send(access, device, 1, 2, 5, 7)
    send(access, other, 1)
    with as_owner(access) as owner:
        owner.execute("DELETE FROM payloads WHERE stream = %s AND sequence = 1", [device.stream])
    on_database("stream", "raise-floor", "acme", "apollo", "d1", 4, "--reason", "lost")

    ran = on_database("inbox", "tail", "acme", "apollo", "--json")
    assert (ran.code, ran.err) == (0, "postseal: d1 is retained up to 7, sequence 6 missing\n")
    first, second, closed, fifth, others = [json.loads(line) for line in ran.out.splitlines()]
    assert first == {
        "producer": "d1",
        "sequence": 1,
        "acceptedAtMs": near_ms(0),
        "eventIdentity": first["eventIdentity"],
        "expired": True,
    }
    assert (second["sequence"], second["kind"], len(second["eventIdentity"])) == (2, "heartbeat", 64)
    assert closed == {"producer": "d1", "from": 3, "to": 4, "closed": True}
    assert (fifth["producer"], fifth["sequence"]) == ("d1", 5)
    assert (others["producer"], others["sequence"]) == ("d2", 1)
    only = on_database("inbox", "tail", "acme", "apollo", "--producer", "d1", "--after", 4).out
    assert only.split()[:2] == ["d1", "5"]
    assert only.split()[-1] == "heartbeat"
    assert only.count("\n") == 1
    assert on_database("inbox", "tail", "acme", "apollo", "--after", 4).code == 2
    assert on_database("inbox", "tail", "acme", "nope").why == "postseal: tenant 'acme' has no project 'nope'\n"
    assert "not_found" in on_database("inbox", "tail", "acme", "apollo", "--producer", "d9").why


def test_the_inbox_goes_on_over_pages(on_database: Cli, access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or shown twice where one page of streams or envelopes ends."""
    monkeypatch.setattr("postseal.cli.inbox.PAGE_ENVELOPES", 2)
    monkeypatch.setattr("postseal.cli.inbox.PAGE_STREAMS", 1)
    for name in ("d1", "d2"):
        send(access, enrol(access, name), 1, 2, 3, 4, 5)
    shown = [
        (line["producer"], line["sequence"]) for line in on_database("inbox", "tail", "acme", "apollo", "--json").lines
    ]
    assert shown == [(name, sequence) for name in ("d1", "d2") for sequence in range(1, 6)]


def test_a_data_folder_made_by_migrate_is_good_for_an_embedded_database(on_database: Cli, tmp_path: Path) -> None:
    """It is open as one that `serve` makes, whose server runs as another account than root; what lies in it is not."""
    data, served = tmp_path / "data", tmp_path / "served"
    on_database("migrate", "--data-dir", str(data))
    open_home(served)
    assert stat.S_IMODE(data.stat().st_mode) == stat.S_IMODE(served.stat().st_mode)
    assert stat.S_IMODE((data / "deployment.key").stat().st_mode) == 0o600


def test_migrate(on_database: Cli, access: Access) -> None:
    """--plan shows what would be applied; migrate applies it once."""
    assert on_database("migrate", "--plan").text == "the database is up to date\n"
    with as_owner(access) as owner:
        owner.execute("DROP SCHEMA postseal CASCADE")
    files = [migration.name for migration in migrations()]
    assert on_database("migrate", "--plan", "--json").document == {"pending": files}
    assert "run `postseal migrate`" in on_database("tenant", "list").why
    assert on_database("migrate").text == "".join(f"applied {name}\n" for name in files)
    assert on_database("migrate", "--json").document == {"applied": []}
    assert on_database("tenant", "list", "--json").document == {"tenants": []}

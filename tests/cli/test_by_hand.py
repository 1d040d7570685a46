"""What somebody does by hand, and the slips that they make."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ran import Cli

from fleet import add_key, as_owner, enrol
from postseal.envelope import dsse, ed25519
from postseal.postgres.access import Access

WITHOUT_THE_SERVERS_HALF = """
import sys
for missing in ("psycopg", "psycopg_pool", "structlog", "starlette", "uvicorn", "prometheus_client"):
    sys.modules[missing] = None
sys.argv = ["postseal", *sys.argv[1:]]
from postseal.cli import main
main()
"""


def run_light(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `postseal` where only the device's half is installed."""
    command = [sys.executable, "-c", WITHOUT_THE_SERVERS_HALF, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def key_with_a_hyphen() -> bytes:
    """The seed of a key whose id begins with a hyphen, as one in 64 does."""
    for number in range(10_000):
        seed = number.to_bytes(32, "big")
        if ed25519.thumbprint(ed25519.public_key(seed)).startswith("-"):
            return seed
    raise AssertionError("no such key among ten thousand")


@pytest.mark.parametrize("act", ["retire", "revoke"])
def test_a_key_id_may_begin_with_a_hyphen(on_database: Cli, access: Access, act: str):
    """In the emergency of a stolen key nobody has to know how options are told from arguments."""
    device = enrol(access)
    keyid = add_key(access, device, key_with_a_hyphen())
    assert keyid.startswith("-")
    assert on_database("key", act, device.tenant, keyid, "--json").document["keyid"] == keyid
    assert on_database("key", act, device.tenant, keyid, "--no-such-option").code == 2


def test_an_envelope_is_sealed_without_the_servers_half(tmp_path: Path):
    """The device's half seals and opens; the other commands say in one line what they need."""
    seed = ed25519.generate()
    key = tmp_path / "key.pem"
    key.write_bytes(ed25519.seed_to_pem(seed))
    sealed = run_light("envelope", "seal", "--key", str(key), "acme", "main", "d1", "7")
    assert (sealed.returncode, sealed.stderr) == (0, "")
    envelope = dsse.unwrap(sealed.stdout.encode().rstrip(b"\n"))
    assert ed25519.verify(ed25519.public_key(seed), envelope.signed_bytes, envelope.signature)
    file = tmp_path / "envelope.json"
    file.write_text(sealed.stdout)
    assert json.loads(run_light("envelope", "open", str(file), "--json").stdout)["payload"]["sequence"] == 7
    lacking = run_light("tenant", "list")
    assert (lacking.returncode, lacking.stdout) == (1, "")
    assert lacking.stderr == "postseal: tenant needs the server's half: pip install 'postseal[server]'\n"


def test_what_cannot_be_sealed_is_one_line(cli: Cli, tmp_path: Path):
    """A key that is none, and data that is no object, are told as such."""
    key = tmp_path / "key.pem"
    key.write_text("no key")
    assert "no Ed25519 private key" in cli("envelope", "seal", "--key", key, "acme", "main", "d1", 1).why
    key.write_bytes(ed25519.seed_to_pem(ed25519.generate()))
    assert "one JSON object" in cli("envelope", "seal", "--key", key, "acme", "main", "d1", 1, "--data", "[]").why
    assert (
        "cannot be sealed" in cli("envelope", "seal", "--key", key, "acme", "main", "d1", 1, "--data", '{"x":1.5}').why
    )


def test_a_setting_that_is_none_is_named(cli: Cli, tmp_path: Path):
    """A slip in the settings file is told by its name."""
    file = tmp_path / "settings.toml"
    file.write_text("prot = 99\n")
    assert cli("tenant", "list", "--config", file).why == (
        "postseal: there is no setting 'prot': mend its name, or take it out\n"
    )


def test_a_word_that_the_trail_does_not_know_is_wrong_usage(on_database: Cli, access: Access):
    """A slip in a filter does not look as if nothing had happened."""
    device = enrol(access)
    for option, known in (("--outcome", "accepted"), ("--reason", "key_revoked")):
        wrong = on_database("audit", "list", device.tenant, option, "wrong")
        assert wrong.code == 2
        assert known in wrong.err
        assert on_database("audit", "list", device.tenant, option, known).code == 0


def test_the_demo_in_json_is_one_document(run_folder: Path):
    """For programs the demo prints one document: what was sent, answered and delivered; it runs twice in one home."""
    home = run_folder / "demo-in-json"
    command = [sys.executable, "-c", "from postseal.cli import main; main()", "demo", "--once", "--json"]
    command += ["--port", "0", "--data-dir", str(home)]
    for _ in range(2):
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        require_both_ways(json.loads(ran.stdout))


def require_both_ways(document: dict[str, Any]) -> None:
    """The demo's document tells of every outcome, and of each way to a receiver."""
    assert [step["answer"].get("outcome") for step in document["steps"][:4]] == [
        "accepted",
        "duplicate",
        "gap",
        "reordered",
    ]
    assert [item["sequence"] for item in document["readBack"]] == [1, 2, 3]
    pushed, pulled, tried, redriven = document["deliveries"]
    assert [each["state"] for each in document["deliveries"]] == ["delivered"] * 4
    assert pushed["sameKey"]["delivery"] == pushed["delivery"]
    assert pulled["destination"] == document["device"]
    codes = [[failed["code"] for failed in each["failedAttempts"]] for each in document["deliveries"]]
    assert codes == [[], [], ["status_5xx"] * 2, ["connect_failed"] * 2]
    assert [each["attempt"] for each in document["deliveries"]] == [1, 1, 3, 3]
    assert [letter["delivery"] for letter in redriven["deadLetters"]] == [redriven["delivery"]]
    verified = [each["verified"] for each in (pushed, tried, redriven)]
    assert verified == ["both signatures verified"] * 3


def test_what_waits_behind_a_hole_is_told(on_database: Cli, access: Access):
    """An inbox that shows nothing because its first envelope is missing says so."""
    device = enrol(access)
    with_hole = "UPDATE streams SET highest = 5, above = '\\x10' WHERE producer = %s"
    with as_owner(access) as owner:
        owner.execute(with_hole, [device.name])
    ran = on_database("inbox", "tail", device.tenant, device.project)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err == f"postseal: {device.name} is retained up to 5, sequences 1-4 missing\n"

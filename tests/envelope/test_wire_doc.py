"""docs/wire.md: its recipes run, and its tables name what the schema has."""

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from postseal.envelope import dsse, ed25519, enrolment, v1
from postseal.envelope.schema import payload_schema

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
FOUR_VALUES = {
    "POSTSEAL_URL": "http://stub.invalid",
    "TENANT": "acme",
    "DEVICE": "device-01",
    "KEY_FILE": "key.pem",
}

# Stands in for curl: writes down what it was called with and what it would have sent.
CURL = """
curl() {
    printf '%s\\n' "$@" > curl-arguments
    case "$*" in *@-*) cat > curl-body ;; esac
    echo answer
}
"""


def recipe(name: str) -> str:
    """Find the one shell block behind a marker."""
    [block] = re.findall(rf"<!-- recipe: {name} -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    return block


def run(name: str, folder: Path, **values: str) -> list[str]:
    """Run a recipe in a folder, curl replaced; return curl's arguments."""
    environment = {"PATH": os.environ["PATH"], **FOUR_VALUES, **values}
    command = ["sh", "-c", CURL + recipe(name)]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout == "answer\n"
    return (folder / "curl-arguments").read_text().splitlines()


def unpadded(text: str) -> bytes:
    """Decode base64url without padding."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@pytest.mark.parametrize("sequence", [1, 2**53 - 1])
def test_the_envelope_recipe(tmp_path: Path, sequence: int):
    """A shell and openssl make an envelope that unwraps, verifies and opens, and send it where it belongs."""
    arguments = run("openssl-envelope", tmp_path, PROJECT="apollo", CREDENTIAL="token", SEQUENCE=str(sequence))
    body = (tmp_path / "envelope.json").read_bytes()
    envelope = dsse.unwrap(body)
    public = ed25519.public_key(ed25519.seed_from_pem((tmp_path / "key.pem").read_bytes()))
    assert envelope.keyid == ed25519.thumbprint(public)
    assert ed25519.verify(public, envelope.signed_bytes, envelope.signature)
    opened = v1.open_payload(envelope.payload)
    assert opened.route == v1.Route(tenant="acme", project="apollo", producer="device-01")
    assert opened.sequence == sequence
    assert body == dsse.wrap(envelope.payload, envelope.keyid, envelope.signature)
    assert arguments[-1] == "http://stub.invalid/v1/envelopes"
    assert "@envelope.json" in arguments
    assert "Authorization: Bearer token" in arguments
    assert f"Content-Type: {dsse.ENVELOPE_MEDIA_TYPE}" in arguments
    assert {path.name for path in tmp_path.iterdir()} == {"key.pem", "envelope.json", "curl-arguments"}


def test_the_envelope_recipe_keeps_a_key(tmp_path: Path):
    """A key file that is there is used, not replaced."""
    (tmp_path / "key.pem").write_bytes(ed25519.seed_to_pem(bytes(range(32))))
    run("openssl-envelope", tmp_path, PROJECT="apollo", CREDENTIAL="token", SEQUENCE="1")
    envelope = dsse.unwrap((tmp_path / "envelope.json").read_bytes())
    assert envelope.keyid == "1IG2tMH7J2wbJZnOf8LJzQitKf7LMvoAElsuDMVM54Y"


def test_the_enrolment_recipe(tmp_path: Path):
    """A shell and openssl make a key and a proof that holds."""
    arguments = run("openssl-enrolment", tmp_path, CODE="c0de")
    assert arguments[-1] == "http://stub.invalid/v1/enrolments"
    sent = json.loads((tmp_path / "curl-body").read_bytes())
    assert set(sent) == {"code", "publicKey", "proof"}
    public = unpadded(sent["publicKey"])
    ed25519.check_public_key(public)
    keyid = ed25519.thumbprint(public)
    claim = {"code": "c0de", "device": "device-01", "keyid": keyid, "tenant": "acme"}
    assert enrolment.proves(public, unpadded(sent["proof"]), **claim)
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0


def words(schema: object) -> Iterator[str]:
    """Every member name, closed word and bound above 1 of the schema."""
    if isinstance(schema, dict):
        found = cast("dict[str, Any]", schema)
        yield from found.get("properties", {})
        yield from found.get("enum", [])
        yield from (str(found[name]) for name in ("const", "maximum") if name in found)
        for inner in found.values():
            yield from words(inner)
    elif isinstance(schema, list):
        for inner in cast("list[object]", schema):
            yield from words(inner)


def test_the_tables_name_everything():
    """Each member, word and bound of the schema stands on the page."""
    absent = {word for word in words(json.loads(payload_schema())) if not re.search(rf"\b{re.escape(word)}\b", PAGE)}
    assert not absent

"""`POST /v1/enrolments`: a code, a key and its proof become a credential that works."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from served import Site, running_site
from wire import Answer, get, request

from fleet import as_owner
from postseal.envelope import ed25519
from postseal.envelope.enrolment import prove
from postseal.identity.codes import new_code
from postseal.postgres.access import Access
from postseal.settings import Settings

BURST = 8


@pytest.fixture(scope="module")
def site(shared_access: Access) -> Iterator[Site]:
    """A server behind a proxy on this host, so that each test can be a peer of its own, with eight tries."""
    settings = Settings(trusted_proxies=("127.0.0.1/32",), peer_burst=BURST, peer_permits_per_s=0.01)
    with running_site(shared_access, settings) as site:
        yield site


def invite(site: Site, device: str) -> str:
    """An operator's code."""
    code = new_code()
    with as_owner(site.access) as owner:
        owner.execute(
            "INSERT INTO invitations (code_hash, tenant, device, account, projects, adds_key, reach, expires_at)"
            " VALUES (%s, 'acme', %s, 'owner-1', '{apollo}', false, '{apollo}', clock_timestamp() + interval '1 hour')",
            [hashlib.sha256(code.encode()).digest(), device],
        )
    return code


def base64url(raw: bytes) -> str:
    """Without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def wanted(code: str, device: str, seed: bytes) -> dict[str, Any]:
    """The body of a good enrolment."""
    public_key = ed25519.public_key(seed)
    proof = prove(seed, code=code, device=device, keyid=ed25519.thumbprint(public_key), tenant="acme")
    return {"code": code, "publicKey": base64url(public_key), "proof": base64url(proof)}


def enrol(site: Site, document: object, *, peer: str, **headers: str) -> Answer:
    """One try."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    headers = {"content_type": "application/json", "x_forwarded_for": peer, **headers}
    return site.ask(request("POST", "/v1/enrolments", body, **headers))


def test_a_device_enrols_and_its_credential_works(site: Site) -> None:
    """The answer names the device, what it may write to, and a credential until it expires; no cache keeps it."""
    seed = ed25519.generate()
    code = invite(site, "fresh")
    answer = enrol(site, wanted(code, "fresh", seed), peer="192.0.2.1")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    document = answer.document
    assert {name: document[name] for name in ("tenant", "device", "projects", "keyid")} == {
        "tenant": "acme",
        "device": "fresh",
        "projects": ["apollo"],
        "keyid": ed25519.thumbprint(ed25519.public_key(seed)),
    }
    days = (document["expiresAtMs"] / 1000 - time.time()) / 86_400
    assert 89.9 < days < 90.1
    assert site.ask(get("/v1/projects/apollo/streams/fresh", document["credential"])).status == 200


def test_a_lost_answer_can_be_had_again(site: Site) -> None:
    """The same code, key and proof bring a new credential in place of the first."""
    seed = ed25519.generate()
    document = wanted(invite(site, "again"), "again", seed)
    first = enrol(site, document, peer="192.0.2.2").document["credential"]
    second = enrol(site, document, peer="192.0.2.2").document["credential"]
    path = "/v1/projects/apollo/streams/again"
    assert [site.ask(get(path, token, x_forwarded_for="192.0.2.2")).status for token in (first, second)] == [401, 200]


def test_a_wrong_proof_is_refused(site: Site) -> None:
    """403, and the code stays good for the right one."""
    code, seed = invite(site, "proved"), ed25519.generate()
    wrong = wanted(code, "proved", seed) | {"proof": base64url(bytes(64))}
    answer = enrol(site, wrong, peer="192.0.2.3")
    assert (answer.status, answer.reason) == (403, "enrolment_refused")
    assert code not in answer.body.decode()
    assert enrol(site, wanted(code, "proved", seed), peer="192.0.2.3").status == 200


GOOD = {"code": new_code(), "publicKey": "A" * 43, "proof": "A" * 86}


NO_ENROLMENTS: list[object] = [
    b"",
    b"{}",
    b"[]",
    b"\xff",
    b"[" * 4000,
    GOOD | {"more": 1},
    GOOD | {"code": 1},
    GOOD | {"code": ""},
    GOOD | {"publicKey": "A" * 42},
    GOOD | {"publicKey": "A" * 42 + "B"},
    GOOD | {"publicKey": "A" * 42 + "="},
    GOOD | {"publicKey": "+" * 43},
    GOOD | {"proof": "A" * 85 + "\u00e9"},
    GOOD | {"proof": "A" * 85 + "\n"},
]


@pytest.mark.parametrize("number", range(len(NO_ENROLMENTS)))
def test_a_body_that_is_none_is_invalid(site: Site, number: int) -> None:
    """Exactly three members, the keys in base64url without padding."""
    answer = enrol(site, NO_ENROLMENTS[number], peer=f"192.0.2.{100 + number}")
    assert (answer.status, answer.reason) == (400, "request_invalid")


def test_the_body_has_bounds(site: Site) -> None:
    """4 KiB of plain JSON."""
    large = GOOD | {"code": "x" * 4096}
    assert enrol(site, large, peer="192.0.2.4").status == 413
    assert enrol(site, GOOD, peer="192.0.2.4", content_type="text/json").status == 415
    assert enrol(site, GOOD, peer="192.0.2.4", content_encoding="gzip").status == 415


def test_tries_are_limited_by_peer(site: Site) -> None:
    """Wrong tries use the peer's limit up; welcome ones give it back."""
    for number in range(BURST + 1):
        name = f"welcome-{number}"
        assert enrol(site, wanted(invite(site, name), name, ed25519.generate()), peer="192.0.2.5").status == 200
    statuses = [enrol(site, GOOD, peer="192.0.2.5").status for _ in range(BURST + 1)]
    assert statuses == [403] * BURST + [429]
    answer = enrol(site, GOOD, peer="192.0.2.5")
    assert answer.reason == "peer_rate_limited"
    assert int(answer.headers["retry-after"]) >= 1


def test_a_code_used_again_keeps_its_permit(site: Site) -> None:
    """Whoever has a spent code and its key cannot have credentials made for as long as the code lives."""
    document = wanted(invite(site, "greedy"), "greedy", ed25519.generate())
    assert enrol(site, document, peer="192.0.2.6").status == 200
    answers = [enrol(site, document, peer="192.0.2.6") for _ in range(BURST + 1)]
    assert [answer.status for answer in answers] == [200] * BURST + [429]
    assert answers[-1].reason == "peer_rate_limited"

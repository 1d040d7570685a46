"""`/v1/device/…`: a device brings its next key, spoken for by one that it has, and renews its credential."""

import json
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from served import Site, running_site
from test_enrolments import base64url
from wire import Answer, get, post, request

from fleet import Device, add_key, as_owner, enrol, issue
from postseal.envelope import ed25519
from postseal.envelope.enrolment import prove
from postseal.postgres.access import Access
from postseal.rules.keys import MAX_KEYS
from postseal.settings import Settings
from postseal.web.device import RATE

CHALLENGE, KEYS, CREDENTIAL = "/v1/device/keys/challenge", "/v1/device/keys", "/v1/device/credential"
OVERLAP_H = 2
JSON = "application/json"


@pytest.fixture(scope="module")
def site(shared_access: Access) -> Iterator[Site]:
    """A server on which what was replaced goes on for two hours."""
    with running_site(shared_access, Settings(rotation_overlap_hours=OVERLAP_H)) as site:
        yield site


@pytest.fixture
def device(site: Site) -> Device:
    """A device of this test's own."""
    return enrol(site.access, f"device-{uuid4()}")


def ask(site: Site, device: Device, path: str, document: object = None, *, credential: str | None = None) -> Answer:
    """One call."""
    token = credential or device.token.reveal()
    if document is None:
        return site.ask(request("POST", path, b"", credential=token))
    return site.ask(request("POST", path, json.dumps(document).encode(), credential=token, content_type=JSON))


def challenge_of(site: Site, device: Device) -> str:
    """A new one."""
    answer = ask(site, device, CHALLENGE)
    assert answer.status == 200, answer.body
    assert 590 < answer.document["expiresAtMs"] / 1000 - time.time() < 610
    return answer.document["challenge"]


def further(
    device: Device, challenge: str, seed: bytes, *, by: bytes | None = None, names: dict[str, str] | None = None
) -> dict[str, str]:
    """The body that brings the key of `seed`, spoken for by `by` or the device's first key; `names` are signed."""
    public_key = ed25519.public_key(seed)
    signed = {
        "code": challenge,
        "device": device.name,
        "keyid": ed25519.thumbprint(public_key),
        "tenant": device.tenant,
    } | (names or {})
    return {
        "challenge": challenge,
        "publicKey": base64url(public_key),
        "proof": base64url(prove(seed, **signed)),
        "signature": base64url(prove(by or device.seed, **signed)),
    }


def send(site: Site, device: Device, sequence: int, seed: bytes, credential: str | None = None) -> str:
    """The outcome, or the reason, of one envelope."""
    answer = site.ask(post(credential or device.token.reveal(), device.envelope(sequence, seed=seed)))
    return answer.document.get("outcome") or answer.reason


def in_keys(site: Site, device: Device, change: str) -> None:
    """Change the device's keys."""
    with as_owner(site.access) as owner:
        owner.execute(f"UPDATE keys SET {change} AND device = %s".encode(), [device.name])  # noqa: S608 - this test's own


def acts(site: Site, device: Device) -> list[tuple[str, str, dict[str, Any]]]:
    """Account, action and detail of what the device did."""
    with as_owner(site.access) as owner:
        query = "SELECT account, action, detail FROM audit_events WHERE device = %s AND outcome = 'done' ORDER BY id"
        return owner.execute(query, [device.name]).fetchall()


def test_a_device_rotates_its_key(site: Site, device: Device) -> None:
    """The new key is active, the one that spoke for it retires: both are taken, and after its time the old one not."""
    seed = ed25519.generate()
    assert send(site, device, 1, device.seed) == "accepted"
    answer = ask(site, device, KEYS, further(device, challenge_of(site, device), seed))
    assert answer.status == 200, answer.body
    keyid = ed25519.thumbprint(ed25519.public_key(seed))
    assert (answer.document["keyid"], answer.document["replaces"]) == (keyid, device.keyid)
    hours = (answer.document["acceptUntilMs"] / 1000 - time.time()) / 3600
    assert OVERLAP_H - 0.1 < hours < OVERLAP_H + 0.1
    assert answer.headers["cache-control"] == "no-store"
    assert [send(site, device, 2, seed), send(site, device, 3, device.seed)] == ["accepted"] * 2
    in_keys(site, device, "accept_until = clock_timestamp() WHERE state = 'retiring'")
    assert [send(site, device, 4, device.seed), send(site, device, 4, seed)] == ["key_retired", "accepted"]
    assert acts(site, device) == [
        ("owner-1", "device.rotate-key", {"keyid": keyid, "retiring": device.keyid, "overlapS": OVERLAP_H * 3600})
    ]


def test_an_answer_that_was_lost_is_had_again(site: Site, device: Device) -> None:
    """The same request brings the same answer and does nothing again; another one with its challenge is refused."""
    challenge, seed = challenge_of(site, device), ed25519.generate()
    body = further(device, challenge, seed)
    first = ask(site, device, KEYS, body)
    assert ask(site, device, KEYS, body).document == first.document
    assert ask(site, device, KEYS, further(device, challenge, ed25519.generate())).reason == "enrolment_refused"
    assert ask(site, device, KEYS, further(device, challenge, seed, by=seed)).reason == "enrolment_refused"
    assert len(acts(site, device)) == 1
    in_keys(site, device, "state = 'revoked', accept_until = NULL WHERE state = 'active'")
    assert ask(site, device, KEYS, body).reason == "enrolment_refused"


def test_who_rotated_goes_on_by_the_new_key(site: Site, device: Device) -> None:
    """The old key speaks for no further one, though it still brings envelopes."""
    second, third = ed25519.generate(), ed25519.generate()
    assert ask(site, device, KEYS, further(device, challenge_of(site, device), second)).status == 200
    challenge = challenge_of(site, device)
    assert ask(site, device, KEYS, further(device, challenge, third)).reason == "enrolment_refused"
    assert ask(site, device, KEYS, further(device, challenge, third, by=second)).status == 200


def test_a_credential_alone_adds_no_key(site: Site, device: Device) -> None:
    """Each signature must be what it is for: by the right key, over the right names and the newest challenge."""
    seed, stranger = ed25519.generate(), ed25519.generate()
    neighbour = enrol(site.access, f"neighbour-{uuid4()}")
    stale = challenge_of(site, device)
    foreign = challenge_of(site, neighbour)
    challenge = challenge_of(site, device)
    good = further(device, challenge, seed)
    other = further(device, challenge, stranger)
    old = ed25519.generate()
    add_key(site.access, device, old)
    with as_owner(site.access) as owner:
        owner.execute(
            "UPDATE keys SET state = 'verify-only' WHERE keyid = %s", [ed25519.thumbprint(ed25519.public_key(old))]
        )
    refused = {
        "spoken for by the new key alone": further(device, challenge, seed, by=seed),
        "by a stranger": further(device, challenge, seed, by=stranger),
        "by a neighbour's key": further(device, challenge, seed, by=neighbour.seed),
        "by a key that is retired": further(device, challenge, seed, by=old),
        "without a proof": good | {"proof": good["signature"]},
        "another key's proof": good | {"proof": other["proof"]},
        "another key": good | {"publicKey": other["publicKey"]},
        "for another device": further(device, challenge, seed, names={"device": neighbour.name}),
        "for another tenant": further(device, challenge, seed, names={"tenant": "other"}),
        "an earlier challenge": further(device, stale, seed),
        "a neighbour's challenge": further(device, foreign, seed),
        "no challenge": further(device, "pse_" + "A" * 43, seed),
        "no code at all": further(device, "nothing", seed),
        "a key of the device's": further(device, challenge, device.seed),
        "a neighbour's key": further(device, challenge, neighbour.seed),
        "a key of small order": good | {"publicKey": base64url(bytes(32))},
    }
    answers = {name: ask(site, device, KEYS, body) for name, body in refused.items()}
    assert {name: (answer.status, answer.reason) for name, answer in answers.items()} == dict.fromkeys(
        refused, (403, "enrolment_refused")
    )
    assert len({answer.document["detail"] for answer in answers.values()}) == 1
    assert acts(site, device) == []
    assert ask(site, device, KEYS, good).status == 200


def test_a_challenge_ends(site: Site, device: Device) -> None:
    """After its time, spent or not."""
    body = further(device, challenge_of(site, device), ed25519.generate())
    with as_owner(site.access) as owner:
        owner.execute(
            "UPDATE key_challenges SET expires_at = clock_timestamp() WHERE tenant = 'acme' AND device = %s",
            [device.name],
        )
    assert ask(site, device, KEYS, body).reason == "enrolment_refused"


def test_a_device_has_a_bounded_number_of_keys(site: Site, device: Device) -> None:
    """The one beyond is a conflict."""
    for _ in range(MAX_KEYS - 1):
        add_key(site.access, device, ed25519.generate())
    answer = ask(site, device, KEYS, further(device, challenge_of(site, device), ed25519.generate()))
    assert (answer.status, answer.reason) == (409, "conflict")


def test_a_renewed_credential_works_and_the_old_one_goes_on_for_a_while(site: Site, device: Device) -> None:
    """Both open the same; the old one ends after the overlap, whatever time it had; the trail names both by id."""
    answer = ask(site, device, CREDENTIAL)
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    renewed = answer.document["credential"]
    assert 89.9 < (answer.document["expiresAtMs"] / 1000 - time.time()) / 86_400 < 90.1
    # The old one had an hour, which is less than the overlap, and gets no more.
    assert 0.9 < (answer.document["replacedUntilMs"] / 1000 - time.time()) / 3600 < 1.1
    assert send(site, device, 1, device.seed, renewed) == "accepted"
    assert send(site, device, 2, device.seed) == "accepted"
    [(account, action, detail)] = acts(site, device)
    assert (account, action) == ("owner-1", "device.renew-credential")
    assert detail["replaces"] == str(device.token.credential_id)
    assert renewed.rpartition("_")[2] not in str(detail)
    second = ask(site, device, CREDENTIAL, credential=renewed)
    assert OVERLAP_H - 0.1 < (second.document["replacedUntilMs"] / 1000 - time.time()) / 3600 < OVERLAP_H + 0.1


def test_a_renewal_whose_answer_was_lost(site: Site, device: Device) -> None:
    """The old credential renews again: another successor replaces the one that nobody got, and nothing lives longer."""
    lost = ask(site, device, CREDENTIAL).document
    again = ask(site, device, CREDENTIAL).document
    assert again["replacedUntilMs"] == lost["replacedUntilMs"]
    assert site.ask(get("/v1/projects/apollo/streams", lost["credential"])).reason == "unauthenticated"
    assert site.ask(get("/v1/projects/apollo/streams", again["credential"])).status == 200


def test_what_is_over_renews_nothing(site: Site, device: Device) -> None:
    """A credential that was revoked, though the door still knows it; and a device that is retired."""
    assert site.ask(get("/v1/projects/apollo/streams", device.token.reveal())).status == 200
    with as_owner(site.access) as owner:
        owner.execute("UPDATE credentials SET revoked_at = now() WHERE device = %s", [device.name])
    assert ask(site, device, CREDENTIAL).status in (401, 404)
    retired = enrol(site.access, f"retired-{uuid4()}")
    challenge = challenge_of(site, retired)
    with as_owner(site.access) as owner:
        owner.execute("UPDATE devices SET retired_at = now() WHERE device = %s", [retired.name])
    body = further(retired, challenge, ed25519.generate())
    for answer in (ask(site, retired, CHALLENGE), ask(site, retired, KEYS, body), ask(site, retired, CREDENTIAL)):
        assert (answer.status, answer.reason) == (403, "enrolment_refused")


@pytest.mark.parametrize("path", [CHALLENGE, KEYS, CREDENTIAL])
def test_only_devices(site: Site, path: str) -> None:
    """No other role has a key or renews by itself."""
    document = None if path != KEYS else {}
    for role in ("consumer", "sender", "operator"):
        credential = issue(site.access, "acme", None, ["apollo"], role).reveal()
        answer = ask(site, site.device, path, document, credential=credential)
        assert (answer.status, answer.reason) == (403, "role_forbidden")


def test_a_device_has_few_permits(site: Site, device: Device) -> None:
    """Every key and credential is a row that stays; another device's calls go on."""
    answers = [ask(site, device, CHALLENGE) for _ in range(RATE.burst + 2)]
    limited = answers[-1]
    assert (answers[RATE.burst - 1].status, limited.status, limited.reason) == (200, 429, "sync_rate_limited")
    assert int(limited.headers["retry-after"]) >= 1
    assert ask(site, enrol(site.access, f"other-{uuid4()}"), CHALLENGE).status == 200

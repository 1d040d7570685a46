"""Devices over HTTP: they lease their own deliveries, verify them with the served keys, and settle behind a fence."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from posting import DELIVERIES, JSON, Mailer, delivery, new_mailer, signing_site
from served import Site
from test_enrolments import base64url
from wire import Answer, request

from fleet import as_owner, issue
from outgoing import Destination, register
from postseal import door
from postseal.envelope import dsse, ed25519, v1
from postseal.outbound import pulling
from postseal.postgres.access import Access
from until import until

CLAIM, SETTLE = "/v1/deliveries/claim", "/v1/deliveries/settle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's keys lie."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def site(shared_access: Access, folder: Path) -> Iterator[Site]:
    """A server that can sign, with a burst of a hundred claims."""
    with signing_site(shared_access, folder, sync_burst=100, sync_permits_per_s=0.001) as site:
        yield site


@dataclass(frozen=True, slots=True)
class Puller:
    """A device and its mail in project apollo."""

    mailer: Mailer
    name: str
    destination: Destination
    credential: str = field(repr=False)

    def claim(self, **wanted: int) -> list[dict[str, Any]]:
        """What it gets."""
        answer = self.ask(CLAIM, wanted)
        assert answer.status == 200, answer.body
        assert answer.headers["cache-control"] == "no-store"
        return answer.document["items"]

    def settle(self, *items: dict[str, Any]) -> list[bool]:
        """Whether each was fenced."""
        answer = self.ask(SETTLE, {"items": items})
        assert answer.status == 200, answer.body
        told = [(item["project"], item["sequence"]) for item in answer.document["items"]]
        assert told == [(item["project"], item["sequence"]) for item in items]
        return [item["fenced"] for item in answer.document["items"]]

    def ask(self, path: str, document: object) -> Answer:
        """A POST with its credential."""
        return self.mailer.post(path, document, credential=self.credential)

    def get_mail(self, count: int = 1) -> list[str]:
        """So many deliveries for it; returns their ids."""
        return [self.mailer.send(delivery(self.name)).document["delivery"] for _ in range(count)]


def settlement(item: dict[str, Any], verdict: str, **members: Any) -> dict[str, Any]:
    """What becomes of a claimed delivery."""
    return {name: item[name] for name in ("project", "sequence", "attempt", "token")} | {"verdict": verdict} | members


def new_puller(mailer: Mailer, name: str = "device-01") -> Puller:
    """A device that is enrolled."""
    with as_owner(mailer.site.access) as owner:
        owner.execute("INSERT INTO devices VALUES (%s, %s, 'owner-1')", [mailer.tenant, name])
    credential = issue(mailer.site.access, mailer.tenant, name, ["apollo"]).reveal()
    return Puller(mailer, name, mailer.also(name, mode="pull"), credential)


@pytest.fixture
def puller(site: Site, folder: Path) -> Puller:
    """A device of a tenant of this test's own."""
    return new_puller(new_mailer(site, folder))


def test_what_is_claimed_verifies(puller: Puller) -> None:
    """In order, each whole, under the tenant's key as the service publishes it; a second claim finds nothing."""
    ids = puller.get_mail(3)
    items = puller.claim()
    assert [(item["delivery"], item["sequence"], item["attempt"]) for item in items] == [
        (identity, number, 1) for number, identity in enumerate(ids, 1)
    ]
    served = puller.mailer.read("/v1/keys", credential=puller.credential).document
    public_key = puller.mailer.public_key
    assert served["keys"] == [
        {
            "kid": ed25519.thumbprint(public_key),
            "x": base64url(public_key),
            "state": "active",
            "kty": "OKP",
            "crv": "Ed25519",
            "alg": "EdDSA",
            "use": "sig",
        }
    ]
    for item in items:
        envelope = dsse.unwrap(json.dumps(item["envelope"]).encode())
        assert ed25519.verify(public_key, envelope.signed_bytes, envelope.signature)
        assert envelope.identity.hex() == item["eventIdentity"]
        assert v1.open_delivery(envelope.payload).route.audience == puller.name
        assert 0 < item["leaseEndsMs"] / 1000 - time.time() < 61
    assert puller.claim() == []


def test_settlements(puller: Puller) -> None:
    """Delivered and rejected ones have ended; one to be tried again waits at least as long as was asked."""
    puller.get_mail(3)
    first, second, third = puller.claim()
    told = [
        settlement(first, "delivered"),
        settlement(second, "retry", retryAfterS=1800),
        settlement(third, "reject"),
    ]
    assert puller.settle(*told) == [False, False, False]
    shown = [puller.mailer.shown(item["delivery"]) for item in (first, second, third)]
    assert [(each["state"], each["code"]) for each in shown] == [
        ("delivered", None),
        ("pending", "deferred"),
        ("dead", "rejected"),
    ]
    assert shown[1]["why"]["code"] == "backing_off"
    assert shown[1]["nextAttemptAtMs"] / 1000 - time.time() > 1700
    assert puller.settle(*told) == [True, True, True]


def test_the_fence(puller: Puller) -> None:
    """Another attempt, token, project or sequence changes nothing, and neither does another device."""
    puller.get_mail()
    [item] = puller.claim()
    good = settlement(item, "delivered")
    stranger = new_puller(puller.mailer, "device-02")
    assert stranger.settle(good) == [True]
    wrong = [{"attempt": 2}, {"token": str(uuid4())}, {"project": "zeus"}, {"sequence": 2}]
    assert puller.settle(*(good | each for each in wrong)) == [True] * 4
    assert puller.mailer.shown(item["delivery"])["state"] == "delivering"
    assert puller.settle(good, good) == [False, True]


def test_a_lease_that_ended_is_claimed_anew(puller: Puller) -> None:
    """With the next attempt; the first holder is fenced then, and the second settles."""
    puller.get_mail()
    [first] = puller.claim()
    puller.destination.queued(1, "due_at = now() - interval '1 second'")
    [second] = puller.claim(wait=30)
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert puller.settle(settlement(first, "delivered")) == [True]
    assert puller.settle(settlement(second, "delivered")) == [False]


def test_a_device_gets_its_own_alone(puller: Puller, site: Site, folder: Path) -> None:
    """Not what is pushed, another device's, disabled, or of a project that its credential is not for."""
    mailer = puller.mailer
    mailer.send()
    other = new_puller(mailer, "device-02")
    other.get_mail()
    elsewhere = mailer.also(puller.name, project="zeus", mode="pull")
    wide = mailer.credential("sender", "apollo", "zeus")
    sent = mailer.post(
        "/v1/projects/zeus/deliveries", delivery(puller.name), credential=wide, idempotency_key=str(uuid4())
    )
    assert sent.status == 201
    assert elsewhere.highest() == 1
    assert new_puller(new_mailer(site, folder)).claim() == []
    assert puller.claim() == []
    puller.get_mail()
    puller.destination.disable()
    assert puller.claim() == []


def test_how_many(puller: Puller) -> None:
    """As many as were asked for, and 100 at most."""
    puller.get_mail(5)
    assert [item["sequence"] for item in puller.claim(limit=2)] == [1, 2]
    assert len(puller.claim(limit=100)) == 3


def test_a_claim_that_waits_is_woken(access: Access, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is enqueued in the same process, where it looks for itself only after a minute."""
    monkeypatch.setattr(pulling, "LOOK_EVERY_S", 60.0)
    with signing_site(access, folder) as site, site.client() as waiting:
        puller = new_puller(new_mailer(site, folder))
        waiting.send(request("POST", CLAIM, b'{"wait":30}', credential=puller.credential, content_type=JSON))
        time.sleep(0.2)  # whether it waits already or not yet, it gets what comes
        ids = puller.get_mail()
        assert [item["delivery"] for item in waiting.answer().document["items"]] == ids


def test_an_empty_claim_waits_as_long_as_it_was_told(puller: Puller) -> None:
    """And then comes empty."""
    began_s = time.monotonic()
    assert puller.claim(wait=1) == []
    assert 0.9 < time.monotonic() - began_s < 5


def test_who_was_revoked_gets_nothing(access: Access, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credential that is revoked while its claim waits is told so, and shown no mail."""
    monkeypatch.setattr(door, "REMEMBERED_FOR_S", 0.2)
    with signing_site(access, folder) as site, site.client() as waiting:
        puller = new_puller(new_mailer(site, folder))
        assert puller.claim() == []
        waiting.send(request("POST", CLAIM, b'{"wait":30}', credential=puller.credential, content_type=JSON))
        with as_owner(access) as owner:
            owner.execute("UPDATE credentials SET revoked_at = now() WHERE device = %s", [puller.name])
        while puller.ask(SETTLE, {}).status != 401:
            time.sleep(0.05)
        puller.get_mail()
        answer = waiting.answer()
    assert (answer.status, answer.reason) == (401, "unauthenticated")


def test_a_claim_costs_a_permit(puller: Puller) -> None:
    """However much it brings; nothing is leased once there is none, and another device has its own."""
    puller.get_mail()
    statuses = [puller.ask(CLAIM, {"limit": 1}).status for _ in range(101)]
    assert statuses == [200] * 100 + [429]
    puller.get_mail()
    answer = puller.ask(CLAIM, {})
    assert (answer.reason, answer.headers["ratelimit-policy"]) == ("sync_rate_limited", '"sync";q=100;w=100000')
    assert puller.mailer.shown(puller.get_mail()[0])["attempt"] == 0
    assert new_puller(puller.mailer, "device-02").claim() == []


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (CLAIM, {"limit": 0}),
        (CLAIM, {"limit": 101}),
        (CLAIM, {"wait": 31}),
        (CLAIM, {"lease": 600}),
        (SETTLE, {}),
        (SETTLE, {"items": []}),
        (SETTLE, {"items": [{"project": "apollo"}]}),
    ],
)
def test_what_is_not_valid(puller: Puller, path: str, document: object) -> None:
    """The length of a lease is not the device's to choose."""
    answer = puller.ask(path, document)
    assert (answer.status, answer.reason) == (400, "request_invalid")


def test_a_hundred_settlements(puller: Puller) -> None:
    """The greatest call, of whatever numbers, is answered."""
    one = {"project": "a" * 63, "sequence": 2**53 - 1, "attempt": 2**31 - 1, "token": str(uuid4()), "verdict": "retry"}
    puller.get_mail()
    [item] = puller.claim()
    items = [one | {"retryAfterS": 86_400} for _ in range(99)]
    mine = settlement(item, "retry") | {"attempt": 2**31 - 1}
    assert puller.settle(*items, mine) == [True] * 100
    answer = puller.ask(SETTLE, {"items": [one] * 101})
    assert (answer.status, answer.reason) == (400, "request_invalid")


@pytest.mark.parametrize("path", [CLAIM, SETTLE])
def test_only_devices(puller: Puller, path: str) -> None:
    """No other role has mail to pull."""
    for role in ("consumer", "sender", "operator"):
        answer = puller.mailer.post(path, {}, credential=puller.mailer.credential(role))
        assert (answer.status, answer.reason) == (403, "role_forbidden")
    assert puller.mailer.site.ask(request("POST", path, b"{}", content_type=JSON)).status == 401


def test_keys_that_are_to_be_believed(puller: Puller) -> None:
    """Every role that receives or sends sees them, oldest first; a revoked or removed key is not among them."""
    mailer = puller.mailer
    for state in ("retiring", "verify-only", "revoked", "removed"):
        register(mailer.site.access, ed25519.generate(), mailer.tenant, state)
    for credential in (puller.credential, mailer.credential("consumer"), mailer.sender):
        answer = mailer.read("/v1/keys", credential=credential)
        assert [key["state"] for key in answer.document["keys"]] == ["active", "retiring", "verify-only"]
    answer = mailer.read("/v1/keys", credential=mailer.credential("operator"))
    assert (answer.status, answer.reason) == (403, "role_forbidden")


def lock_waits(access: Access) -> int:
    """How many transactions of the database wait for a lock."""
    with as_owner(access) as owner:
        row = owner.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    assert row is not None
    return row[0]


def test_senders_that_wait_for_one_lock_leave_connections_to_others(puller: Puller, site: Site, folder: Path) -> None:
    """Eight enqueue for a destination that somebody has locked; another tenant's device is answered meanwhile."""
    other = new_puller(new_mailer(site, folder))
    other.get_mail()
    body = json.dumps(delivery(puller.name)).encode()
    with ExitStack() as clients:
        senders = [clients.enter_context(site.client()) for _ in range(8)]
        with as_owner(site.access) as owner, owner.transaction():
            owner.execute("SELECT FROM destinations WHERE stream = %s FOR UPDATE", [puller.destination.stream])
            for each in senders:
                fields = {"content_type": JSON, "idempotency_key": str(uuid4())}
                each.send(request("POST", DELIVERIES, body, credential=puller.mailer.sender, **fields))
            until(lambda: lock_waits(site.access) == 4)
            assert len(other.claim()) == 1
            assert lock_waits(site.access) <= 4
        assert {each.answer().status for each in senders} <= {201, 503}

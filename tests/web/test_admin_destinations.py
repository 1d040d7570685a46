"""Operators over HTTP: destinations and their secrets, and what was given up. Real requests to a real receiver."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from posting import Mailer, delivery, new_mailer, signing_site
from served import Site
from wire import Answer

from fleet import as_owner, enrol
from postseal.postgres.access import Access
from postseal.senders.webhook import SignatureInvalid, Verifier

DESTINATIONS = "/v1/admin/projects/apollo/destinations"
DEAD_LETTERS = "/v1/admin/projects/apollo/dead-letters"
RECEIVED_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's keys lie."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def site(shared_access: Access, folder: Path) -> Iterator[Site]:
    """A server that may push to this machine, without TLS."""
    with signing_site(shared_access, folder, allow_http=True, allowed_cidrs=("127.0.0.0/8",)) as site:
        yield site


@pytest.fixture
def mailer(site: Site, folder: Path) -> Mailer:
    """A tenant of this test's own; zeus is there too."""
    mailer = new_mailer(site, folder)
    mailer.also("elsewhere", project="zeus")
    return mailer


@pytest.fixture
def operator(mailer: Mailer) -> str:
    """The credential of an operator of apollo."""
    return mailer.credential("operator")


@dataclass
class Receiver:
    """An HTTP server that keeps what it gets and answers with `status`."""

    url: str
    status: int = 204
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list[tuple[dict[str, str], bytes]])
    peers: set[Any] = field(default_factory=set[Any])
    """From where requests came."""

    def verify(self, *secrets: str) -> None:
        """Raise unless the last request is signed by one of these."""
        headers, body = self.requests[-1]
        Verifier(secrets).verify(headers, body, float(headers["webhook-timestamp"]))


@contextmanager
def receiving(protocol: str = "HTTP/1.0") -> Iterator[Receiver]:
    """Listen until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.peers.add(self.client_address)
            receiver.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/hook")
    thread = threading.Thread(target=server.serve_forever, args=[0.05])
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(RECEIVED_S)


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and reason."""
    return answer.status, answer.reason


def made(mailer: Mailer, operator: str, **wanted: Any) -> dict[str, Any]:
    """A new destination."""
    document = {"destination": "bills", "mode": "push", "url": "https://receiver.example.net/hook"} | wanted
    answer = mailer.post(DESTINATIONS, document, credential=operator)
    assert answer.status == 201, answer.body
    return answer.document


def listed(mailer: Mailer, operator: str) -> dict[str, dict[str, Any]]:
    """The destinations of apollo by name."""
    items = mailer.read(DESTINATIONS, credential=operator).document["items"]
    return {item["destination"]: item for item in items}


def acts(mailer: Mailer) -> list[tuple[str, str | None, str, dict[str, Any]]]:
    """Account, project, action and detail of the acts in the tenant's trail."""
    with as_owner(mailer.site.access) as owner:
        return owner.execute(
            "SELECT account, project, action, detail FROM audit_events"
            " WHERE tenant = %s AND outcome = 'done' ORDER BY id",
            [mailer.tenant],
        ).fetchall()


def test_a_new_destination_shows_its_secrets_once(mailer: Mailer, operator: str) -> None:
    """201 with what its receiver has to know; afterwards it is in no list, no trail and no column."""
    document = made(mailer, operator, scheme="both", maxPending=5)
    secrets = {secret["scheme"]: secret["receiver"] for secret in document.pop("secrets")}
    assert document == {
        "destination": "bills",
        "mode": "push",
        "url": "https://receiver.example.net/hook",
        "maxPending": 5,
    }
    assert secrets["v1"].startswith("whsec_")
    assert secrets["v1a"].startswith("whpk_")
    [(account, project, action, detail)] = acts(mailer)
    assert (account, project, action) == ("owner-1", "apollo", "destination.create")
    assert [secret["scheme"] for secret in detail["secrets"]] == ["v1", "v1a"]
    with as_owner(mailer.site.access) as owner:
        kept = owner.execute("SELECT s::text FROM destination_secrets s WHERE tenant = %s", [mailer.tenant]).fetchall()
    shown = str(acts(mailer)) + mailer.read(DESTINATIONS, credential=operator).body.decode() + str(kept)
    assert all(secret not in shown for secret in secrets.values())
    item = listed(mailer, operator)["bills"]
    assert (item["maxPending"], item["pending"], item["highest"], item["disabledAtMs"]) == (5, 0, 0, None)
    assert mailer.send(delivery("bills")).status == 201
    assert listed(mailer, operator)["bills"]["pending"] == 1


BAD: dict[str, tuple[dict[str, Any], tuple[int, str]]] = {
    "no url": ({"url": ...}, (400, "request_invalid")),
    "no scheme of ours": ({"url": "ftp://receiver.example.net/"}, (400, "request_invalid")),
    "a password in it": ({"url": "https://user:secret@receiver.example.net/"}, (400, "request_invalid")),
    "no name": ({"destination": "No Name"}, (400, "request_invalid")),
    "taken": ({"destination": "orders"}, (409, "conflict")),
    "pull with a url": ({"mode": "pull"}, (400, "request_invalid")),
    "pull without a device": ({"mode": "pull", "url": ...}, (404, "not_found")),
    "no room": ({"maxPending": 0}, (400, "request_invalid")),
    "no such scheme": ({"scheme": "v2"}, (400, "request_invalid")),
}


@pytest.mark.parametrize(("changes", "expected"), BAD.values(), ids=BAD)
def test_what_is_not_made(mailer: Mailer, operator: str, changes: dict[str, Any], expected: tuple[int, str]) -> None:
    """Nothing is left, and no address is repeated."""
    document = {"destination": "bills", "mode": "push", "url": "https://receiver.example.net/hook"} | changes
    wanted = {name: value for name, value in document.items() if value is not ...}
    answer = mailer.post(DESTINATIONS, wanted, credential=operator)
    assert refusal(answer) == expected
    assert b"secret" not in answer.body
    assert "bills" not in listed(mailer, operator)
    assert acts(mailer) == []


def test_a_device_that_has_none_can_get_one(mailer: Mailer, operator: str) -> None:
    """To pull from; it has no secrets and nothing is sent there."""
    with as_owner(mailer.site.access) as owner:
        owner.execute("INSERT INTO streams (tenant, project, producer) VALUES (%s, 'apollo', 'd1')", [mailer.tenant])
    document = {"destination": "d1", "mode": "pull"}
    answer = mailer.post(DESTINATIONS, document, credential=operator)
    assert (answer.status, answer.document["secrets"], answer.document["url"]) == (201, [], None)
    assert refusal(mailer.order(f"{DESTINATIONS}/d1/test", credential=operator)) == (409, "conflict")
    assert refusal(mailer.post(f"{DESTINATIONS}/d1/rotate-secret", {}, credential=operator)) == (409, "conflict")


def test_a_destination_is_changed(mailer: Mailer, operator: str) -> None:
    """What is pushed goes to the new URL under the same secret, and the room is the new one; the rest stays."""
    with receiving() as old, receiving() as new:
        [secret] = made(mailer, operator, url=old.url, maxPending=1)["secrets"]
        change, test = f"{DESTINATIONS}/bills/change", f"{DESTINATIONS}/bills/test"
        before = listed(mailer, operator)["bills"]
        answer = mailer.post(change, {"url": new.url}, credential=operator)
        assert (answer.status, answer.document) == (200, before | {"url": new.url})
        assert mailer.order(test, credential=operator).document["delivered"] is True
        new.verify(secret["receiver"])
        assert old.requests == []
    assert mailer.send(delivery("bills")).status == 201
    assert mailer.send(delivery("bills")).reason == "destination_full"
    assert mailer.post(change, {"maxPending": 2}, credential=operator).document["maxPending"] == 2
    assert mailer.send(delivery("bills")).status == 201
    item = listed(mailer, operator)["bills"]
    assert (item["url"], item["maxPending"], item["pending"]) == (new.url, 2, 2)
    for wrong in ({}, {"url": "ftp://receiver.example.net/"}, {"maxPending": 0}, {"mode": "pull"}):
        assert refusal(mailer.post(change, wrong, credential=operator)) == (400, "request_invalid")
    mailer.also("d1", mode="pull")
    answer = mailer.post(f"{DESTINATIONS}/d1/change", {"url": "https://receiver.example.net/"}, credential=operator)
    assert refusal(answer) == (409, "conflict")
    told = [detail for _, _, action, detail in acts(mailer) if action == "destination.change"]
    assert told == [
        {"destination": "bills", "newUrl": True, "maxPending": 1},
        {"destination": "bills", "newUrl": False, "maxPending": 2},
    ]


def test_disabled_mail_is_held(mailer: Mailer, operator: str) -> None:
    """All of it, what was there and what comes; enabling lets all of it go; again is the same, and is told once."""
    for _ in range(3):
        mailer.send()
    disable, enable = (f"{DESTINATIONS}/orders/{act}" for act in ("disable", "enable"))
    assert mailer.order(disable, credential=operator).status == 204
    assert mailer.order(disable, credential=operator).status == 204
    mailer.send()
    assert [row.lane for row in mailer.destination.rows()] == ["held"] * 4
    item = listed(mailer, operator)["orders"]
    assert (item["disabledReason"], item["pending"]) == ("operator", 4)
    assert mailer.order(enable, credential=operator).status == 204
    assert mailer.order(enable, credential=operator).status == 204
    assert [row.lane for row in mailer.destination.rows()] == ["push"] * 4
    assert [(action, detail) for _, _, action, detail in acts(mailer)] == [
        ("destination.disable", {"destination": "orders"}),
        ("destination.enable", {"destination": "orders"}),
    ]


def test_a_retired_devices_mail_is_held(mailer: Mailer, operator: str) -> None:
    """It gets nothing more, whoever sends; `why` says so, and nobody enables its destination again."""
    device = enrol(mailer.site.access, "d1", tenant=mailer.tenant)
    mailer.also("d1", mode="pull")
    identity = mailer.send(delivery("d1")).document["delivery"]
    assert mailer.order("/v1/admin/devices/d1/retire", credential=operator).status == 204
    mailer.send(delivery("d1"))
    claim = mailer.post("/v1/deliveries/claim", {}, credential=device.token.reveal())
    assert (claim.status, claim.document["items"]) == (200, [])
    item = listed(mailer, operator)["d1"]
    assert (item["disabledReason"], item["pending"], item["nextDueAtMs"]) == ("retired", 2, None)
    why = mailer.shown(identity)["why"]
    assert why["code"] == "destination_disabled"
    assert "its device was retired" in why["sentence"]
    assert refusal(mailer.order(f"{DESTINATIONS}/d1/enable", credential=operator)) == (409, "conflict")
    assert refusal(mailer.post(DESTINATIONS, {"destination": "d1", "mode": "pull"}, credential=operator)) == (
        409,
        "conflict",
    )
    assert [(project, action) for _, project, action, _ in acts(mailer)] == [
        (None, "device.retire"),
        ("apollo", "destination.disable"),
    ]


def test_a_test_goes_the_way_of_all_deliveries(mailer: Mailer, operator: str) -> None:
    """One signed request, which is no delivery; what it comes to is told and changes nothing; a disabled one too."""
    with receiving() as receiver:
        [secret] = made(mailer, operator, url=receiver.url)["secrets"]
        test = f"{DESTINATIONS}/bills/test"
        answer = mailer.order(test, credential=operator)
        assert (answer.status, answer.document) == (200, {"delivered": True, "code": None})
        receiver.verify(secret["receiver"])
        [(_, body)] = receiver.requests
        assert body == b'{"probe":true}'
        for status, code in ((500, "status_5xx"), (302, "status_3xx"), (410, "status_410")):
            receiver.status = status
            answer = mailer.order(test, credential=operator)
            assert answer.document == {"delivered": False, "code": code}
        assert mailer.order(f"{DESTINATIONS}/bills/disable", credential=operator).status == 204
        receiver.status = 204
        assert mailer.order(test, credential=operator).document["delivered"] is True
    assert mailer.order(test, credential=operator).document == {"delivered": False, "code": "connect_failed"}
    item = listed(mailer, operator)["bills"]
    assert (item["highest"], item["disabledReason"], item["lastCode"]) == (0, "operator", None)
    assert [action for _, _, action, _ in acts(mailer)].count("destination.test") == 6


def test_tests_share_one_sender(mailer: Mailer, operator: str) -> None:
    """A second test goes over the first one's connection: however many are made, threads and sockets are bounded."""
    with receiving("HTTP/1.1") as receiver:
        made(mailer, operator, url=receiver.url)
        for _ in range(2):
            answer = mailer.order(f"{DESTINATIONS}/bills/test", credential=operator)
            assert answer.document["delivered"] is True
        assert len(receiver.requests) == 2
        assert len(receiver.peers) == 1


def test_a_test_is_refused_special_addresses(mailer: Mailer, operator: str) -> None:
    """No operator reaches what the deployment did not open."""
    made(mailer, operator, url="http://169.254.169.254/latest/meta-data/")
    answer = mailer.order(f"{DESTINATIONS}/bills/test", credential=operator)
    assert answer.document == {"delivered": False, "code": "address_refused"}


def test_a_new_secret_signs_beside_the_old_one(mailer: Mailer, operator: str) -> None:
    """Both hold for the time of overlap; without one only the new; the receivers' halves are shown once."""
    with receiving() as receiver:
        old = {
            secret["scheme"]: secret for secret in made(mailer, operator, url=receiver.url, scheme="both")["secrets"]
        }
        rotate, test = f"{DESTINATIONS}/bills/rotate-secret", f"{DESTINATIONS}/bills/test"
        answer = mailer.post(rotate, {"scheme": "v1"}, credential=operator)
        [new] = answer.document["secrets"]
        assert (answer.status, new["scheme"]) == (200, "v1")
        mailer.order(test, credential=operator)
        for secret in (old["v1"], old["v1a"], new):
            receiver.verify(secret["receiver"])
        answer = mailer.post(rotate, {"overlapS": 0}, credential=operator)
        newest = {secret["scheme"]: secret for secret in answer.document["secrets"]}
        assert newest.keys() == {"v1", "v1a"}
        mailer.order(test, credential=operator)
        for secret in newest.values():
            receiver.verify(secret["receiver"])
        for secret in (old["v1"], old["v1a"], new):
            with pytest.raises(SignatureInvalid):
                receiver.verify(secret["receiver"])
    assert new["receiver"] not in str(acts(mailer))
    assert refusal(mailer.post(rotate, {"overlapS": 2_592_001}, credential=operator)) == (400, "request_invalid")


def test_destinations_are_listed_a_page_at_a_time(mailer: Mailer, operator: str) -> None:
    """By name, each once, none of another project."""
    for name in ("a1", "a2", "z9"):
        mailer.also(name)
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = mailer.read(f"{DESTINATIONS}?limit=2&after={after}", credential=operator).document
        found += [item["destination"] for item in page["items"]]
        after = page["next"]
    assert found == ["a1", "a2", "orders", "z9"]


CALLS = [
    ("GET", ""),
    ("POST", ""),
    ("POST", "/orders/change"),
    ("POST", "/orders/disable"),
    ("POST", "/orders/enable"),
    ("POST", "/orders/test"),
    ("POST", "/orders/rotate-secret"),
]
DEAD_CALLS = [
    ("GET", ""),
    ("GET", "/count"),
    ("POST", "/00000000-0000-4000-8000-000000000000/redrive"),
    ("POST", "/redrive"),
]


@pytest.mark.parametrize(
    ("method", "path"),
    [(method, DESTINATIONS + path) for method, path in CALLS]
    + [(method, DEAD_LETTERS + path) for method, path in DEAD_CALLS],
)
def test_only_operators_of_the_project(mailer: Mailer, operator: str, method: str, path: str) -> None:
    """Other roles are forbidden; another project's operator, and another tenant's, finds nothing."""
    document = {"destination": "bills", "mode": "pull"} if path == DESTINATIONS else {}
    bodyless = path.endswith(("able", "/test"))

    def ask(credential: str) -> Answer:
        if method == "GET":
            return mailer.read(path, credential=credential)
        return (
            mailer.order(path, credential=credential)
            if bodyless
            else mailer.post(path, document, credential=credential)
        )

    for role in ("sender", "consumer"):
        assert refusal(ask(mailer.credential(role))) == (403, "role_forbidden")
    assert refusal(ask(mailer.credential("operator", "zeus"))) == (404, "not_found")
    assert acts(mailer) == []


def give_up(mailer: Mailer, codes: dict[int, str]) -> list[str]:
    """Let these deliveries, by their sequence, be dead; returns the ids of all."""
    ids = [mailer.send().document["delivery"] for _ in codes]
    for sequence, code in codes.items():
        mailer.destination.end(sequence, "dead", code, attempts=8)
    return ids


def test_dead_letters_are_listed_a_page_at_a_time(mailer: Mailer, operator: str) -> None:
    """The earliest given up first, narrowed by code and destination, counted; no payload, no answer of a receiver."""
    ids = give_up(mailer, {1: "status_5xx", 2: "status_4xx", 3: "status_5xx", 4: "send_timeout", 5: "status_5xx"})
    mailer.send()
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = mailer.read(f"{DEAD_LETTERS}?limit=2&after={after}", credential=operator).document
        found += page["items"]
        after = page["next"]
    assert [(item["delivery"], item["sequence"]) for item in found] == list(zip(ids, range(1, 6), strict=True))
    assert set(found[0]) == {
        "delivery",
        "destination",
        "sequence",
        "eventIdentity",
        "code",
        "attempt",
        "attemptLimit",
        "sealedAtMs",
        "expiresAtMs",
        "deadSinceMs",
    }
    narrowed = mailer.read(f"{DEAD_LETTERS}?code=status_5xx&destination=orders", credential=operator).document
    assert [item["sequence"] for item in narrowed["items"]] == [1, 3, 5]
    counts = [
        mailer.read(f"{DEAD_LETTERS}/count{query}", credential=operator).document["count"]
        for query in ("", "?code=status_5xx", "?destination=orders&code=status_4xx", "?destination=bills")
    ]
    assert counts == [5, 3, 1, 0]
    first_ms, last_ms = found[0]["deadSinceMs"], found[-1]["deadSinceMs"]
    for query, count in (
        (f"?untilMs={first_ms}", 0),
        (f"?sinceMs={last_ms + 1}", 0),
        (f"?sinceMs={first_ms}&untilMs={last_ms + 1}", 5),
    ):
        assert mailer.read(f"{DEAD_LETTERS}/count{query}", credential=operator).document["count"] == count
        assert len(mailer.read(f"{DEAD_LETTERS}{query}", credential=operator).document["items"]) == count
    assert refusal(mailer.read(f"{DEAD_LETTERS}?code=nonsense", credential=operator)) == (400, "request_invalid")
    assert refusal(mailer.read(f"{DEAD_LETTERS}?limit=101", credential=operator)) == (400, "request_invalid")
    assert refusal(mailer.read(f"{DEAD_LETTERS}?after=1.2", credential=operator)) == (400, "request_invalid")


def test_one_is_redriven(mailer: Mailer, operator: str) -> None:
    """It waits again with further attempts, its history kept, under the same id; only a dead one can be."""
    [identity] = give_up(mailer, {1: "status_5xx"})
    redrive = f"{DEAD_LETTERS}/{identity}/redrive"
    answer = mailer.post(redrive, {"budget": 3}, credential=operator)
    assert (answer.status, answer.document) == (200, {"redriven": 1})
    shown = mailer.shown(identity)
    assert (shown["state"], shown["attempt"], shown["attemptLimit"], len(shown["attempts"])) == ("pending", 8, 11, 8)
    assert refusal(mailer.post(redrive, {}, credential=operator)) == (404, "not_found")
    assert acts(mailer) == [
        ("owner-1", "apollo", "dead-letter.redrive", {"delivery": identity, "budget": 3}),
    ]


def test_all_of_a_filter_are_redriven(mailer: Mailer, operator: str) -> None:
    """And no others; with as many attempts as a new delivery gets where no budget is given."""
    ids = give_up(mailer, {1: "status_5xx", 2: "status_4xx", 3: "status_5xx"})
    early = mailer.post(f"{DEAD_LETTERS}/redrive", {"untilMs": 1}, credential=operator)
    assert early.document == {"redriven": 0}
    answer = mailer.post(f"{DEAD_LETTERS}/redrive", {"code": "status_5xx"}, credential=operator)
    assert answer.document == {"redriven": 2}
    assert [mailer.shown(identity)["state"] for identity in ids] == ["pending", "dead", "pending"]
    assert mailer.shown(ids[0])["attemptLimit"] == 16
    assert mailer.post(f"{DEAD_LETTERS}/redrive", {"destination": "bills"}, credential=operator).document == {
        "redriven": 0
    }
    assert mailer.post(f"{DEAD_LETTERS}/redrive", {}, credential=operator).document == {"redriven": 1}
    assert [(action, detail["redriven"]) for _, _, action, detail in acts(mailer)] == [
        ("dead-letter.redrive", 2),
        ("dead-letter.redrive", 1),
    ]

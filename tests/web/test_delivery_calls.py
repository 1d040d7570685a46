"""Senders over HTTP: a delivery is sealed before its answer, once for each key, and tells why it was not sent yet."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from posting import DELIVERIES, Mailer, delivery, new_mailer, signing_site
from served import Site
from wire import Answer, request

from fleet import as_owner, issue
from outgoing import decision, new_destination, require_whole
from postseal.postgres.access import Access

NOW_MS = 1_000
DATA = decision()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's keys lie."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def site(shared_access: Access, folder: Path) -> Iterator[Site]:
    """A server that can sign."""
    with signing_site(shared_access, folder) as site:
        yield site


@pytest.fixture
def mailer(site: Site, folder: Path) -> Mailer:
    """A tenant of this test's own, with a sender of project apollo."""
    return new_mailer(site, folder)


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and reason."""
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status, answer.reason


def test_a_delivery_is_sealed_before_its_answer(mailer: Mailer) -> None:
    """201 with its names, which are the database's; the envelope says what was asked for."""
    wanted = delivery(attemptLimit=3, expiresAtMs=4_000_000_000_000)
    answer = mailer.send(wanted, key="order:0001")
    [row] = require_whole(mailer.destination, mailer.public_key)
    assert (answer.status, answer.document) == (
        201,
        {
            "delivery": str(row.delivery),
            "destination": "orders",
            "sequence": 1,
            "eventIdentity": row.event_identity.hex(),
            "state": "pending",
        },
    )
    assert answer.headers["cache-control"] == "no-store"
    assert row.event["data"] == wanted["data"] | {"kind": "proposal-decision"}
    assert (row.idempotency_key, row.attempt_limit) == ("order:0001", 3)


def test_the_same_again_is_the_original(mailer: Mailer) -> None:
    """200 and the same names, whatever has become of it; other content under its key is a conflict."""
    wanted = delivery()
    first = mailer.send(wanted, key="order:0001").document
    again = mailer.send(wanted | {"expiresAtMs": NOW_MS}, key="order:0001")
    assert (again.status, again.document) == (200, first)
    mailer.destination.end(1, "delivered")
    again = mailer.send(wanted, key="order:0001")
    assert (again.status, again.document) == (200, first | {"state": "delivered"})
    assert refusal(mailer.send(delivery(), key="order:0001")) == (409, "idempotency_conflict")
    assert len(require_whole(mailer.destination, mailer.public_key)) == 1


def test_one_delivery_needs_its_key(mailer: Mailer) -> None:
    """There, once, and within its rule; many have their own."""
    assert refusal(mailer.post(DELIVERIES, delivery())) == (400, "idempotency_key_missing")
    for key in ("short", "with space", "x" * 129, "ünïcödé-ünïcödé".encode().decode("latin-1")):
        assert refusal(mailer.post(DELIVERIES, delivery(), idempotency_key=key)) == (400, "request_invalid")
    twice = request(
        "POST",
        DELIVERIES,
        json.dumps(delivery()).encode(),
        credential=mailer.sender,
        content_type="application/json",
        idempotency_key="order:0001\r\nIdempotency-Key: order:0002",
    )
    assert refusal(mailer.site.ask(twice)) == (400, "request_invalid")
    assert mailer.destination.highest() == 0


BAD: dict[str, tuple[object, tuple[int, str]]] = {
    "no JSON": (b"{", (400, "request_invalid")),
    "no object": ([delivery()], (400, "request_invalid")),
    "nothing": ({}, (400, "request_invalid")),
    "an unknown member": (delivery(priority=1), (400, "request_invalid")),
    "no data": ({"destination": "orders", "kind": "heartbeat"}, (400, "request_invalid")),
    "no name": (delivery("No Name"), (400, "request_invalid")),
    "another kind inside": (delivery(data=DATA | {"kind": "heartbeat"}), (400, "request_invalid")),
    "no attempts": (delivery(attemptLimit=0), (400, "request_invalid")),
    "too many attempts": (delivery(attemptLimit=101), (400, "request_invalid")),
    "a time behind all times": (delivery(expiresAtMs=4_102_444_800_001), (400, "request_invalid")),
    "expired": (delivery(expiresAtMs=NOW_MS), (400, "request_invalid")),
    "both forms": (delivery(deliveries=[]), (400, "request_invalid")),
    "none of many": ({"deliveries": []}, (400, "request_invalid")),
    "many without keys": ({"deliveries": [delivery()]}, (400, "request_invalid")),
    "an unknown kind": (delivery(kind="nothing"), (422, "payload_invalid")),
    "a float": (delivery(data={"revision": 1.5}), (422, "payload_invalid")),
    "free text": (delivery(data=DATA | {"note": "x"}), (422, "payload_invalid")),
    "too much": (delivery(data=DATA | {"note": "x" * 5000}), (422, "payload_invalid")),
    "a depth bomb": (
        b'{"destination":"orders","kind":"x","data":' + b"[" * 9999 + b"]" * 9999 + b"}",
        (400, "request_invalid"),
    ),
    "nowhere": (delivery("nowhere"), (404, "not_found")),
}


@pytest.mark.parametrize(("document", "expected"), BAD.values(), ids=BAD)
def test_what_is_not_taken(mailer: Mailer, document: object, expected: tuple[int, str]) -> None:
    """Each has its reason, shows nothing that was sent, and uses no number."""
    assert refusal(mailer.post(DELIVERIES, document, idempotency_key="order:0001")) == expected
    assert mailer.destination.highest() == 0


def test_kind_may_stand_in_the_data_too(mailer: Mailer) -> None:
    """If it is the same."""
    assert mailer.send(delivery(data=DATA)).status == 201


def test_a_full_destination_says_when_to_come_again(mailer: Mailer) -> None:
    """429 with how much there is room for, until something leaves."""
    small = mailer.also("small", max_pending=1)
    assert mailer.send(delivery("small")).status == 201
    answer = mailer.send(delivery("small"))
    assert refusal(answer) == (429, "destination_full")
    assert answer.document["retryable"] is True
    told = [answer.headers[name] for name in ("retry-after", "ratelimit-policy", "ratelimit")]
    assert told == ["5", '"pending";q=1', '"pending";r=0;t=5']
    small.end(1, "delivered")
    assert mailer.send(delivery("small")).status == 201


def test_without_a_signing_key_nothing_is_sealed(site: Site) -> None:
    """503, to be tried again: what an operator mends makes the same request succeed."""
    tenant = f"tenant-{uuid4()}"
    destination = new_destination(site.access, tenant=tenant)
    mailer = Mailer(
        site, Path(), tenant, destination, issue(site.access, tenant, None, ["apollo"], "sender").reveal(), b""
    )
    answer = mailer.send()
    assert refusal(answer) == (503, "signing_unavailable")
    assert (answer.document["retryable"], answer.headers["retry-after"]) == (True, "5")
    assert destination.highest() == 0


def test_many(mailer: Mailer) -> None:
    """200, and for each in order what it would have been answered alone; each refusal has a correlation id."""
    mailer.also("small", max_pending=1)
    known = delivery()
    first = mailer.send(known, key="order:0001").document
    wanted = [
        delivery() | {"idempotencyKey": "order:0002"},
        known | {"idempotencyKey": "order:0001"},
        delivery() | {"idempotencyKey": "order:0001"},
        delivery("small") | {"idempotencyKey": "order:0001"},
        delivery("small") | {"idempotencyKey": "order:0002"},
        delivery("nowhere") | {"idempotencyKey": "order:0001"},
        delivery(kind="nothing") | {"idempotencyKey": "order:0003"},
        delivery() | {"idempotencyKey": "order:0004"},
    ]
    answer = mailer.post(DELIVERIES, {"deliveries": wanted})
    items = answer.document["items"]
    assert answer.status == 200
    assert [item["status"] for item in items] == [201, 200, 409, 201, 429, 404, 422, 201]
    assert items[1] == first | {"status": 200}
    assert [item["sequence"] for item in items if "sequence" in item] == [2, 1, 1, 3]
    problems = [item for item in items if "reason" in item]
    assert [item["reason"] for item in problems] == [
        "idempotency_conflict",
        "destination_full",
        "not_found",
        "payload_invalid",
    ]
    assert len({item["correlationId"] for item in problems}) == 4
    assert len(require_whole(mailer.destination, mailer.public_key)) == 3


def test_a_hundred_large_ones(site: Site, folder: Path) -> None:
    """The largest call that there is is taken whole; one more is refused whole."""
    mailer = new_mailer(site, folder)
    wanted = [delivery() | {"idempotencyKey": f"{number:0128}"} for number in range(101)]
    assert refusal(mailer.post(DELIVERIES, {"deliveries": wanted})) == (400, "request_invalid")
    answer = mailer.post(DELIVERIES, {"deliveries": wanted[:100]})
    assert [item["sequence"] for item in answer.document["items"]] == list(range(1, 101))
    assert len(require_whole(mailer.destination, mailer.public_key)) == 100
    assert refusal(mailer.post(DELIVERIES, b" " * (1 << 20) + b"{}")) == (413, "body_too_large")


def test_nothing_crosses(mailer: Mailer, site: Site, folder: Path) -> None:
    """Another tenant's or project's destinations and deliveries are not there; other roles may not even ask."""
    other = new_mailer(site, folder)
    theirs = other.send().document["delivery"]
    mine = mailer.send().document["delivery"]
    wider = mailer.credential("sender", "zeus")
    for credential, identity in ((mailer.sender, theirs), (wider, mine), (mailer.sender, str(uuid4()))):
        assert refusal(mailer.read(f"{DELIVERIES}/{identity}", credential=credential)) == (404, "not_found")
        assert refusal(mailer.order(f"{DELIVERIES}/{identity}/cancel", credential=credential)) == (404, "not_found")
    assert refusal(mailer.send(credential=wider)) == (404, "not_found")
    mailer.also("elsewhere", project="zeus")
    assert refusal(mailer.send(delivery("elsewhere"))) == (404, "not_found")
    both = mailer.credential("sender", "apollo", "zeus")
    wanted = delivery("elsewhere")
    sent = mailer.post("/v1/projects/zeus/deliveries", wanted, credential=both, idempotency_key="order:0001")
    of_zeus = sent.document["delivery"]
    for credential, project, identity in ((mailer.sender, "apollo", of_zeus), (both, "zeus", mine)):
        path = f"/v1/projects/{project}/deliveries/{identity}"
        assert refusal(mailer.read(path, credential=credential)) == (404, "not_found")
        assert refusal(mailer.order(f"{path}/cancel", credential=credential)) == (404, "not_found")
    for role in ("consumer", "operator"):
        credential = mailer.credential(role)
        assert refusal(mailer.send(credential=credential)) == (403, "role_forbidden")
        assert refusal(mailer.read(f"{DELIVERIES}/{mine}", credential=credential)) == (403, "role_forbidden")
    assert mailer.shown(mine)["state"] == "pending"


def test_what_is_shown_of_a_new_one(mailer: Mailer) -> None:
    """All its names and times; it waits for its turn."""
    made = mailer.send(delivery(expiresAtMs=4_000_000_000_000), key="order:0001").document
    shown = mailer.shown(made["delivery"])
    assert shown == {
        "delivery": made["delivery"],
        "destination": "orders",
        "idempotencyKey": "order:0001",
        "state": "pending",
        "why": {"code": "waits_for_turn", "sentence": "It waits for its turn."},
        "code": None,
        "sequence": 1,
        "eventIdentity": made["eventIdentity"],
        "attempt": 0,
        "attemptLimit": 8,
        "nextAttemptAtMs": shown["nextAttemptAtMs"],
        "createdAtMs": shown["createdAtMs"],
        "expiresAtMs": 4_000_000_000_000,
        "settledAtMs": None,
        "attempts": [],
    }


LEASED = "stage = 'leased', attempt = 1, token = gen_random_uuid(), due_at = now() + interval '1 minute'"
WAITS: dict[str, tuple[str | None, dict[str, Any], str, str | None]] = {
    "it is out": (LEASED, {}, "delivering", "being_delivered"),
    "its attempt failed": (
        "stage = 'retry', attempt = 2, code = 'status_5xx', due_at = now() + interval '1 hour'",
        {},
        "pending",
        "backing_off",
    ),
    "its time came again": (
        "stage = 'retry', attempt = 2, code = 'status_5xx', due_at = now() - interval '1 second'",
        {},
        "pending",
        "waits_for_turn",
    ),
    "its device has to pull": (None, {"mode": "pull"}, "pending", "waits_for_device"),
    "it expired": ("expires_at = now() - interval '1 second'", {}, "expired", None),
}


@pytest.mark.parametrize(("changes", "options", "state", "code"), WAITS.values(), ids=WAITS)
def test_why_it_was_not_sent_yet(
    mailer: Mailer, changes: str | None, options: dict[str, Any], state: str, code: str | None
) -> None:
    """A stable word and a sentence; nothing once it has ended."""
    other = mailer.also("other", **options)
    identity = mailer.send(delivery("other")).document["delivery"]
    if changes is not None:
        other.queued(1, changes)
    shown = mailer.shown(identity)
    assert (shown["state"], (shown["why"] or {"code": None})["code"]) == (state, code)
    assert shown["why"] is None or shown["why"]["sentence"].endswith(".")


@pytest.mark.parametrize(("reason", "words"), [("operator", "by an operator"), ("gone", "it is gone")])
def test_a_disabled_destination_is_named(mailer: Mailer, reason: str, words: str) -> None:
    """Before all else: nothing moves until it is enabled."""
    identity = mailer.send().document["delivery"]
    mailer.destination.disable(reason)
    why = mailer.shown(identity)["why"]
    assert why["code"] == "destination_disabled"
    assert words in why["sentence"]


@pytest.mark.parametrize("state", ["delivered", "dead", "expired", "cancelled"])
def test_what_has_ended(mailer: Mailer, state: str) -> None:
    """How, when, and after which attempts; it cannot be cancelled then, and is not if it was."""
    identity = mailer.send().document["delivery"]
    mailer.destination.end(1, state, "status_5xx" if state == "dead" else None, attempts=2)
    shown = mailer.shown(identity)
    assert (shown["state"], shown["why"], shown["nextAttemptAtMs"]) == (state, None, None)
    assert abs(shown["settledAtMs"] - shown["createdAtMs"]) < 60_000
    failed = [(attempt["attempt"], attempt["code"]) for attempt in shown["attempts"]]
    assert failed == ([(1, "status_5xx"), (2, "status_5xx")] if state == "dead" else [])
    answer = mailer.order(f"{DELIVERIES}/{identity}/cancel")
    assert answer.status == (204 if state == "cancelled" else 409)
    assert mailer.shown(identity)["state"] == state


def test_cancelling(mailer: Mailer) -> None:
    """204, again too; it is never sent, makes room, and stands in the trail once; what is out cannot be taken back."""
    identity = mailer.send().document["delivery"]
    out = mailer.send().document["delivery"]
    mailer.destination.queued(2, LEASED)
    cancel = f"{DELIVERIES}/{identity}/cancel"
    assert [mailer.order(cancel).status for _ in range(2)] == [204, 204]
    assert mailer.shown(identity)["state"] == "cancelled"
    assert refusal(mailer.order(f"{DELIVERIES}/{out}/cancel")) == (409, "conflict")
    with as_owner(mailer.site.access) as owner:
        acts = owner.execute(
            "SELECT account, project, detail FROM audit_events WHERE tenant = %s AND action = 'delivery.cancel'",
            [mailer.tenant],
        ).fetchall()
        settled = owner.execute(
            "SELECT settled FROM destination_health WHERE stream = %s", [mailer.destination.stream]
        ).fetchall()
    assert acts == [("owner-1", "apollo", {"delivery": identity, "ended": "cancelled"})]
    assert settled == [(1,)]


def test_intents_are_shown_and_cancelled(mailer: Mailer) -> None:
    """What an application left and nobody sealed yet is `unsealed`, says why, and can be cancelled."""
    fresh, stuck, lost = str(uuid4()), str(uuid4()), str(uuid4())
    with as_owner(mailer.site.access) as owner:
        for identity, code, due_at in (
            (fresh, None, "now"),
            (stuck, "destination_unknown", "now"),
            (lost, "expired", "infinity"),
        ):
            owner.execute(
                "INSERT INTO intents (tenant, delivery, project, destination, idempotency_key, data, code, due_at,"
                " expires_at) VALUES (%s, %s, 'apollo', 'nowhere', 'order:0001', '{}', %s, %s, %s)",
                [mailer.tenant, identity, code, due_at, datetime.now(UTC) + timedelta(days=1)],
            )
    shown = mailer.shown(fresh)
    assert (shown["state"], shown["why"]["code"], shown["sequence"]) == ("unsealed", "not_sealed", None)
    shown = mailer.shown(stuck)
    assert (shown["state"], shown["code"], shown["why"]["code"]) == (
        "unsealed",
        "destination_unknown",
        "sealing_failed",
    )
    shown = mailer.shown(lost)
    assert (shown["state"], shown["code"], shown["why"]["code"]) == ("unsealed", "expired", "sealing_given_up")
    assert mailer.order(f"{DELIVERIES}/{stuck}/cancel").status == 204
    assert refusal(mailer.read(f"{DELIVERIES}/{stuck}")) == (404, "not_found")

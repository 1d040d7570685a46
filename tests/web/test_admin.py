"""`/v1/admin/…`: an operator acts in its tenant, on its projects, and nowhere else; every act is in the trail."""

import json
import time
from typing import Any
from uuid import uuid4

import pytest
from served import Site
from test_enrolments import base64url
from wire import Answer, get, post, request

from fleet import Device, as_owner, enrol, issue
from postseal.envelope import ed25519
from postseal.envelope.enrolment import prove
from postseal.web.calls import MAX_BODY_BYTES

ADMIN = "/v1/admin"


@pytest.fixture
def tenant() -> str:
    """A tenant of this test's own."""
    return f"tenant-{uuid4()}"


@pytest.fixture
def device(site: Site, tenant: str) -> Device:
    """A device in project apollo; zeus is there too, with a device of its own."""
    enrol(site.access, "elsewhere", tenant=tenant, project="zeus")
    return enrol(site.access, "device-01", tenant=tenant)


@pytest.fixture
def operator(site: Site, tenant: str, device: Device) -> str:
    """The credential of an operator of project apollo; its account is owner-1."""
    return operator_of(site, tenant, "apollo")


def operator_of(site: Site, tenant: str, *projects: str) -> str:
    """An operator of these projects."""
    return issue(site.access, tenant, None, list(projects), "operator").reveal()


def read(site: Site, operator: str, path: str) -> Answer:
    """A GET."""
    return site.ask(get(ADMIN + path, operator))


def act(site: Site, operator: str, path: str, document: object = None, **headers: str) -> Answer:
    """A POST, with a document where there is one."""
    if document is None:
        return site.ask(request("POST", ADMIN + path, b"", credential=operator))
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    headers = {"content_type": "application/json", **headers}
    return site.ask(request("POST", ADMIN + path, body, credential=operator, **headers))


def acts(site: Site, tenant: str) -> list[tuple[str, str | None, str, dict[str, Any]]]:
    """Account, project, action and detail of the acts in a tenant's trail."""
    with as_owner(site.access) as owner:
        query = (
            "SELECT account, project, action, detail FROM audit_events"
            " WHERE tenant = %s AND outcome = 'done' ORDER BY id"
        )
        return owner.execute(query, [tenant]).fetchall()


def open_in(site: Site, device: Device, project: str) -> None:
    """Give a device a stream in a further project."""
    with as_owner(site.access) as owner:
        owner.execute("INSERT INTO projects VALUES (%s, %s) ON CONFLICT DO NOTHING", [device.tenant, project])
        owner.execute(
            "INSERT INTO streams (tenant, project, producer) VALUES (%s, %s, %s)",
            [device.tenant, project, device.name],
        )


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and reason."""
    return answer.status, answer.reason


CALLS = [
    ("GET", "/projects"),
    ("GET", "/devices"),
    ("POST", "/devices"),
    ("POST", "/devices/device-01/retire"),
    ("GET", "/credentials"),
    ("POST", "/credentials"),
    ("POST", "/credentials/00000000-0000-4000-8000-000000000000/revoke"),
    ("GET", "/keys"),
    ("POST", "/keys/" + "A" * 43 + "/retire"),
    ("POST", "/keys/" + "A" * 43 + "/revoke"),
    ("POST", "/keys/" + "A" * 43 + "/remove"),
    ("POST", "/keys"),
    ("GET", "/projects/apollo/streams"),
    ("GET", "/projects/apollo/streams/device-01"),
    ("POST", "/projects/apollo/streams/device-01/raise-floor"),
    ("GET", "/retention"),
    ("POST", "/retention"),
    ("POST", "/projects/apollo/retention"),
    ("GET", "/holds"),
    ("POST", "/holds"),
    ("POST", "/holds/case-17/release"),
    ("GET", "/audit"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_only_operators_are_let_in(site: Site, method: str, path: str) -> None:
    """403 for every other role, 401 without a credential, before anything else of the request is looked at."""
    tokens = [issue(site.access, "acme", None, ["apollo"], role).reveal() for role in ("consumer", "sender")]
    for token in (site.device.token.reveal(), *tokens):
        answer = site.ask(request(method, ADMIN + path, credential=token))
        assert refusal(answer) == (403, "role_forbidden")
    assert refusal(site.ask(request(method, ADMIN + path))) == (401, "unauthenticated")


def test_projects(site: Site, operator: str) -> None:
    """Those of the credential, though the tenant has more."""
    answer = read(site, operator, "/projects")
    assert [item["project"] for item in answer.document["items"]] == ["apollo"]
    assert answer.headers["cache-control"] == "no-store"


def test_an_invited_device_enrols(site: Site, operator: str, tenant: str) -> None:
    """201 with a code that no cache keeps and no trail has; it makes a device that can write."""
    answer = act(site, operator, "/devices", {"device": "fresh", "projects": ["apollo"], "account": "ops-2"})
    assert answer.status == 201
    assert answer.headers["cache-control"] == "no-store"
    code = answer.document["code"]
    seed = ed25519.generate()
    public_key = ed25519.public_key(seed)
    proof = prove(seed, code=code, device="fresh", keyid=ed25519.thumbprint(public_key), tenant=tenant)
    body = {"code": code, "publicKey": base64url(public_key), "proof": base64url(proof)}
    raw = request("POST", "/v1/enrolments", json.dumps(body).encode(), content_type="application/json")
    assert site.ask(raw).status == 200
    listed = {item["device"]: item for item in read(site, operator, "/devices").document["items"]}
    assert set(listed) == {"device-01", "fresh"}
    assert (listed["fresh"]["account"], listed["fresh"]["projects"]) == ("ops-2", ["apollo"])
    [(account, project, action, detail), _] = acts(site, tenant)
    assert (account, project, action, detail["device"]) == ("owner-1", None, "device.invite", "fresh")
    assert code not in str(acts(site, tenant))


def test_invitations_stay_within_the_projects(site: Site, operator: str, tenant: str, device: Device) -> None:
    """A foreign or unknown project is not found; ids are used once; a key is added only where all streams are ours."""
    open_in(site, enrol(site.access, "shared", tenant=tenant), "zeus")
    before = acts(site, tenant)
    expected = [
        ({"device": "new", "projects": ["zeus"]}, (404, "not_found")),
        ({"device": "new", "projects": ["apollo", "nowhere"]}, (404, "not_found")),
        ({"device": device.name, "projects": ["apollo"]}, (409, "conflict")),
        ({"device": "controlplane", "projects": ["apollo"]}, (400, "request_invalid")),
        ({"device": "nobody", "projects": ["apollo"], "addsKey": True}, (404, "not_found")),
        ({"device": "elsewhere", "projects": ["apollo"], "addsKey": True}, (404, "not_found")),
        ({"device": "shared", "projects": ["apollo"], "addsKey": True}, (403, "role_forbidden")),
    ]
    assert [refusal(act(site, operator, "/devices", document)) for document, _ in expected] == [e for _, e in expected]
    assert acts(site, tenant) == before
    assert (
        act(site, operator, "/devices", {"device": device.name, "projects": ["apollo"], "addsKey": True}).status == 201
    )


def test_devices_are_listed_a_page_at_a_time(site: Site, operator: str, tenant: str) -> None:
    """By id, each once, none that is only elsewhere, and of a shared one only the projects that are the operator's."""
    for number in range(4):
        open_in(site, enrol(site.access, f"paged-{number}", tenant=tenant), "zeus")
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = read(site, operator, f"/devices?limit=2&after={after}").document
        assert len(page["items"]) <= 2
        found += page["items"]
        after = page["next"]
    assert [item["device"] for item in found] == ["device-01", *(f"paged-{number}" for number in range(4))]
    assert all(item["projects"] == ["apollo"] for item in found)


def test_a_retired_device_brings_nothing_new(site: Site, operator: str, tenant: str, device: Device) -> None:
    """204, its stream refuses, once and for all."""
    assert act(site, operator, "/devices/device-01/retire").status == 204
    assert site.ask(post(device.token.reveal(), device.envelope(1))).reason == "stream_retired"
    assert refusal(act(site, operator, "/devices/device-01/retire")) == (409, "conflict")
    [item] = read(site, operator, "/devices").document["items"]
    assert item["retiredAtMs"] >= item["createdAtMs"]
    assert acts(site, tenant) == [("owner-1", None, "device.retire", {"device": "device-01"})]


def test_acts_do_not_reach_beyond_the_projects(site: Site, operator: str, tenant: str, device: Device) -> None:
    """What is elsewhere is not found; what is shared with another project is forbidden; a wider credential may."""
    shared = enrol(site.access, "shared", tenant=tenant)
    open_in(site, shared, "zeus")
    foreign = enrol(site.access, f"foreign-{uuid4()}", tenant=f"tenant-{uuid4()}")
    with as_owner(site.access) as owner:
        row = owner.execute("SELECT keyid FROM keys WHERE tenant = %s AND device = 'elsewhere'", [tenant]).fetchone()
    assert row is not None
    wide = issue(site.access, tenant, None, ["apollo", "zeus"], "consumer")
    zeus = issue(site.access, tenant, None, ["zeus"], "consumer")
    missing = [
        "/devices/elsewhere/retire",
        "/devices/nobody/retire",
        f"/devices/{foreign.name}/retire",
        f"/keys/{row[0]}/revoke",
        f"/keys/{foreign.keyid}/revoke",
        f"/keys/{foreign.keyid}/retire",
        f"/keys/{foreign.keyid}/remove",
        f"/credentials/{zeus.credential_id}/revoke",
        f"/credentials/{foreign.token.credential_id}/revoke",
        f"/credentials/{uuid4()}/revoke",
    ]
    forbidden = [
        "/devices/shared/retire",
        f"/keys/{shared.keyid}/revoke",
        f"/keys/{shared.keyid}/retire",
        f"/keys/{shared.keyid}/remove",
        f"/credentials/{wide.credential_id}/revoke",
    ]
    assert {refusal(act(site, operator, path)) for path in missing} == {(404, "not_found")}
    assert {refusal(act(site, operator, path)) for path in forbidden} == {(403, "role_forbidden")}
    floor = {"floor": 1, "reason": "why"}
    for path in ("/projects/zeus/streams/elsewhere", "/projects/nowhere/streams/x"):
        assert refusal(read(site, operator, path)) == (404, "not_found")
        assert refusal(act(site, operator, f"{path}/raise-floor", floor)) == (404, "not_found")
    for path in ("/projects/zeus/streams", "/keys?device=elsewhere", "/keys?device=nobody", "/audit?project=zeus"):
        assert refusal(read(site, operator, path)) == (404, "not_found")
    assert acts(site, tenant) == []
    both = operator_of(site, tenant, "apollo", "zeus")
    assert [act(site, both, path).status for path in forbidden[1:]] == [204, 409, 204, 204]
    assert act(site, both, forbidden[0]).status == 204


def test_a_created_credential_works(site: Site, operator: str, tenant: str, device: Device) -> None:
    """It reads what it was made for, is shown once, and is of an account that the maker names."""
    answer = act(site, operator, "/credentials", {"role": "consumer", "projects": ["apollo"], "account": "reader"})
    assert answer.status == 201
    assert answer.headers["cache-control"] == "no-store"
    made = answer.document
    assert (made["role"], made["account"], made["projects"]) == ("consumer", "reader", ["apollo"])
    assert site.ask(get("/v1/projects/apollo/streams", made["credential"])).status == 200
    listed = read(site, operator, "/credentials")
    assert made["credential"].rpartition("_")[2] not in listed.body.decode()
    assert made["credentialId"] in {item["credentialId"] for item in listed.document["items"]}
    assert made["credential"] not in str(acts(site, tenant))


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"role": "operator", "projects": ["apollo"]}, (400, "request_invalid")),
        ({"role": "device", "projects": ["apollo"]}, (400, "request_invalid")),
        ({"role": "consumer", "projects": []}, (400, "request_invalid")),
        ({"role": "consumer", "projects": ["apollo", "zeus"]}, (404, "not_found")),
        ({"role": "consumer", "projects": ["nowhere"]}, (404, "not_found")),
        ({"role": "consumer", "projects": ["apollo"], "account": "Not An Id"}, (400, "request_invalid")),
    ],
)
def test_credentials_stay_within_the_operators_own(
    site: Site, operator: str, tenant: str, document: dict[str, Any], expected: tuple[int, str]
) -> None:
    """No further project, and no role that could make more of them."""
    assert refusal(act(site, operator, "/credentials", document)) == expected
    assert acts(site, tenant) == []


def test_credentials_are_listed_a_page_at_a_time(site: Site, operator: str, tenant: str) -> None:
    """Oldest first, devices' included, each once; of a wider one only the projects that are the operator's."""
    wide = issue(site.access, tenant, None, ["apollo", "zeus"], "sender")
    issue(site.access, tenant, None, ["zeus"], "sender")
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = read(site, operator, f"/credentials?limit=1&after={after}").document
        found += page["items"]
        after = page["next"]
    assert [item["role"] for item in found] == ["device", "operator", "sender"]
    assert found[-1]["credentialId"] == str(wide.credential_id)
    assert all(item["projects"] == ["apollo"] for item in found)


def test_a_revoked_credential_is_refused(site: Site, operator: str, tenant: str) -> None:
    """204, then it opens nothing; a second time there is none to revoke."""
    consumer = issue(site.access, tenant, None, ["apollo"], "consumer")
    path = f"/credentials/{consumer.credential_id}/revoke"
    assert act(site, operator, path).status == 204
    assert site.ask(get("/v1/projects/apollo/streams", consumer.reveal())).reason == "unauthenticated"
    assert refusal(act(site, operator, path)) == (404, "not_found")
    detail = {"credentialId": str(consumer.credential_id)}
    assert acts(site, tenant) == [("owner-1", None, "credential.revoke", detail)]


@pytest.mark.parametrize(
    ("verb", "reason", "state"), [("retire", "key_retired", "verify-only"), ("revoke", "key_revoked", "revoked")]
)
def test_a_key_brings_nothing_new(
    site: Site, operator: str, device: Device, tenant: str, verb: str, reason: str, state: str
) -> None:
    """204, and its next envelope is refused; a second time is a conflict."""
    assert act(site, operator, f"/keys/{device.keyid}/{verb}").status == 204
    assert site.ask(post(device.token.reveal(), device.envelope(1))).reason == reason
    assert refusal(act(site, operator, f"/keys/{device.keyid}/{verb}")) == (409, "conflict")
    [item] = read(site, operator, "/keys").document["items"]
    assert (item["keyid"], item["device"], item["state"]) == (device.keyid, "device-01", state)
    [(account, _, action, _)] = acts(site, tenant)
    assert (account, action) == ("owner-1", f"key.{verb}")


def test_an_operator_speaks_for_a_key(site: Site, operator: str, device: Device, tenant: str) -> None:
    """201, and it signs; with an overlap the others retire; nobody speaks for a device of another project."""
    first, second = ed25519.generate(), ed25519.generate()
    added = act(site, operator, "/keys", {"device": "device-01", "publicKey": base64url(ed25519.public_key(first))})
    keyid = ed25519.thumbprint(ed25519.public_key(first))
    assert (added.status, added.document) == (201, {"keyid": keyid, "retiring": [], "acceptUntilMs": None})
    body = {"device": "device-01", "publicKey": base64url(ed25519.public_key(second)), "overlapS": 0}
    rotated = act(site, operator, "/keys", body)
    assert sorted(rotated.document["retiring"]) == sorted([device.keyid, keyid])
    assert site.ask(post(device.token.reveal(), device.envelope(1, seed=first))).reason == "key_retired"
    assert site.ask(post(device.token.reveal(), device.envelope(1, seed=second))).status == 201
    for document, expected in [
        (body, (409, "conflict")),
        (body | {"device": "elsewhere"}, (404, "not_found")),
        (body | {"device": "nobody"}, (404, "not_found")),
        (body | {"publicKey": "A" * 43}, (400, "request_invalid")),
        (body | {"publicKey": "=" * 43}, (400, "request_invalid")),
    ]:
        assert refusal(act(site, operator, "/keys", document)) == expected
    assert [action for _, _, action, _ in acts(site, tenant)] == ["key.register", "key.rotate"]


def test_a_key_is_removed_once_nothing_holds_it(site: Site, operator: str, device: Device, tenant: str) -> None:
    """409 names what holds it, and so does the list; then 204, and its envelopes are `key_unknown`."""
    token = device.token.reveal()
    assert site.ask(post(token, device.envelope(1))).status == 201
    refused = act(site, operator, f"/keys/{device.keyid}/remove")
    assert refusal(refused) == (409, "conflict")
    assert "it is active" in refused.document["detail"]
    [item] = read(site, operator, "/keys").document["items"]
    assert (item["obstacles"], item["freeAtMs"]) == (["active", "payload", "window"], None)
    assert abs(item["lastAcceptedAtMs"] / 1000 - time.time()) < 60
    assert act(site, operator, f"/keys/{device.keyid}/retire").status == 204
    with as_owner(site.access) as owner:
        owner.execute(
            "UPDATE key_uses SET last_at = now() - interval '91 days', kept_until = now() - interval '1 day'"
            " WHERE tenant = %s",
            [tenant],
        )
    [item] = read(site, operator, "/keys").document["items"]
    assert (item["obstacles"], item["freeAtMs"]) == ([], None)
    assert act(site, operator, f"/keys/{device.keyid}/remove").status == 204
    assert site.ask(post(token, device.envelope(2))).reason == "key_unknown"
    [item] = read(site, operator, "/keys").document["items"]
    assert item["state"] == "removed"


def test_keys_are_listed_a_page_at_a_time(site: Site, operator: str, tenant: str, device: Device) -> None:
    """By device; of one device where it is named; none of a device that is only elsewhere."""
    others = [enrol(site.access, f"keyed-{number}", tenant=tenant) for number in range(3)]
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = read(site, operator, f"/keys?limit=2&after={after}").document
        found += [item["keyid"] for item in page["items"]]
        after = page["next"]
    assert found == [device.keyid, *(other.keyid for other in others)]
    [item] = read(site, operator, "/keys?device=keyed-1").document["items"]
    assert item["keyid"] == others[1].keyid


def test_a_floor_is_raised(site: Site, operator: str, tenant: str, device: Device) -> None:
    """With a reason that the trail keeps; above the highest sequence only by force."""
    token = device.token.reveal()
    for sequence in (1, 4):
        site.ask(post(token, device.envelope(sequence)))
    path = "/projects/apollo/streams/device-01"
    standing = read(site, operator, path).document
    assert standing["missing"] == [{"from": 2, "to": 3}]
    assert read(site, operator, "/projects/apollo/streams").document == {"items": [standing], "next": None}
    raised = act(site, operator, f"{path}/raise-floor", {"floor": 3, "reason": "2 and 3 are lost"})
    assert (raised.status, raised.document["contiguousThrough"], raised.document["replayFloor"]) == (200, 4, 3)
    assert site.ask(post(token, device.envelope(2))).reason == "below_replay_floor"
    beyond = {"floor": 9, "reason": "start again at 10"}
    assert refusal(act(site, operator, f"{path}/raise-floor", beyond)) == (409, "conflict")
    assert refusal(act(site, operator, f"{path}/raise-floor", beyond | {"floor": 3})) == (409, "conflict")
    assert refusal(act(site, operator, f"{path}/raise-floor", beyond | {"reason": "a\nb"})) == (400, "request_invalid")
    forced = act(site, operator, f"{path}/raise-floor", beyond | {"force": True})
    assert forced.document["nextSequence"] == 10
    (account, project, action, detail), (_, _, _, second) = acts(site, tenant)
    assert (account, project, action) == ("owner-1", "apollo", "stream.raise-floor")
    assert detail["reason"] == "2 and 3 are lost"
    assert (second["from"], second["to"], second["forced"]) == (3, 9, True)


def test_the_trail_of_the_operators_projects(site: Site, operator: str, tenant: str, device: Device) -> None:
    """Events of its projects alone; those of no project only for who has all that the tenant has."""
    token = device.token.reveal()
    for sequence in (1, 2, 2):
        site.ask(post(token, device.envelope(sequence)))
    assert site.ask(post(token, b"{}")).reason == "envelope_malformed"
    with as_owner(site.access) as owner:
        owner.execute(
            "INSERT INTO audit_events (tenant, project, account, action, outcome, correlation_id)"
            " VALUES (%s, 'zeus', 'owner-1', 'envelope', 'accepted', gen_random_uuid())",
            [tenant],
        )

    def seen(credential: str, query: str = "") -> list[tuple[str | None, str]]:
        page = read(site, credential, f"/audit{query}").document
        return [(item["project"], item["reason"] or item["outcome"]) for item in page["items"]]

    own = [("apollo", "accepted"), ("apollo", "accepted"), ("apollo", "sequence_conflict")]
    assert seen(operator) == own
    both = operator_of(site, tenant, "apollo", "zeus")
    assert seen(both) == [*own, (None, "envelope_malformed"), ("zeus", "accepted")]
    assert seen(both, "?project=zeus") == [("zeus", "accepted")]
    assert seen(operator, "?outcome=accepted") == own[:2]
    assert seen(operator, "?reason=sequence_conflict") == own[2:]
    assert seen(operator, "?sinceMs=4102444800000") == []
    ids = [item["id"] for item in read(site, operator, "/audit").document["items"]]
    assert seen(operator, f"?after={ids[0]}&limit=1") == own[1:2]
    assert seen(operator, f"?before={ids[2]}&limit=1") == own[1:2]
    assert seen(operator, "?limit=1") == own[2:]
    assert refusal(read(site, operator, "/audit?before=1&after=1")) == (400, "request_invalid")
    assert refusal(read(site, operator, "/audit?outcome=%00")) == (400, "request_invalid")


SECRET = "canary-in-a-body"
GOOD = {"role": "consumer", "projects": ["apollo"]}


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 5000,
        SECRET.encode(),
        GOOD | {SECRET: 1},
        GOOD | {"role": SECRET},
        GOOD | {"account": SECRET.upper()},
        GOOD | {"account": ["x"]},
        {"role": "consumer"},
        {"projects": ["apollo"]},
        GOOD | {"projects": "apollo"},
        GOOD | {"projects": ["apollo"] * 1001},
    ],
    ids=range(13),
)
def test_bodies_are_strict(site: Site, operator: str, tenant: str, document: object) -> None:
    """400 that says which rule is broken, and nothing of what was sent."""
    answer = act(site, operator, "/credentials", document if document != b"" else b" ")
    assert refusal(answer) == (400, "request_invalid")
    assert SECRET not in answer.body.decode().lower()
    assert acts(site, tenant) == []


def test_bodies_have_bounds(site: Site, operator: str) -> None:
    """16 KiB of plain JSON."""
    assert act(site, operator, "/credentials", b" " * (MAX_BODY_BYTES + 1)).status == 413
    assert act(site, operator, "/credentials", GOOD, content_type="text/json").status == 415
    assert act(site, operator, "/credentials", GOOD, content_encoding="gzip").status == 415


def test_two_methods_of_one_path(site: Site, operator: str) -> None:
    """Another one is told both."""
    answer = site.ask(request("DELETE", f"{ADMIN}/devices", credential=operator))
    assert refusal(answer) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}

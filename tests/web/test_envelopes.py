"""`POST /v1/envelopes`: each outcome, and each refusal that one envelope can meet, over a real socket."""

import hashlib
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest
from served import Site, running_site
from structlog.testing import capture_logs
from wire import Answer, get, post, post_batch

from fleet import Device, add_key, as_owner, enrol, issue
from postseal.envelope import dsse, ed25519
from postseal.postgres.access import Access
from postseal.settings import Settings


def send(site: Site, device: Device, body: bytes) -> Answer:
    """One envelope by `device`."""
    return site.ask(post(device.token.reveal(), body))


def undecodable(body: bytes) -> bytes:
    """The name under which audit knows a body that is no envelope."""
    return hashlib.sha256(b"postseal-undecodable\0" + body).digest()


def test_every_outcome(site: Site) -> None:
    """accepted, duplicate, gap and reordered, each with its status and the stream's cursors."""
    device = enrol(site.access, "outcomes")
    bodies = {sequence: device.envelope(sequence) for sequence in (1, 2, 3, 4)}
    expected = [
        (1, 201, "accepted", 1, 1),
        (1, 200, "duplicate", 1, 1),
        (4, 201, "gap", 1, 4),
        (3, 201, "reordered", 1, 4),
        (2, 201, "reordered", 4, 4),
    ]
    token = device.token.reveal()
    with site.client() as client:
        for sequence, status, outcome, contiguous, highest in expected:
            answer = client.ask(post(token, bodies[sequence]))
            correlation_id = answer.document["correlationId"]
            identity = dsse.unwrap(bodies[sequence]).identity
            assert answer.status == status
            assert answer.headers["content-type"] == "application/json"
            assert answer.document == {
                "outcome": outcome,
                "eventIdentity": identity.hex(),
                "sequence": sequence,
                "contiguousThrough": contiguous,
                "highest": highest,
                "correlationId": correlation_id,
            }
            assert UUID(correlation_id).version == 7
            assert site.audits(correlation_id) == [(outcome, None, "apollo", identity, False)]


def forged(device: Device) -> bytes:
    """A good envelope under a signature of nobody's."""
    whole = dsse.unwrap(device.envelope(3))
    return dsse.wrap(whole.payload, whole.keyid, bytes(64))


TAKEN = "0190d3a4-7b7c-7cc1-8e5b-000000000001"

REFUSED: list[tuple[str, int, bool, Callable[[Device], bytes]]] = [
    ("envelope_malformed", 400, False, lambda _device: b"{}"),
    ("route_mismatch", 403, False, lambda d: d.envelope(3, route={"tenant": "x", "project": "y", "producer": "z"})),
    ("identity_out_of_bounds", 422, False, lambda d: d.envelope(0)),
    ("key_unknown", 403, False, lambda d: d.envelope(3, seed=bytes(32))),
    ("signature_invalid", 403, False, forged),
    ("schema_version_unsupported", 422, False, lambda d: d.envelope(3, schemaVersion=2)),
    ("payload_invalid", 422, False, lambda d: d.envelope(3, more=1)),
    ("event_conflict", 409, False, lambda d: d.envelope(3, eventId=TAKEN)),
    ("idempotency_conflict", 409, False, lambda d: d.envelope(3, idempotencyKey="taken-key")),
    ("sequence_conflict", 409, False, lambda d: d.envelope(1)),
    ("sequence_beyond_window", 409, True, lambda d: d.envelope(1026)),
]


@pytest.mark.parametrize(("reason", "status", "retryable", "body"), REFUSED, ids=[row[0] for row in REFUSED])
def test_every_refusal_is_a_problem_and_is_audited(
    site: Site, reason: str, status: int, retryable: bool, body: Callable[[Device], bytes]
) -> None:
    """A refusal is an RFC 9457 problem whose audit event is there by the time it is answered."""
    device = enrol(site.access, f"refused-{reason.replace('_', '-')}")
    first = device.envelope(1, eventId=TAKEN, idempotencyKey="taken-key")
    assert send(site, device, first).status == 201
    envelope = body(device)
    answer = send(site, device, envelope)
    document = answer.document
    assert (answer.status, document["status"], document["reason"]) == (status, status, reason)
    assert answer.headers["content-type"] == "application/problem+json"
    assert document["type"] == f"/problems/{reason}"
    assert document["title"]
    assert document["retryable"] is retryable
    of_stream = status == 409
    assert ("contiguousThrough" in document, "highest" in document) == (of_stream, of_stream)
    (audit,) = site.audits(document["correlationId"])
    assert audit[:2] == ("refused", reason)
    decodable = reason != "envelope_malformed"
    assert audit[3] == (dsse.unwrap(envelope).identity if decodable else undecodable(envelope))
    assert audit[4] is not decodable


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("stream_retired", "UPDATE streams SET retired = true WHERE tenant = %s AND producer = %s"),
        ("key_revoked", "UPDATE keys SET state = 'revoked' WHERE tenant = %s AND device = %s"),
        ("key_retired", "UPDATE keys SET state = 'verify-only' WHERE tenant = %s AND device = %s"),
        (
            "below_replay_floor",
            "UPDATE streams SET floor = 3, contiguous = 3, highest = 3 WHERE tenant = %s AND producer = %s",
        ),
    ],
)
def test_refusals_by_what_an_administrator_did(site: Site, reason: str, change: str) -> None:
    """A retired stream, a revoked or retired key and a raised floor refuse what is new."""
    device = enrol(site.access, f"closed-{reason.replace('_', '-')}")
    with as_owner(site.access) as owner:
        owner.execute(change.encode(), [device.tenant, device.name])
    answer = send(site, device, device.envelope(2))
    assert answer.reason == reason
    assert site.audits(answer.document["correlationId"])[0][:2] == ("refused", reason)


def test_a_wrong_role_is_refused_and_audited(site: Site) -> None:
    """A consumer may not send envelopes."""
    token = issue(site.access, "acme", None, ["apollo"], "consumer").reveal()
    answer = site.ask(post(token, site.device.envelope(1)))
    assert (answer.status, answer.reason) == (403, "role_forbidden")
    assert site.audits(answer.document["correlationId"])[0][:2] == ("refused", "role_forbidden")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "Bearer",
        "Bearer ",
        "Basic {token}",
        "Bearer {token}x",
        "Bearer \xe9{token}",
        "{token}",
        "Bearer {token}\r\nauthorization: Bearer {token}",
    ],
)
def test_who_is_not_known_is_unauthenticated(site: Site, authorization: str | None) -> None:
    """A missing, foreign, non-ASCII or repeated credential is no credential; nothing of it is audited."""
    headers = {}
    if authorization is not None:
        headers["authorization"] = authorization.format(token=site.device.token.reveal())
    answer = site.ask(post(None, site.device.envelope(1), **headers))
    assert (answer.status, answer.reason) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert site.audits(answer.document["correlationId"]) == []


def test_the_scheme_of_the_credential_has_no_case(site: Site) -> None:
    """`bearer` is as good as `Bearer` (RFC 9110)."""
    device = enrol(site.access, "lower-case")
    answer = site.ask(post(None, device.envelope(1), authorization=f"bearer {device.token.reveal()}"))
    assert answer.status == 201


def test_a_second_key_of_the_device_signs_too(site: Site) -> None:
    """The key is found in the device's scope by its id."""
    device = enrol(site.access, "two-keys")
    second = ed25519.generate()
    add_key(site.access, device, second)
    assert send(site, device, device.envelope(1, seed=second)).status == 201


def test_another_method_is_not_allowed(site: Site) -> None:
    """A GET where only POST is known names the methods that are."""
    answer = site.ask(get("/v1/envelopes"))
    assert (answer.status, answer.reason, answer.headers["allow"]) == (405, "method_not_allowed", "POST")


def test_without_room_nobody_is_asked_who_they_are(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database has no room all are told `unavailable`, were it a caller without a credential."""
    monkeypatch.setattr(Access, "accepting", lambda _access: False)
    with running_site(site.access, Settings(), device=site.device) as full:
        for credential in (None, site.device.token.reveal()):
            answer = full.ask(post(credential, b"x" * 9000))
            assert (answer.status, answer.reason) == (503, "unavailable")
            assert site.audits(answer.document["correlationId"]) == []


@pytest.fixture
def forgetful(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server that remembers no caller, as one does whose answer took longer than it remembers callers."""
    monkeypatch.setattr("postseal.door.REMEMBERED_FOR_S", 0.0)
    limits = Settings(sync_burst=3, sync_permits_per_s=0.001)
    with running_site(site.access, limits, device=site.device) as forgetful:
        yield forgetful


def test_a_line_of_the_log_names_its_caller_however_long_the_answer_took(forgetful: Site) -> None:
    """A refusal of the inbox, of the adapter, of the limit and of a read."""
    device = enrol(forgetful.access, "logged")
    token = device.token.reveal()
    with capture_logs() as events:
        send(forgetful, device, b"{}")
        forgetful.ask(post_batch(token, b"{}"))
        forgetful.ask(post(token, b"{}", content_encoding="gzip"))
        send(forgetful, device, b"{}")
        forgetful.ask(get("/v1/projects/apollo/streams/another", token))
    lines = [event for event in events if event["event"] == "refused"]
    assert [(line["reason"], line["tenant"], line["device"]) for line in lines] == [
        (reason, "acme", "logged")
        for reason in (
            "envelope_malformed",
            "envelope_malformed",
            "unsupported_media_type",
            "sync_rate_limited",
            "not_found",
        )
    ]


def test_a_credential_revoked_while_its_body_was_on_the_way_is_refused(forgetful: Site) -> None:
    """Who is remembered no more by the time the body is there is verified again."""
    device = enrol(forgetful.access, "revoked")
    body = device.envelope(1)
    with forgetful.client() as client:
        request = post(device.token.reveal(), body, expect="100-continue")
        client.send(request[: -len(body)])
        assert client.answer().status == 100  # the caller is known, and the body awaited
        with as_owner(forgetful.access) as owner:
            owner.execute("UPDATE credentials SET revoked_at = clock_timestamp() WHERE device = %s", [device.name])
        client.send(body)
        assert client.answer().reason == "unauthenticated"

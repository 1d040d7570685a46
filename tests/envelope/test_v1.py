"""The payload: the order of its checks, the bounds of every member, and the canonical form."""

import copy
import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest
from wire_samples import DIGEST, UUID_TEXT, canonical, sample

from postseal.envelope import v1
from postseal.errors import Refused
from postseal.outcomes import Reason

TYPE_CONFUSIONS: tuple[Any, ...] = (None, True, 1.0, 0, -1, "", "1", [], {}, [1], {"a": 1})


def reason_of(read: Callable[[], object]) -> Reason | None:
    """Return the reason with which `read` refuses, or None; no refusal shows a parser's message."""
    try:
        read()
    except Refused as error:
        refused = error
    else:
        return None
    assert refused.__suppress_context__ or refused.__context__ is None
    return refused.reason


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the sample with one member, named by its dotted path, set to another value."""
    payload = sample()
    *parents, name = path.split(".")
    place = payload
    for parent in parents:
        place = place[parent]
    place[name] = value
    return payload


def without(path: str) -> dict[str, Any]:
    """Return the sample without one member."""
    payload = sample()
    *parents, name = path.split(".")
    place = payload
    for parent in parents:
        place = place[parent]
    del place[name]
    return payload


# -- the claims, before the signature holds


NO_OBJECT = [
    b"",
    b"x",
    b"null",
    b"1",
    b'"text"',
    b"[]",
    b"[{}]",
    b'{"a":1',
    b"{}{}",
    b'{"a":\xff}',
    b'{"a":"\xff"}',
]


@pytest.mark.parametrize("payload", [*NO_OBJECT, b"[" * 4096, b'{"a":' + b"[" * 4000, b'{"a":"\\ud800"}', b'{"a":NaN}'])
def test_2a_no_object(payload: bytes):
    """Step 2a: what is no JSON object is `envelope_malformed`, at `open_payload` as well."""
    assert reason_of(lambda: v1.read_claims(payload)) is Reason.ENVELOPE_MALFORMED
    assert reason_of(lambda: v1.open_payload(payload)) is Reason.ENVELOPE_MALFORMED


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"1" * 4000, b"1.5", b"0.1e-400"])
def test_2a_great_numbers_are_json(number: bytes):
    """A number beyond any type is still JSON: later steps refuse it, each for its own reason."""
    payload = canonical(sample()).replace(b'"sequence":1', b'"sequence":' + number)
    assert reason_of(lambda: v1.read_claims(payload).identities()) is Reason.IDENTITY_OUT_OF_BOUNDS
    assert reason_of(lambda: v1.open_payload(payload)) is Reason.PAYLOAD_INVALID


@pytest.mark.parametrize("name", ["tenant", "project", "producer"])
@pytest.mark.parametrize("value", [None, True, 1, 1.0, [], {}])
def test_2b_route_member_is_no_string(name: str, value: object):
    """Step 2b: a route member of another type is `identity_out_of_bounds`."""
    claims = v1.read_claims(json.dumps(changed(f"route.{name}", value)).encode())
    assert reason_of(claims.route) is Reason.IDENTITY_OUT_OF_BOUNDS


@pytest.mark.parametrize("payload", [without("route"), *(changed("route", v) for v in TYPE_CONFUSIONS)])
def test_2b_route_is_no_object(payload: dict[str, Any]):
    """Step 2b: so is an absent route, or one that is no object with the three members."""
    claims = v1.read_claims(json.dumps(payload).encode())
    assert reason_of(claims.route) is Reason.IDENTITY_OUT_OF_BOUNDS


@pytest.mark.parametrize("name", ["tenant", "project", "producer"])
def test_2b_route_member_is_absent(name: str):
    """Step 2b: so is a route without one of the three."""
    claims = v1.read_claims(canonical(without(f"route.{name}")))
    assert reason_of(claims.route) is Reason.IDENTITY_OUT_OF_BOUNDS


def test_2b_any_strings_are_a_route():
    """Strings of any form, and further members, pass here: they match no caller, and step 4 is strict."""
    payload = changed("route", {"tenant": "", "project": "A\n", "producer": "\u00e9", "audience": 1, "x": None})
    route = v1.read_claims(json.dumps(payload).encode()).route()
    assert route == v1.Route(tenant="", project="A\n", producer="\u00e9")


def test_2d_identities():
    """Step 2d: the three identities, typed."""
    identities = v1.read_claims(canonical(sample())).identities()
    assert identities.event_id == UUID(UUID_TEXT)
    assert identities.idempotency_key == "heartbeat:1"
    assert identities.sequence == 1


BAD_IDENTITIES: list[tuple[str, object]] = [
    *(("eventId", value) for value in TYPE_CONFUSIONS),
    ("eventId", UUID_TEXT.upper()),
    ("eventId", UUID_TEXT.replace("-", "")),
    ("eventId", "{" + UUID_TEXT + "}"),
    ("eventId", "urn:uuid:" + UUID_TEXT),
    ("eventId", UUID_TEXT + "\n"),
    ("eventId", UUID_TEXT[:-1]),
    *(("idempotencyKey", value) for value in TYPE_CONFUSIONS),
    ("idempotencyKey", "a" * 7),
    ("idempotencyKey", "a" * 129),
    ("idempotencyKey", "a" * 8 + "\n"),
    ("idempotencyKey", "a" * 8 + " "),
    ("idempotencyKey", "a" * 8 + "/"),
    ("idempotencyKey", "\u00e9" * 8),
    *(("sequence", value) for value in TYPE_CONFUSIONS),
    ("sequence", 2**53),
    ("sequence", 2**64),
    ("sequence", 1.5),
]


@pytest.mark.parametrize(("name", "value"), BAD_IDENTITIES)
def test_2d_bad_identities(name: str, value: object):
    """Step 2d: another type or a broken bound is `identity_out_of_bounds`; step 4 would refuse it as well."""
    raw = json.dumps(changed(name, value), sort_keys=True, separators=(",", ":")).encode()
    claims = v1.read_claims(raw)
    assert reason_of(claims.route) is None
    assert reason_of(claims.identities) is Reason.IDENTITY_OUT_OF_BOUNDS
    assert reason_of(lambda: v1.open_payload(raw)) is Reason.PAYLOAD_INVALID


@pytest.mark.parametrize("name", ["eventId", "idempotencyKey", "sequence"])
def test_2d_absent_identities(name: str):
    """Step 2d: so is an absent identity."""
    claims = v1.read_claims(canonical(without(name)))
    assert reason_of(claims.identities) is Reason.IDENTITY_OUT_OF_BOUNDS


def test_claims_ignore_everything_else():
    """Before the signature holds no other fault is seen: protocol, data, canonical form wait for step 4."""
    payload = {
        **sample(),
        "protocol": "other",
        "schemaVersion": 2,
        "data": 1.5,
        "extra": None,
        "issuedAtMs": -1,
    }
    claims = v1.read_claims(b" " + json.dumps(payload).encode())
    assert reason_of(claims.route) is None
    assert reason_of(claims.identities) is None


# -- step 4


@pytest.mark.parametrize("value", ["controlplane/v2", "ControlPlane/v1", "controlplane/v1\n", "", None, 1, [], {}])
def test_4_another_protocol(value: object):
    """Step 4: another protocol, whatever else is wrong, is `schema_version_unsupported`."""
    payload = {**changed("protocol", value), "extra": 1.0}
    assert reason_of(lambda: v1.open_payload(canonical(payload))) is Reason.SCHEMA_VERSION_UNSUPPORTED


@pytest.mark.parametrize("value", [0, 2, -1, 1.0, True, "1", None, [], {}, 2**70])
def test_4_another_schema_version(value: object):
    """Step 4: so is another schemaVersion; true and 1.0 are not 1."""
    payload = {**changed("schemaVersion", value), "data": None}
    assert reason_of(lambda: v1.open_payload(canonical(payload))) is Reason.SCHEMA_VERSION_UNSUPPORTED


@pytest.mark.parametrize("name", ["protocol", "schemaVersion"])
def test_4_absent_version(name: str):
    """Step 4: so is one that is absent, before any other fault of the payload."""
    payload = {**without(name), "extra": 1}
    assert reason_of(lambda: v1.open_payload(canonical(payload))) is Reason.SCHEMA_VERSION_UNSUPPORTED


def data_of(kind: str, /, **members: object) -> dict[str, Any]:
    """Make valid data of a kind, with some members changed; a member set to ... is left out."""
    valid: dict[str, dict[str, object]] = {
        "proposal": {
            "proposalId": UUID_TEXT,
            "revision": 1,
            "action": "create",
            "contentDigest": DIGEST,
            "contentBytes": 0,
        },
        "proposal-decision": {
            "proposalId": UUID_TEXT,
            "revision": 1,
            "decision": "rejected",
            "reasonCode": "policy",
        },
        "task-status": {
            "taskId": UUID_TEXT,
            "attempt": 1,
            "status": "failed",
            "progress": 0,
            "errorCode": "timeout",
            "resultDigest": DIGEST,
        },
        "acknowledgement": {"ackEventId": UUID_TEXT, "verdict": "applied"},
        "heartbeat": {"bootId": UUID_TEXT, "uptimeMs": 0, "queueDepth": 0},
    }
    merged = {"kind": kind, **valid[kind], **members}
    return {name: value for name, value in merged.items() if value is not ...}


def opens(payload: dict[str, Any]) -> bool:
    """Whether `open_payload` takes it; every refusal here is `payload_invalid`."""
    reason = reason_of(lambda: v1.open_payload(canonical(payload)))
    assert reason in {None, Reason.PAYLOAD_INVALID}
    return reason is None


KIND_MEMBERS: dict[str, dict[str, tuple[type, bool]]] = {
    "proposal": {
        "proposalId": (UUID, True),
        "revision": (int, True),
        "action": (str, True),
        "contentDigest": (str, True),
        "contentBytes": (int, True),
    },
    "proposal-decision": {
        "proposalId": (UUID, True),
        "revision": (int, True),
        "decision": (str, True),
        "reasonCode": (str, False),
    },
    "task-status": {
        "taskId": (UUID, True),
        "attempt": (int, True),
        "status": (str, True),
        "progress": (int, True),
        "errorCode": (str, False),
        "resultDigest": (str, False),
    },
    "acknowledgement": {"ackEventId": (UUID, True), "verdict": (str, True)},
    "heartbeat": {"bootId": (UUID, True), "uptimeMs": (int, True), "queueDepth": (int, True)},
}
EACH_MEMBER = [(kind, name) for kind, members in KIND_MEMBERS.items() for name in members]


@pytest.mark.parametrize(("kind", "name"), EACH_MEMBER)
def test_members_of_every_kind(kind: str, name: str):
    """Each member is typed, never null, and may be left out only where the protocol marks it optional."""
    kept_type, required = KIND_MEMBERS[kind][name]
    assert opens(changed("data", data_of(kind)))
    assert opens(changed("data", data_of(kind, **{name: ...}))) is not required
    wrong: list[object] = [None, True, 1.5, [], {}, "", " ", "x\n", -1]
    if kept_type is not int:
        wrong += [0, 1, UUID_TEXT.upper(), UUID_TEXT + "\n", "a" * 4000]
    for value in wrong:
        assert not opens(changed("data", data_of(kind, **{name: value}))), value


@pytest.mark.parametrize("kind", KIND_MEMBERS)
def test_every_kind_is_closed(kind: str):
    """A member that a kind does not have is refused, another kind's too."""
    assert not opens(changed("data", data_of(kind, extra=1)))
    assert not opens(changed("data", data_of(kind, note="free text")))
    other = "bootId" if kind != "heartbeat" else "taskId"
    assert not opens(changed("data", data_of(kind, **{other: UUID_TEXT})))
    assert not opens(changed("data", data_of(kind, kind=...)))
    for unknown in ("unknown", "Heartbeat", "", None, 1):
        assert not opens(changed("data", data_of(kind, kind=unknown)))


BOUNDS: list[tuple[str, str, int, int]] = [
    ("proposal", "revision", 1, 2**31 - 1),
    ("proposal", "contentBytes", 0, 2**40),
    ("proposal-decision", "revision", 1, 2**31 - 1),
    ("task-status", "attempt", 1, 10**6),
    ("task-status", "progress", 0, 100),
    ("heartbeat", "uptimeMs", 0, 2**53 - 1),
    ("heartbeat", "queueDepth", 0, 10**7),
]


@pytest.mark.parametrize(("kind", "name", "low", "high"), BOUNDS)
def test_bounds_of_data(kind: str, name: str, low: int, high: int):
    """Both ends of each range are inside, one step further is outside."""
    for value, inside in ((low, True), (high, True), (low - 1, False), (high + 1, False)):
        assert opens(changed("data", data_of(kind, **{name: value}))) is inside, value


WORDS: list[tuple[str, str, str]] = [
    ("proposal", "action", "create update withdraw"),
    ("proposal-decision", "decision", "accepted rejected deferred"),
    ("proposal-decision", "reasonCode", "policy stale-revision unauthorised capacity other"),
    ("task-status", "status", "queued running succeeded failed cancelled"),
    ("task-status", "errorCode", "timeout invalid-input dependency-failed resource-exhausted internal"),
    ("acknowledgement", "verdict", "received applied rejected"),
]


@pytest.mark.parametrize(("kind", "name", "words"), WORDS)
def test_words_of_data(kind: str, name: str, words: str):
    """Each word of a closed list is taken, in this spelling alone."""
    for word in words.split():
        assert opens(changed("data", data_of(kind, **{name: word})))
        assert not opens(changed("data", data_of(kind, **{name: word.capitalize()})))
        assert not opens(changed("data", data_of(kind, **{name: word + " "})))


@pytest.mark.parametrize(("kind", "name"), [("proposal", "contentDigest"), ("task-status", "resultDigest")])
def test_digests(kind: str, name: str):
    """A digest is `sha256:` and 64 lower-case hexadecimal digits."""
    for bad in (DIGEST[:-1], DIGEST + "0", DIGEST + "\n", DIGEST.upper(), DIGEST[7:], "sha512:" + DIGEST[7:]):
        assert not opens(changed("data", data_of(kind, **{name: bad})))


@pytest.mark.parametrize("name", ["tenant", "project", "producer"])
def test_bounds_of_ids(name: str):
    """Ids have 1 to 63 characters of the protocol's alphabet, the first a letter or digit."""
    for good in ("a", "0", "a" * 63, "a.b_c-d", "0..", "a--"):
        assert opens(changed(f"route.{name}", good)), good
    for bad in ("", "a" * 64, "A", "-a", ".a", "_a", "a b", "a\n", "a/b", "\u00e9"):
        assert not opens(changed(f"route.{name}", bad)), bad
    assert not opens(without(f"route.{name}"))


def test_bounds_of_the_frame():
    """Sequence, time and idempotency key take both ends of their ranges and nothing past them."""
    for name, low, high in (("sequence", 1, 2**53 - 1), ("issuedAtMs", 0, 4_102_444_800_000)):
        for value, inside in ((low, True), (high, True), (low - 1, False), (high + 1, False)):
            assert opens(changed(name, value)) is inside, (name, value)
    for key, inside in (("a" * 8, True), ("aZ9._:-x" * 16, True), ("a" * 7, False), ("a" * 129, False)):
        assert opens(changed("idempotencyKey", key)) is inside, key
    assert not opens(without("issuedAtMs"))
    assert not opens(without("data"))
    assert not opens(changed("extra", 1))
    assert not opens(changed("route.extra", "x"))


def test_audience_tells_the_directions_apart():
    """Inbound an audience is refused, outbound its absence is; its form is an id's."""
    outbound = changed("route.audience", "device-01")
    assert not opens(outbound)
    assert v1.open_delivery(canonical(outbound)).route.audience == "device-01"
    for bad in (sample(), changed("route.audience", "A"), changed("route.audience", None)):
        assert reason_of(lambda bad=bad: v1.open_delivery(canonical(bad))) is Reason.PAYLOAD_INVALID


CANONICAL = canonical(sample())
NOT_CANONICAL = {
    "white space before": b" " + CANONICAL,
    "white space after": CANONICAL + b"\n",
    "white space inside": CANONICAL.replace(b",", b", "),
    "another order": json.dumps(sample(), separators=(",", ":")).encode(),
    "kind first": CANONICAL.replace(b'"kind":"heartbeat",', b"").replace(b'"bootId"', b'"kind":"heartbeat","bootId"'),
    "escaped letter in a value": CANONICAL.replace(b'"acme"', rb'"\u0061cme"'),
    "escaped letter in a name": CANONICAL.replace(b'"tenant"', rb'"\u0074enant"'),
    "escaped solidus": CANONICAL.replace(b"controlplane/v1", rb"controlplane\/v1"),
    "1.0": CANONICAL.replace(b'"sequence":1', b'"sequence":1.0'),
    "1e0": CANONICAL.replace(b'"sequence":1', b'"sequence":1e0'),
    "1e3": CANONICAL.replace(b'"uptimeMs":5', b'"uptimeMs":1e3'),
    "1.5": CANONICAL.replace(b'"uptimeMs":5', b'"uptimeMs":1.5'),
    "-0": CANONICAL.replace(b'"queueDepth":0', b'"queueDepth":-0'),
    "leading zero's float": CANONICAL.replace(b'"queueDepth":0', b'"queueDepth":0.0'),
    "float of an unknown member": CANONICAL.replace(b'"sequence":1', b'"sequence":1,"x":1.5'),
    "repeated equal member": CANONICAL.replace(b'"sequence":1', b'"sequence":1,"sequence":1'),
    "repeated other member": CANONICAL.replace(b'"sequence":1', b'"sequence":7,"sequence":1'),
    "repeated member, first invalid": CANONICAL.replace(b'"sequence":1', b'"sequence":null,"sequence":1'),
    "repeated version, ours last": CANONICAL.replace(b'"schemaVersion":1', b'"schemaVersion":2,"schemaVersion":1'),
    "repeated member of data": CANONICAL.replace(b'"queueDepth":0', b'"queueDepth":0,"queueDepth":0'),
    "repeated kind": CANONICAL.replace(b'"kind":"heartbeat"', b'"kind":"heartbeat","kind":"heartbeat"'),
    "repeated data": CANONICAL.replace(b'{"data"', b'{"data":{},"data"'),
    "UUID in capitals": CANONICAL.replace(b'"bootId":"0190d3a4', b'"bootId":"0190D3A4'),
    "UUID without hyphens": CANONICAL.replace(UUID_TEXT.encode(), UUID_TEXT.replace("-", "").encode(), 1),
}


def test_canonical_form_opens():
    """The canonical form is read, typed, and encodes to itself."""
    opened = v1.open_payload(CANONICAL)
    assert opened.data == v1.Heartbeat(boot_id=UUID(UUID_TEXT), uptime_ms=5, queue_depth=0)
    assert v1.encode_payload(opened) == CANONICAL


@pytest.mark.parametrize("raw", NOT_CANONICAL.values(), ids=NOT_CANONICAL.keys())
def test_canonical_form_is_the_only_one(raw: bytes):
    """Every other spelling of a payload is JSON to the claims and `payload_invalid` in step 4."""
    assert raw != CANONICAL
    v1.read_claims(raw)
    assert reason_of(lambda: v1.open_payload(raw)) is Reason.PAYLOAD_INVALID


def test_a_repeated_version_counts_by_its_last():
    """The last schemaVersion decides which of step 4's reasons a repetition earns."""
    raw = CANONICAL.replace(b'"schemaVersion":1', b'"schemaVersion":1,"schemaVersion":2')
    assert reason_of(lambda: v1.open_payload(raw)) is Reason.SCHEMA_VERSION_UNSUPPORTED


@pytest.mark.parametrize(
    "raw",
    [
        CANONICAL.replace(b'"heartbeat"', b'"s3cret"'),
        CANONICAL.replace(b'"queueDepth"', b'"s3cret"'),
        CANONICAL.replace(b'"acme"', b'"S3CRET"').replace(b"S3CRET", b"s3cret\\n"),
        CANONICAL.replace(b'"sequence"', b'"x - at `$.s3cret`"'),
    ],
)
def test_a_refusal_quotes_nothing(raw: bytes):
    """The detail says where the fault lies and repeats neither value nor unknown name."""
    with pytest.raises(Refused) as caught:
        v1.open_payload(raw)
    assert "s3cret" not in str(caught.value)


def test_a_refusal_says_where():
    """A device's author learns which member broke its rule."""
    with pytest.raises(Refused, match=r"\$\.data\.queueDepth breaks its rule"):
        v1.open_payload(canonical(changed("data.queueDepth", -1)))
    with pytest.raises(Refused, match=r"\$\.data\.kind is none that is known here"):
        v1.open_payload(canonical(changed("data.kind", "nonsense")))


# -- sealing


@pytest.mark.parametrize(
    "changes",
    [
        {"idempotency_key": "short"},
        {"sequence": 0},
        {"sequence": 2**53},
        {"issued_at_ms": 1.0},
        {"route": v1.Route(tenant="Acme", project="apollo", producer="device-01")},
        {"protocol": "controlplane/v2"},
        {"data": None},
        {"data": object()},
        {"idempotency_key": "\ud800"},
    ],
)
def test_encode_payload_keeps_the_rules(changes: dict[str, Any]):
    """A payload built in Python with a broken rule is a ValueError, before anything is signed."""
    payload = msgspec.structs.replace(v1.open_payload(CANONICAL), **copy.copy(changes))
    with pytest.raises(ValueError):  # noqa: PT011  # the type is the promise; texts differ by cause
        v1.encode_payload(payload)


def test_encode_payload_keeps_its_length():
    """A payload beyond 4,096 bytes is told so, whatever its rules say."""
    payload = msgspec.structs.replace(v1.open_payload(CANONICAL), idempotency_key="a" * 4096)
    with pytest.raises(ValueError, match="more than 4096"):
        v1.encode_payload(payload)


def test_encode_payload_takes_both_directions():
    """Payloads with and without an audience are encoded."""
    outbound = v1.open_delivery(canonical(changed("route.audience", "device-01")))
    assert v1.encode_payload(outbound) == canonical(changed("route.audience", "device-01"))

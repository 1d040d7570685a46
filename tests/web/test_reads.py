"""What devices and consumers read, and that nothing is skipped silently."""

import base64
import threading
from uuid import uuid4

import pytest
from served import Site
from wire import Answer, get, post

from fleet import Device, as_owner, enrol, issue
from postseal.envelope import dsse, ed25519
from postseal.inbound import reading

STREAMS = "/v1/projects/apollo/streams"


@pytest.fixture(scope="module")
def consumer(site: Site) -> str:
    """The credential of a consumer of project apollo."""
    return issue(site.access, "acme", None, ["apollo"], "consumer").reveal()


@pytest.fixture
def device(site: Site) -> Device:
    """A device of this test's own."""
    return enrol(site.access, f"device-{uuid4()}")


def fill(site: Site, device: Device, *sequences: int) -> dict[int, bytes]:
    """Have envelopes of these sequences accepted."""
    bodies = {sequence: device.envelope(sequence) for sequence in sequences}
    with site.client() as client:
        for body in bodies.values():
            assert client.ask(post(device.token.reveal(), body)).status == 201
    return bodies


def read(site: Site, device: Device, consumer: str, query: str = "") -> Answer:
    """A page of the device's stream."""
    return site.ask(get(f"{STREAMS}/{device.name}/envelopes{query}", consumer))


def test_where_a_stream_stands(site: Site, device: Device, consumer: str) -> None:
    """Cursors, holes and the next number, the same for the device and a consumer."""
    fill(site, device, 1, 2, 4, 7, 8)
    expected = {
        "project": "apollo",
        "producer": device.name,
        "contiguousThrough": 2,
        "highest": 8,
        "replayFloor": 0,
        "nextSequence": 9,
        "missing": [{"from": 3, "to": 3}, {"from": 5, "to": 6}],
        "retired": False,
    }
    for token in (device.token.reveal(), consumer):
        answer = site.ask(get(f"{STREAMS}/{device.name}", token))
        assert (answer.status, answer.document) == (200, expected)
        assert answer.headers["cache-control"] == "no-store"
    assert site.ask(get(STREAMS, device.token.reveal())).document == {"items": [expected], "next": None}


def test_a_list_has_the_first_100_missing_ranges(site: Site, device: Device) -> None:
    """And how many there are, if there are more; the stream by itself has all of them."""
    with as_owner(site.access) as owner:
        owner.execute(
            "UPDATE streams SET above = decode(repeat('aa', 40), 'hex'), highest = 320"
            " WHERE tenant = %s AND stream = %s",
            [device.tenant, device.stream],
        )
    missing = [{"from": number, "to": number} for number in range(1, 320, 2)]
    token = device.token.reveal()
    alone = site.ask(get(f"{STREAMS}/{device.name}", token)).document
    assert alone["missing"] == missing
    assert "missingRanges" not in alone
    [listed] = site.ask(get(STREAMS, token)).document["items"]
    assert listed == alone | {"missing": missing[:100], "missingRanges": 160}


def test_a_consumer_pages_through_all_streams_of_its_project(site: Site, consumer: str) -> None:
    """In the order of producers, each once."""
    names = {enrol(site.access, f"paged-{number}").name for number in range(5)}
    enrol(site.access, "elsewhere", project="zeus")
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = site.ask(get(f"{STREAMS}?limit=2" + (f"&after={after}" if after else ""), consumer)).document
        found += [item["producer"] for item in page["items"]]
        after = page["next"]
    assert found == sorted(set(found))
    assert names <= set(found)
    assert "elsewhere" not in found


def test_nobody_reads_what_is_not_theirs(site: Site, device: Device, consumer: str) -> None:
    """Another device's stream, another tenant's and another project's are not there; roles come before that."""
    other = enrol(site.access, "other-tenants", tenant="umbrella")
    sibling = enrol(site.access, f"sibling-{uuid4()}")
    foreign = issue(site.access, "umbrella", None, ["apollo"], "consumer").reveal()
    sender = issue(site.access, "acme", None, ["apollo"], "sender").reveal()
    own = f"{STREAMS}/{device.name}"
    expected = [
        (get(own, other.token.reveal()), 404),
        (get(f"{STREAMS}/{other.name}", device.token.reveal()), 404),
        (get(f"{STREAMS}/{other.name}", consumer), 404),
        (get(own, sibling.token.reveal()), 404),
        (get(own, foreign), 404),
        (get(f"{own}/envelopes", foreign), 404),
        (get(f"/v1/projects/apollo/producers/{device.name}/keys", foreign), 404),
        (get("/v1/projects/zeus/streams", consumer), 404),
        (get(own, sender), 403),
        (get(f"{own}/envelopes", device.token.reveal()), 403),
        (get(own, "nonsense"), 401),
        (get(own), 401),
    ]
    assert [site.ask(raw).status for raw, _ in expected] == [status for _, status in expected]


def test_envelopes_come_as_they_were_signed(site: Site, device: Device, consumer: str) -> None:
    """Each is a DSSE envelope with the same signed bytes and signature, in order, through the contiguous cursor."""
    bodies = fill(site, device, 1, 2, 4)
    page = read(site, device, consumer).document
    assert (page["contiguousThrough"], page["next"]) == (2, 2)
    assert [item["sequence"] for item in page["items"]] == [1, 2]
    for item in page["items"]:
        sent = dsse.unwrap(bodies[item["sequence"]])
        assert item["eventIdentity"] == sent.identity.hex()
        assert item["acceptedAtMs"] > 1_700_000_000_000
        assert item["envelope"]["payloadType"] == dsse.PAYLOAD_TYPE
        assert base64.b64decode(item["envelope"]["payload"]) == sent.payload
        (signature,) = item["envelope"]["signatures"]
        assert (signature["keyid"], base64.b64decode(signature["sig"])) == (device.keyid, sent.signature)


def test_pages_follow_one_another(site: Site, device: Device, consumer: str) -> None:
    """`next` leads on, and past the end stays where it is."""
    fill(site, device, *range(1, 8))
    seen: list[int] = []
    after = 0
    for _ in range(4):
        page = read(site, device, consumer, f"?after={after}&limit=3").document
        seen += [item["sequence"] for item in page["items"]]
        after = page["next"]
    assert seen == list(range(1, 8))
    assert read(site, device, consumer, "?after=99").document == {"items": [], "contiguousThrough": 7, "next": 99}


def test_what_expired_and_what_was_closed_stand_in_their_place(site: Site, device: Device, consumer: str) -> None:
    """Deleted or only over its time, a payload reads as expired; holes below the floor read as closed ranges."""
    fill(site, device, 1, 2, 4, 8)
    stream = [device.tenant, device.stream]
    with as_owner(site.access) as owner:
        owner.execute("DELETE FROM payloads WHERE tenant = %s AND stream = %s AND sequence = 1", stream)
        owner.execute(
            "UPDATE payloads SET expires_at = clock_timestamp() WHERE tenant = %s AND stream = %s AND sequence = 2",
            stream,
        )
        owner.execute(
            "UPDATE streams SET floor = 10, contiguous = 10, highest = 10, above = ''"
            " WHERE tenant = %s AND stream = %s",
            stream,
        )
    page = read(site, device, consumer).document
    shapes = [
        (item["from"], item["to"]) if "closed" in item else (item["sequence"], item.get("expired", False))
        for item in page["items"]
    ]
    assert shapes == [(1, True), (2, True), (3, 3), (4, False), (5, 7), (8, False), (9, 10)]
    assert set(page["items"][0]) == {"sequence", "eventIdentity", "expired"}
    assert set(page["items"][2]) == {"from", "to", "closed"}
    assert page["next"] == 10
    one_by_one: list[object] = []
    after = 0
    while after < 10:
        part = read(site, device, consumer, f"?after={after}&limit=1").document
        one_by_one += part["items"]
        after = part["next"]
    assert one_by_one == page["items"]
    inside = read(site, device, consumer, "?after=5").document["items"]
    assert inside[0] == {"from": 6, "to": 7, "closed": True}


def test_a_page_ends_where_it_becomes_heavy(
    site: Site, device: Device, consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is bounded in bytes too, and always holds something."""
    fill(site, device, *range(1, 6))
    monkeypatch.setattr(reading, "PAGE_PAYLOAD_BYTES", 1)
    page = read(site, device, consumer).document
    assert ([item["sequence"] for item in page["items"]], page["next"]) == ([1], 1)
    monkeypatch.setattr(reading, "PAGE_PAYLOAD_BYTES", 800)
    page = read(site, device, consumer).document
    assert 1 < len(page["items"]) < 5
    assert page["next"] == page["items"][-1]["sequence"]


def test_a_waiting_reader_gets_what_arrives(site: Site, device: Device, consumer: str) -> None:
    """With `wait` an empty page is held back until there is something."""
    with site.client() as reader:
        reader.send(get(f"{STREAMS}/{device.name}/envelopes?wait=30", consumer))
        sender = threading.Thread(target=fill, args=(site, device, 1))
        sender.start()
        page = reader.answer().document
        sender.join()
    assert [item["sequence"] for item in page["items"]] == [1]


def test_a_wait_ends(site: Site, device: Device, consumer: str) -> None:
    """With nothing to read the page comes empty once the time is over."""
    assert read(site, device, consumer, "?wait=1").document == {"items": [], "contiguousThrough": 0, "next": 0}


@pytest.mark.parametrize(
    "query",
    [
        "?limit=0",
        "?limit=1001",
        "?limit=x",
        "?limit=",
        "?limit=1&limit=2",
        "?after=-1",
        "?after=9007199254740992",
        "?after=1.0",
        "?wait=31",
        "?after=%D9%A1",
    ],
)
def test_parameters_have_bounds(site: Site, device: Device, consumer: str, query: str) -> None:
    """400 that names the parameter."""
    answer = read(site, device, consumer, query)
    assert (answer.status, answer.reason) == (400, "request_invalid")
    assert query[1:].split("=", maxsplit=1)[0] in answer.document["detail"]


def test_the_keys_of_a_producer(site: Site, device: Device, consumer: str) -> None:
    """All that verify its envelopes, tombstones included, so that a consumer can verify for itself."""
    second = ed25519.public_key(bytes(range(1, 33)))
    with as_owner(site.access) as owner:
        owner.execute(
            "INSERT INTO keys (tenant, keyid, device, public_key, state) VALUES (%s, %s, %s, %s, 'removed')",
            [device.tenant, ed25519.thumbprint(second), device.name, second],
        )
        owner.execute(
            "UPDATE keys SET state = 'retiring', accept_until = to_timestamp(4000000000)"
            " WHERE tenant = %s AND keyid = %s",
            [device.tenant, device.keyid],
        )
    answer = site.ask(get(f"/v1/projects/apollo/producers/{device.name}/keys", consumer))
    first, tombstone = answer.document["items"]
    assert first["keyid"] == device.keyid
    assert base64.urlsafe_b64decode(first["publicKey"] + "=") == ed25519.public_key(device.seed)
    assert (first["state"], first["acceptUntilMs"]) == ("retiring", 4_000_000_000_000)
    assert (tombstone["keyid"], tombstone["state"]) == (ed25519.thumbprint(second), "removed")
    assert "acceptUntilMs" not in tombstone

"""`POST /v1/envelopes/batch`: lines split on LF alone, one result a line in order, whole refusals audited once."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from served import Site, running_site
from wire import NDJSON, Answer, post_batch, request

from fleet import Device, as_owner, enrol
from postseal.postgres.access import Access
from postseal.settings import Settings
from until import until

BURST = 200


@pytest.fixture(scope="module")
def site(shared_access: Access) -> Iterator[Site]:
    """A server whose devices have 200 permits and hardly any more to come."""
    with running_site(shared_access, Settings(sync_burst=BURST, sync_permits_per_s=0.01)) as site:
        yield site


def send(site: Site, device: Device, body: bytes) -> Answer:
    """One batch by `device`."""
    return site.ask(post_batch(device.token.reveal(), body))


def test_one_result_a_line_in_order(site: Site) -> None:
    """Good and bad lines are answered side by side, each with its status, correlation id and audit event."""
    device = enrol(site.access, "mixed")
    good = [device.envelope(sequence) for sequence in (1, 2, 3)]
    overlong = b'{"payload":"' + b"a" * 8192
    lines = [good[0], b"{}", good[0], overlong, b"", device.envelope(9000), good[2], good[1]]
    answer = send(site, device, b"\n".join(lines))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert [(line["status"], line.get("outcome") or line["reason"]) for line in answer.lines] == [
        (201, "accepted"),
        (400, "envelope_malformed"),
        (200, "duplicate"),
        (413, "body_too_large"),
        (400, "envelope_malformed"),
        (409, "sequence_beyond_window"),
        (201, "gap"),
        (201, "reordered"),
    ]
    ids = [line["correlationId"] for line in answer.lines]
    assert len(set(ids)) == len(lines)
    for line in answer.lines:
        (audit,) = site.audits(line["correlationId"])
        assert audit[:2] == ((line["outcome"], None) if "outcome" in line else ("refused", line["reason"]))
    assert answer.body.endswith(b"}\n")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_last_line_feed_is_free(site: Site, end: bytes) -> None:
    """One line feed may end the last line, and makes no further line."""
    device = enrol(site.access, f"ended-{len(end)}")
    answer = send(site, device, device.envelope(1) + b"\n" + device.envelope(2) + end)
    assert [line["outcome"] for line in answer.lines] == ["accepted", "accepted"]


def test_a_carriage_return_belongs_to_its_line(site: Site) -> None:
    """Lines are split on LF alone; a CR before it is white space behind a JSON text, and ends no line by itself."""
    device = enrol(site.access, "returns")
    first, second, third = (device.envelope(sequence) for sequence in (1, 2, 3))
    answer = send(site, device, first + b"\r\n" + second + b"\r" + third)
    assert [line.get("outcome") or line["reason"] for line in answer.lines] == ["accepted", "envelope_malformed"]


@pytest.mark.parametrize("body", [b"", b"{}\n" * 101], ids=["none", "101"])
def test_a_batch_has_1_to_100_lines(site: Site, body: bytes) -> None:
    """None, or more than 100, and the whole is refused with one audit event."""
    device = enrol(site.access, f"lines-{len(body)}")
    answer = send(site, device, body)
    assert (answer.status, answer.reason) == (400, "envelope_malformed")
    assert len(site.audits(answer.document["correlationId"])) == 1
    with as_owner(site.access) as owner:
        count = owner.execute("SELECT count(*) FROM audit_events WHERE device = %s", [device.name]).fetchone()
    assert count == (1,)


def test_100_lines_are_taken(site: Site) -> None:
    """The greatest batch."""
    device = enrol(site.access, "hundred")
    answer = send(site, device, b"\n".join(device.envelope(sequence) for sequence in range(1, 101)))
    assert [line["outcome"] for line in answer.lines] == ["accepted"] * 100
    assert answer.lines[-1]["contiguousThrough"] == 100


def test_more_than_a_mebibyte_is_refused_whole(site: Site) -> None:
    """1 MiB is the limit of the body, declared or not."""
    device = enrol(site.access, "heavy")
    answer = send(site, device, b"x" * (1024 * 1024 + 1))
    assert (answer.status, answer.reason) == (413, "body_too_large")
    assert len(site.audits(answer.document["correlationId"])) == 1


def test_permits_are_all_or_nothing(site: Site) -> None:
    """A batch that costs more than is left takes nothing, and is told when to come again."""
    device = enrol(site.access, "limited")
    assert send(site, device, b"\n".join([b"{}"] * 100)).status == 200
    assert send(site, device, b"\n".join([b"{}"] * 60)).status == 200
    answer = send(site, device, b"\n".join([b"{}"] * 60))
    assert (answer.status, answer.reason, answer.document["retryable"]) == (429, "sync_rate_limited", True)
    retry_after = answer.headers["retry-after"]
    assert int(retry_after) >= 1
    assert answer.headers["ratelimit-policy"] == f'"sync";q={BURST};w=20000'
    assert answer.headers["ratelimit"] == f'"sync";r=40;t={retry_after}'
    assert len(send(site, device, b"\n".join([b"{}"] * 40)).lines) == 40
    assert send(site, device, b"{}").status == 429


def test_the_first_refusal_by_the_limit_is_audited(site: Site) -> None:
    """It is written off the request's path, soon after."""
    device = enrol(site.access, "counted")
    for _ in range(3):
        send(site, device, b"\n".join([b"{}"] * 100))

    def audited() -> list[tuple[Any, ...]]:
        with as_owner(site.access) as owner:
            return owner.execute(
                "SELECT outcome, event_identity FROM audit_events WHERE device = %s AND reason = 'sync_rate_limited'",
                [device.name],
            ).fetchall()

    until(lambda: bool(audited()))
    assert audited() == [("refused", None)]


def test_every_line_is_a_json_object_of_its_own(site: Site) -> None:
    """A reader can take the answer line by line."""
    device = enrol(site.access, "reader")
    answer = send(site, device, b"{}\n[]\nnull")
    assert all(isinstance(json.loads(line), dict) for line in answer.body.split(b"\n")[:-1])


def test_over_the_limit_an_adapters_refusal_is_neither_audited_nor_counted(site: Site) -> None:
    """Its caller is told the adapter's reason; the first `sync_rate_limited` in the trail is one that was answered."""
    device = enrol(site.access, "overdrawn")
    for _ in range(BURST // 100):
        assert send(site, device, b"\n".join([b"{}"] * 100)).status == 200
    heavy = send(site, device, b"x" * (1024 * 1024 + 1))
    assert heavy.reason == "body_too_large"
    limited = send(site, device, b"{}").document
    assert limited["reason"] == "sync_rate_limited"
    until(lambda: site.audits(limited["correlationId"]) == [("refused", "sync_rate_limited", None, None, False)])
    assert site.audits(heavy.document["correlationId"]) == []


def test_a_body_may_come_in_the_smallest_chunks(site: Site) -> None:
    """What a chunk needs to be one is not counted against it, were there more of that than of data."""
    device = enrol(site.access, "crumbs")
    lines = b"\n".join(device.envelope(sequence) for sequence in range(1, 81))
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in lines)
    assert len(chunks) > 256 * 1024  # more than one read of a socket brings
    fields = {"content_type": NDJSON, "transfer_encoding": "chunked"}
    head = request("POST", "/v1/envelopes/batch", credential=device.token.reveal(), **fields)
    answer = site.ask(head + chunks + b"0\r\n\r\n")
    assert [line.get("outcome") for line in answer.lines] == ["accepted"] * 80

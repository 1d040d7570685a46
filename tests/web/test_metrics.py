"""`GET /metrics` and the log lines of refusals: exact numbers, bounded labels and lines, nothing of any tenant."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import values
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from served import Site, running_site
from structlog.testing import capture_logs
from wire import Answer, Client, get, post, post_batch

from family import running_family
from fleet import Device, as_owner, enrol
from postseal import door
from postseal.identity.tokens import new_token
from postseal.metrics import FOLDER_VARIABLE, Metrics, mark_dead, share_as
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.sampler import Sampler
from postseal.settings import Settings
from postseal.web import metrics, refusals
from until import until

Series = dict[str, float]

LINES_A_SECOND = 2
"""So few that fifty refusals are too many for them however slow the machine is."""


@pytest.fixture(autouse=True)
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape is made anew, and reads the database."""
    monkeypatch.setattr(metrics, "REMEMBERED_FOR_S", 0.0)
    monkeypatch.setattr("postseal.sampler.BACKLOG_FOR_S", 0.0)


@pytest.fixture
def fresh(access: Access, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server that has done nothing yet, and remembers callers for longer than any test takes."""
    monkeypatch.setattr(door, "REMEMBERED_FOR_S", 1000.0)
    limits = Settings(sync_burst=100, sync_permits_per_s=0.001, peer_burst=5, peer_permits_per_s=0.001)
    with running_site(access, limits) as site:
        yield site


def scrape(port: int) -> Series:
    """Every series by its name and labels, as they stand in the text."""
    with Client(port) as client:
        answer = client.ask(get("/metrics"))
    assert answer.status == 200
    return series_of(answer)


def scraped_until(port: int, name: str, value: float) -> Series:
    """The first scrape in which a series has come to a value: each process remembers its last one for a second."""
    found: Series = {}

    def has_come() -> bool:
        found.update(scrape(port))
        return found[name] == value

    until(has_come)
    return found


def series_of(answer: Answer) -> Series:
    """The series of an answer in the Prometheus text format."""
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): sample.value
        for family in parse(answer.body.decode())
        for sample in family.samples
    }


def moved(before: Series, after: Series, prefix: str) -> Series:
    """By how much the series of one name moved, where they did."""
    return {
        name.removeprefix(prefix): after[name] - before.get(name, 0)
        for name in after
        if re.match(rf"{prefix}($|{{)", name) and after[name] != before.get(name, 0)
    }


def heartbeats(device: Device, sequences: range) -> bytes:
    """A batch."""
    return b"\n".join(device.envelope(sequence) for sequence in sequences)


def test_numbers_are_exact(fresh: Site) -> None:
    """After a known run every outcome, refusal, permit, look-up and signature is counted, once each."""
    device, token = fresh.device, fresh.device.token.reveal()
    before = scrape(fresh.port)
    assert not any(value for name, value in before.items() if name.startswith(("postseal_env", "postseal_ref")))
    first = device.envelope(1)
    lines = [first, first, device.envelope(4), device.envelope(2), device.envelope(9000), b"{}"]
    assert fresh.ask(post_batch(token, b"\n".join(lines))).status == 200
    assert fresh.ask(post(token, device.envelope(3))).status == 201
    assert fresh.ask(post(token, b"{}")).status == 400
    assert fresh.ask(post(token, b"x" * 9000)).status == 413
    assert fresh.ask(post_batch(token, heartbeats(device, range(5, 100)))).status == 429
    assert fresh.ask(get("/nowhere")).status == 404
    assert fresh.ask(b"NO\n\n").status == 400
    assert [fresh.ask(post(new_token().reveal(), first)).status for _ in range(7)] == [401] * 5 + [429] * 2
    after = scrape(fresh.port)

    assert moved(before, after, "postseal_envelopes_total") == {
        "{outcome=accepted}": 1,
        "{outcome=duplicate}": 1,
        "{outcome=gap}": 1,
        "{outcome=reordered}": 2,
    }
    assert moved(before, after, "postseal_refusals_total") == {
        "{reason=envelope_malformed}": 2,
        "{reason=sequence_beyond_window}": 1,
        "{reason=body_too_large}": 1,
        "{reason=sync_rate_limited}": 1,
        "{reason=not_found}": 1,
        "{reason=request_invalid}": 1,
        "{reason=unauthenticated}": 5,
        "{reason=peer_rate_limited}": 2,
    }
    assert moved(before, after, "postseal_limiter_requests_total") == {
        "{answer=granted}{limiter=sync}": 4,
        "{answer=refused}{limiter=sync}": 1,
        "{answer=granted}{limiter=peer}": 6,
        "{answer=refused}{limiter=peer}": 2,
    }
    assert moved(before, after, "postseal_limiter_permits_total") == {
        "{answer=granted}{limiter=sync}": 9,
        "{answer=refused}{limiter=sync}": 95,
        "{answer=granted}{limiter=peer}": 6,
        "{answer=refused}{limiter=peer}": 2,
        "{answer=returned}{limiter=peer}": 1,
    }
    assert moved(before, after, "postseal_signatures_verified_total") == {"": 6}
    assert moved(before, after, "postseal_lookups_total") == {
        "{found=no}{memory=credentials}": 8,
        "{found=yes}{memory=credentials}": 4,
        "{found=no}{memory=signers}": 1,
        "{found=yes}{memory=signers}": 5,
    }
    commits = after["postseal_commit_seconds_count"]
    assert moved(before, after, "postseal_commits_total") == {"{result=certain}": commits}
    # Six lines, three single ones, and the audit event of the limit, which is off the request's path.
    assert after["postseal_group_entries_sum"] in {9, 10}
    assert after["postseal_group_entries_count"] == after["postseal_group_wait_seconds_count"]
    assert after["postseal_processes"] == after["postseal_accepting"] == 1
    assert after["postseal_queue_entries"] == after["postseal_pool_waiting{pool=ingest}"] == 0


def test_a_fault_of_the_service_is_told_apart(fresh: Site) -> None:
    """A group that runs again one by one is `rerun`; what fails alone is `unavailable`, and the others are certain."""
    device = fresh.device
    with as_owner(fresh.access) as owner:
        owner.execute("ALTER TABLE payloads ADD CHECK (sequence <> 2)")
    before = scrape(fresh.port)
    assert fresh.ask(post_batch(device.token.reveal(), heartbeats(device, range(1, 4)))).status == 200
    after = scrape(fresh.port)
    assert moved(before, after, "postseal_commits_total") == {
        "{result=rerun}": 1,
        "{result=unavailable}": 1,
        "{result=certain}": 2,
    }
    assert moved(before, after, "postseal_commit_seconds_count") == {"": 4}
    assert moved(before, after, "postseal_group_entries_sum") == {"": 3}
    assert moved(before, after, "postseal_refusals_total") == {"{reason=unavailable}": 1}


def test_the_state_of_the_database(fresh: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes, the age of the payload that expires next, and what has expired are those of all tenants together."""
    other = enrol(fresh.access, "other", tenant="umbrella")
    for device, sequences in ((fresh.device, (1, 2, 5, 9)), (other, (3,))):
        for sequence in sequences:
            assert fresh.ask(post(device.token.reveal(), device.envelope(sequence))).status == 201
    with as_owner(fresh.access) as owner:
        owner.execute("UPDATE payloads SET expires_at = now() - interval '7 minutes' WHERE sequence = 1")
        owner.execute("UPDATE payloads SET expires_at = now() + interval '1 minute' WHERE sequence = 5")
        owner.execute("UPDATE identities SET accepted_at = now() - interval '1 hour' WHERE sequence = 5")
    found = scrape(fresh.port)
    assert found["postseal_streams_read"] == found["postseal_streams_with_holes"] == 2
    assert found["postseal_missing_sequences"] == 2 + 3 + 2
    assert found["postseal_expired_payloads"] == 1
    assert 420 <= found["postseal_expired_payload_age_seconds"] < 450
    assert 3600 <= found["postseal_oldest_payload_age_seconds"] < 3630
    assert found["postseal_held_tenants"] == 0
    with as_owner(fresh.access) as owner:
        owner.execute(
            "INSERT INTO holds (tenant, hold, reason, account) VALUES (%s, 'x', '', '')", [fresh.device.tenant]
        )
    held = scrape(fresh.port)
    assert held["postseal_held_tenants"] == 1
    assert held["postseal_expired_payloads"] == held["postseal_expired_payload_age_seconds"] == 0
    monkeypatch.setattr("postseal.postgres.backlog.MAX_STREAMS", 1)
    assert scrape(fresh.port)["postseal_streams_read"] == 1


def test_a_database_that_is_slow_does_not_stop_the_scrape(fresh: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read in time stays as it was, and so does the time at which it was read."""
    monkeypatch.setattr("postseal.sampler.BACKLOG_DEADLINE_S", 0.2)
    before = scrape(fresh.port)
    with as_owner(fresh.access) as owner, owner.transaction():
        owner.execute("LOCK TABLE streams")
        after = scrape(fresh.port)
    name = "postseal_backlog_read_timestamp_seconds"
    assert after[name] == before[name] > 0
    assert scrape(fresh.port)[name] > before[name]


def test_nothing_that_is_sent_makes_a_series_or_stands_in_one(fresh: Site, seed: int) -> None:
    """Junk in paths, methods, heads, routes and bodies leaves the set of series as it was, and is not in the text."""
    chance, device = random.Random(seed), fresh.device
    series = set(scrape(fresh.port))
    for number in range(60):
        junk = f"canary{number}" + "".join(chance.choices('abc/"\\{}=%\n\t', k=chance.randrange(1, 30)))
        word = re.sub(r"[^a-z0-9]", "", junk)
        route = {"tenant": word, "project": word, "producer": word}
        for request in (
            get(f"/{word}/metrics?{word}", word, x_forwarded_for=word, accept=f"application/{word};version={word}"),
            post(word, junk.encode(), content_type=word),
            post(device.token.reveal(), device.envelope(1, route=route)),
            f"{word} / HTTP/9.9\r\n\r\n".encode(),
        ):
            assert fresh.ask(request).status >= 400
    answer = fresh.ask(get("/metrics"))
    assert set(series_of(answer)) == series
    for canary in ("canary", device.token.reveal()[36:], device.tenant, device.project, device.name, "127.0.0.1"):
        assert canary not in answer.body.decode()


def test_each_outcome_and_reason_is_there_from_the_start(fresh: Site) -> None:
    """A series that appears with its first event would hide that event from a rate."""
    found = scrape(fresh.port)
    assert {f"postseal_envelopes_total{{outcome={outcome}}}" for outcome in Outcome} <= set(found)
    assert {f"postseal_refusals_total{{reason={reason}}}" for reason in Reason} <= set(found)


def test_formats(site: Site) -> None:
    """OpenMetrics for who accepts it, else the Prometheus text format; both are read by the library's own parsers."""
    plain = site.ask(get("/metrics"))
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    opened = site.ask(get("/metrics", accept=accept))
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    read_openmetrics = openmetrics.text_string_to_metric_families  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - untyped there
    names = [family.name for family in parse(plain.body.decode())]
    assert names == [family.name for family in read_openmetrics(opened.body.decode())]
    assert site.ask(get("/metrics", accept="text/plain;version=x,application/openmetrics-text;version=y")).status == 200


def test_a_text_is_made_once_a_second(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks again within that time gets the same, and costs nothing."""
    monkeypatch.setattr(metrics, "REMEMBERED_FOR_S", 1000.0)
    first = site.ask(get("/metrics"))
    monkeypatch.setattr(Sampler, "sample_backlog", None)
    assert site.ask(get("/metrics")).body == first.body


def test_each_refusal_is_told(fresh: Site) -> None:
    """One line for each: in a batch, of a stranger, by both limits, of what is no request; and no secret in any."""
    device, token, stranger = fresh.device, fresh.device.token.reveal(), new_token().reveal()
    with capture_logs() as events:
        fresh.ask(post_batch(token, b"{}\n" + device.envelope(9000) + b"\n[]"))
        fresh.ask(post_batch(token, heartbeats(device, range(1, 101))))
        for _ in range(6):
            fresh.ask(post(stranger, device.envelope(1)))
        fresh.ask(b"NO\n\n")
    lines = [event for event in events if event["event"] == "refused"]
    assert [(line["reason"], line["device"]) for line in lines] == [
        ("envelope_malformed", device.name),
        ("sequence_beyond_window", device.name),
        ("envelope_malformed", device.name),
        ("sync_rate_limited", device.name),
        *[("unauthenticated", None)] * 5,
        ("peer_rate_limited", None),
        ("request_invalid", None),
    ]
    assert len({line["correlation_id"] for line in lines}) == len(lines)
    assert {line["peer"] for line in lines} == {"127.0.0.1"}
    assert not any(secret[36:] in json.dumps(events) for secret in (token, stranger))


def test_a_flood_of_refusals_does_not_flood_the_log(fresh: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one reason so many lines are told a second, then how many were not; another reason is told all the same."""
    monkeypatch.setattr(refusals, "LINES_A_SECOND", LINES_A_SECOND)
    began_s = time.monotonic()
    with capture_logs() as events:
        with fresh.client() as client:
            statuses = [client.ask(get("/nowhere")).status for _ in range(50)]
        seconds_begun = int(time.monotonic() - began_s) + 1
        assert fresh.ask(post(None, b"{}")).status == 401
        counted = scrape(fresh.port)["postseal_refusals_total{reason=not_found}"]
        until(lambda: sum(event.get("refusals", 1) for event in events if event.get("reason") == "not_found") == 50)
    assert statuses == [404] * 50
    assert counted == 50
    told = [event["event"] for event in events if event.get("reason") == "not_found"]
    assert told.count("refused") <= LINES_A_SECOND * seconds_begun
    assert "refused, not told one by one" in told
    assert [event["event"] for event in events if event.get("reason") == "unauthenticated"] == ["refused"]


def test_gauges_of_a_process_that_ended_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters stay in the sums, also in those of its successor under the same number."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    made: list[Metrics] = []
    for number, envelopes in ((1, 3), (2, 4)):
        share_as(number)
        made.append(Metrics())
        made[-1].processes.set(1)
        made[-1].envelopes[Outcome.GAP].inc(envelopes)

    def shown() -> tuple[float | None, float | None]:
        exposed = made[0].exposed()
        gaps = exposed.get_sample_value("postseal_envelopes_total", {"outcome": "gap"})
        return exposed.get_sample_value("postseal_processes"), gaps

    assert shown() == (2, 7)
    mark_dead(1, str(tmp_path))
    assert shown() == (1, 7)
    share_as(1)
    successor = Metrics()
    successor.processes.set(1)
    successor.envelopes[Outcome.GAP].inc()
    assert shown() == (2, 8)
    values.close_all_multiprocess_files()


def test_one_scrape_shows_all_processes(access: Access, tmp_path: Path) -> None:
    """Counters are the sum over both, also over one that was killed; its successor goes on in the same files."""
    device = enrol(access)
    with running_family(access, tmp_path) as family:
        port = family.port

        def send(sequences: range) -> Series:
            # Each on a connection of its own, so that both processes get some.
            for sequence in sequences:
                with Client(port) as client:
                    assert client.ask(post(device.token.reveal(), device.envelope(sequence))).status == 201
            return scrape(port)

        found = send(range(1, 41))
        assert found["postseal_envelopes_total{outcome=accepted}"] == found["postseal_group_entries_sum"] == 40
        assert found["postseal_processes"] == 2
        files = set(tmp_path.rglob("*.db"))
        assert len({file.stem.rpartition("_")[2] for file in files}) == 2

        killed = family.children()[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in family.children())
        send(range(41, 81))
        scraped_until(port, "postseal_processes", 2)
        send(range(81, 121))
        found = scraped_until(port, "postseal_envelopes_total{outcome=accepted}", 120)
        assert found["postseal_group_entries_sum"] == 120
        assert found["postseal_processes"] == 2
        assert set(tmp_path.rglob("*.db")) == files
    assert list(tmp_path.iterdir()) == []

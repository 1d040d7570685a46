"""Reads that wait: woken by a hint, right without one, bounded, and ended when they must be."""

import contextlib
import queue
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from served import Site, running_site
from wire import Client, get, post

from fleet import Device, as_owner, enrol, issue
from postseal import door
from postseal.inbound import hints, waiting
from postseal.postgres.access import Access
from postseal.postgres.ingest import StreamKey
from postseal.postgres.reading import read_contiguous
from postseal.postgres.transaction import Connection
from postseal.settings import Settings
from postseal.web import streams
from until import until

POLL_S = 20.0
"""So long that only a hint can be meant where a reader is woken within SOON_S: the next look is half of it off."""
SOON_S = 5.0
DEADLINE_S = 15.0
READERS = 200


@dataclass(frozen=True, slots=True)
class Look:
    """When the database had been asked, and of which streams."""

    at_s: float
    streams: list[int]


Looks = queue.Queue[Look]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Each look into the database, when it has been done."""
    done = Looks()

    async def look(connection: Connection, wanted: Sequence[StreamKey]) -> dict[int, int]:
        reached = await read_contiguous(connection, wanted)
        done.put(Look(time.monotonic(), [stream.stream for stream in wanted]))
        return reached

    monkeypatch.setattr(waiting, "read_contiguous", look)
    return done


@pytest.fixture
def rare_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for oneself takes too long to help."""
    monkeypatch.setattr(waiting, "POLL_S", POLL_S)


@pytest.fixture
def consumer(access: Access) -> str:
    """The credential of a consumer of project apollo."""
    enrol(access, "another")  # which makes the tenant and the project
    return issue(access, "acme", None, ["apollo"], "consumer").reveal()


def send(site: Site, device: Device, sequence: int) -> None:
    """Have one envelope accepted there."""
    assert site.ask(post(device.token.reveal(), device.envelope(sequence))).status == 201


def ask(reader: Client, device: Device, consumer: str, *, after: int = 0) -> None:
    """Begin to wait for what comes behind `after`."""
    reader.send(get(f"/v1/projects/apollo/streams/{device.name}/envelopes?wait=30&after={after}", consumer))


def sequences(reader: Client) -> list[int]:
    """What came at last."""
    answer = reader.answer()
    assert answer.status == 200
    return [item["sequence"] for item in answer.document["items"]]


def listeners(access: Access) -> list[int]:
    """The sessions that listen for hints."""
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'LISTEN %' AND state = 'idle'"
        ).fetchall()
    return [pid for (pid,) in rows]


def wait_for_look(looks: Looks, device: Device) -> None:
    """Wait until the database was asked of the device's stream, as it is when a reader begins to wait for it."""
    while device.stream not in looks.get(timeout=DEADLINE_S).streams:
        pass


@contextmanager
def soon() -> Generator[None]:
    """What the block waits for must come soon."""
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.usefixtures("rare_polls")
def test_what_the_same_process_accepts_wakes_a_reader(access: Access, consumer: str, looks: Looks) -> None:
    """At once, even where no session can listen; who waits for more than that goes on waiting."""
    settings = Settings(prepared_statements=False)
    with running_site(access, settings) as site, site.client() as reader, site.client() as further:
        ask(further, site.device, consumer, after=1)
        wait_for_look(looks, site.device)
        ask(reader, site.device, consumer)
        wait_for_look(looks, site.device)
        send(site, site.device, 1)
        with soon():
            assert sequences(reader) == [1]
        send(site, site.device, 2)
        with soon():
            assert sequences(further) == [2]


@pytest.mark.usefixtures("rare_polls")
def test_what_another_process_accepts_wakes_a_reader(access: Access, consumer: str, looks: Looks) -> None:
    """Soon; also after somebody wrote nonsense on the channel, and after the listening session was lost."""

    def pass_on(device: Device) -> None:
        ask(reader, device, consumer)
        wait_for_look(looks, device)
        until(lambda: bool(listeners(access)))
        send(there, device, 1)
        with soon():
            assert sequences(reader) == [1]

    with (
        running_site(access, Settings()) as here,
        running_site(access, Settings(), device=here.device) as there,
        here.client() as reader,
    ):
        pass_on(here.device)
        pass_on(enrol(access, "second"))
        with as_owner(access) as owner:
            owner.execute("SELECT pg_notify('postseal_hints', '1:x,,9')")
        pass_on(enrol(access, "third"))
        with as_owner(access) as owner:
            [lost] = listeners(access)
            owner.execute("SELECT pg_terminate_backend(%s)", [lost])
        until(lambda: bool(set(listeners(access)) - {lost}))
        pass_on(enrol(access, "fourth"))


def test_a_reader_needs_no_hint(access: Access, consumer: str, looks: Looks) -> None:
    """Where no session can listen, it gets what another process accepted by looking."""
    settings = Settings(prepared_statements=False)
    with running_site(access, settings) as here, running_site(access, settings, device=here.device) as there:
        with here.client() as reader:
            ask(reader, here.device, consumer)
            wait_for_look(looks, here.device)
            send(there, here.device, 1)
            assert sequences(reader) == [1]
        assert listeners(access) == []


def test_readers_of_one_stream_cost_one_look(
    access: Access, consumer: str, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait for a stream, the database is asked once every poll; and all of them are woken."""
    monkeypatch.setattr(waiting, "POLL_S", 0.4)
    with running_site(access, Settings()) as site, contextlib.ExitStack() as stack:
        readers = [stack.enter_context(site.client()) for _ in range(READERS)]
        for reader in readers:
            ask(reader, site.device, consumer)
        quiet_s = time.monotonic() + 1
        while time.monotonic() < quiet_s:  # until all have their places
            wait_for_look(looks, site.device)
        next_looks = [looks.get(timeout=DEADLINE_S) for _ in range(5)]
        assert [look.streams for look in next_looks] == [[site.device.stream]] * 5
        assert next_looks[-1].at_s - next_looks[0].at_s > 2 * 0.2  # a look that comes late makes the next gap shorter
        send(site, site.device, 1)
        assert [sequences(reader) for reader in readers] == [[1]] * READERS


def test_no_more_wait_than_may(access: Access, consumer: str, looks: Looks) -> None:
    """A read beyond the setting is answered at once, as it would be without `wait`; a place that is left is free."""
    settings = Settings(max_waiting_reads=1)
    with running_site(access, settings) as site, site.client() as reader, site.client() as beyond:
        for device in (site.device, enrol(access, "second")):
            ask(reader, device, consumer)
            wait_for_look(looks, device)
            ask(beyond, device, consumer)
            assert sequences(beyond) == []
            send(site, device, 1)
            assert sequences(reader) == [1]


def test_a_stop_ends_waits_at_once(access: Access, consumer: str, looks: Looks) -> None:
    """The reader gets its empty page, and the stop does not take as long as the wait."""
    with contextlib.ExitStack() as stack:
        with running_site(access, Settings()) as site:
            reader = stack.enter_context(site.client())
            ask(reader, site.device, consumer)
            wait_for_look(looks, site.device)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 3
        assert sequences(reader) == []


def test_a_revoked_credential_ends_a_wait(
    access: Access, consumer: str, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the seconds for which a credential is remembered, and nothing that comes later is shown."""
    monkeypatch.setattr(door, "REMEMBERED_FOR_S", 0.2)
    monkeypatch.setattr(streams, "IDENTIFY_EVERY_S", 0.1)
    with running_site(access, Settings()) as site, site.client() as reader:
        ask(reader, site.device, consumer)
        wait_for_look(looks, site.device)
        with as_owner(access) as owner:
            owner.execute("UPDATE credentials SET revoked_at = clock_timestamp() WHERE role = 'consumer'")
        answer = reader.answer()
    assert (answer.status, answer.reason) == (401, "unauthenticated")


@pytest.mark.parametrize("hint", ["x", "1", "1:", "1:2:3", "1:2,", "9" * 5000 + ":1"])
def test_a_hint_that_is_none(hint: str) -> None:
    """Another text than ours is told from a hint."""
    with pytest.raises(ValueError, match=r"."):
        hints.read_hint(hint)


def test_a_hint_holds_what_a_notice_can() -> None:
    """Positions come back as they were; of too many, which do not fit, nothing stands in it."""
    few = {1: 5, 7_000_000_000: 9_007_199_254_740_991}
    assert hints.read_hint(hints.write_hint(few)) == few
    assert hints.read_hint(hints.write_hint(dict.fromkeys(range(1000), 1 << 50))) == {}

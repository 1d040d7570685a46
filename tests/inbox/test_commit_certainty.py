"""Nothing is acknowledged that is not committed for certain, and the retry finds it there exactly once.

Each fault is a real one: a trigger that fails or sleeps, a server process that is cancelled or ended, a wire that is
cut. After it the same service, without a restart, acknowledges the same envelopes.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString

import pytest
from structlog.testing import capture_logs
from triggers import WRITES, raising, raising_first, trigger
from wire_proxy import Deed, WireProxy, proxied

from fleet import Device, as_owner, enrol, locked_stream, stored
from postseal.errors import Unavailable
from postseal.inbound import commit, lane
from postseal.inbound.hints import Hints
from postseal.outcomes import Outcome, Reason
from postseal.postgres import ingest
from postseal.postgres.access import Access
from postseal.postgres.exchange import Statement
from postseal.postgres.transaction import LOCK_TIMEOUT, SET_BOUNDS_AND_PLANS, STATEMENT_TIMEOUT
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt, Refusal, Verdict
from until import until_async, waits_for_lock

pytestmark = pytest.mark.anyio

RETRIES = 40
RETRY_PAUSE_S = 0.1
BOUND_S = 8.0
SHORT_DEADLINE_S = 1.0
"""Enough for what goes before the fault, and over before what is kept from ending ends."""
AT_COMMIT_SLEEP = "PERFORM pg_sleep(2.5);"
ENVELOPES = 3


def batch(device: Device) -> list[bytes]:
    """Three envelopes that are new."""
    return [device.envelope(sequence) for sequence in range(1, ENVELOPES + 1)]


async def send(service: Service, device: Device, bodies: list[bytes]) -> list[Verdict]:
    """Their verdicts, within the bound that every caller can rely on."""
    async with asyncio.timeout(BOUND_S):
        verdicts = await service.inbox.receive_batch(device.inbound(b"\n".join(bodies)))
    assert isinstance(verdicts, list)
    return verdicts


def words(verdicts: list[Verdict]) -> list[Outcome | Reason]:
    """Outcome or reason of each."""
    return [v.outcome if isinstance(v, Receipt) else v.reason for v in verdicts]


def require_unavailable(verdicts: list[Verdict]) -> None:
    """Nothing of it is acknowledged."""
    assert words(verdicts) == [Reason.UNAVAILABLE] * len(verdicts)


async def require_retry(access: Access, service: Service, device: Device, bodies: list[bytes]) -> set[Outcome]:
    """Send again until all is acknowledged; then each is there exactly once. Returns the outcomes told."""
    told: list[Outcome | Reason] = []
    for _ in range(RETRIES):
        told = words(await send(service, device, bodies))
        if Reason.UNAVAILABLE not in told:
            break
        await asyncio.sleep(RETRY_PAUSE_S)  # what became of the first try is still under its locks
    assert set(told) <= {Outcome.ACCEPTED, Outcome.DUPLICATE}
    kept = stored(access, device)
    assert kept.cursor == (0, len(bodies), len(bodies))
    assert kept.sequences.keys() == kept.payloads == set(range(1, len(bodies) + 1))
    news = [outcome for outcome, _ in kept.audits if outcome != Outcome.DUPLICATE]
    assert news == [Outcome.ACCEPTED] * len(bodies)
    return {outcome for outcome in told if isinstance(outcome, Outcome)}


def require_nothing_written(access: Access, device: Device) -> None:
    """Neither identity, payload, audit event nor cursor."""
    kept = stored(access, device)
    assert (kept.cursor, kept.sequences, kept.payloads, kept.audits) == ((0, 0, 0), {}, set(), [])


@pytest.mark.parametrize("sqlstate", ["22000", "23505", "40001", "53100", "P0001", "XX000"])
async def test_a_write_that_fails_acknowledges_and_leaves_nothing(access: Access, service: Service, sqlstate: str):
    """Whichever of the four writes fails, and however, nothing of the group is half written."""
    for number, table in enumerate(WRITES):
        device = enrol(access, tenant=f"tenant-{number}")
        bodies = batch(device)
        with trigger(access, table, raising(sqlstate)):
            require_unavailable(await send(service, device, bodies))
            require_nothing_written(access, device)
        assert await require_retry(access, service, device, bodies) == {Outcome.ACCEPTED}


@pytest.mark.parametrize("sqlstate", ["22003", "23514"])
async def test_one_poisonous_envelope_fails_alone(access: Access, service: Service, device: Device, sqlstate: str):
    """Class 22 and 23 are a fault of one envelope's: the others of its group are acknowledged."""
    event = "00000000-0000-4000-8000-000000000002"
    bodies = [device.envelope(1), device.envelope(2, eventId=event), device.envelope(3)]
    with trigger(access, "identities", raising(sqlstate, only_event=event)):
        told = words(await send(service, device, bodies))
        assert told == [Outcome.ACCEPTED, Reason.UNAVAILABLE, Outcome.GAP]
        kept = stored(access, device)
        assert kept.cursor == (0, 1, 3)
        assert kept.sequences.keys() == kept.payloads == {1, 3}
    assert words(await send(service, device, bodies)) == [
        Outcome.DUPLICATE,
        Outcome.REORDERED,
        Outcome.DUPLICATE,
    ]


@pytest.fixture
def tries(access: Access) -> Iterator[None]:
    """The sequence that counts how often a group was tried."""
    with as_owner(access) as owner:
        owner.execute("CREATE SEQUENCE tries")
        yield


def tried(access: Access) -> int:
    """How often `raising_first` was met."""
    with as_owner(access) as owner:
        row = owner.execute("SELECT last_value FROM tries").fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
async def test_a_group_that_lost_a_race_runs_once_more(
    access: Access, service: Service, device: Device, tries: None, sqlstate: str
):
    """Class 40 once is not the caller's concern."""
    with trigger(access, "streams", raising_first(1, sqlstate)):
        assert words(await send(service, device, batch(device))) == [Outcome.ACCEPTED] * ENVELOPES
    assert tried(access) == 2


async def test_a_group_that_lost_two_races_is_unavailable(
    access: Access, service: Service, device: Device, tries: None
):
    """There is one retry, not a loop."""
    bodies = batch(device)
    with trigger(access, "streams", raising_first(2, "40001")):
        require_unavailable(await send(service, device, bodies))
        assert tried(access) == 2
    await require_retry(access, service, device, bodies)


@contextmanager
def shorter(bound: LiteralString, from_: LiteralString) -> Generator[None]:
    """A group's bound of the server's is 150 ms in place of `from_`, until the block ends."""
    changed = SET_BOUNDS_AND_PLANS.replace(f"'{bound}', '{from_}'", f"'{bound}', '150ms'")
    assert changed != SET_BOUNDS_AND_PLANS
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ingest, "_SET_BOUNDS_AND_PLANS", Statement(changed))
        yield


async def test_a_lock_that_is_not_had_in_time(access: Access, service: Service, device: Device):
    """Someone sits on the stream: `unavailable` after the lock time-out, and the lane goes on."""
    bodies = batch(device)
    with as_owner(access) as owner, owner.transaction(), shorter("lock_timeout", LOCK_TIMEOUT), capture_logs() as log:
        owner.execute("SELECT FROM streams FOR NO KEY UPDATE")
        require_unavailable(await send(service, device, bodies))
    assert [event["sqlstate"] for event in log] == ["55P03"]
    assert await require_retry(access, service, device, bodies) == {Outcome.ACCEPTED}


async def test_a_statement_that_takes_too_long(access: Access, service: Service, device: Device):
    """The server ends it after its own time-out, well before the client's deadline."""
    bodies = batch(device)
    with trigger(access, "payloads", "PERFORM pg_sleep(60);"):
        with shorter("statement_timeout", STATEMENT_TIMEOUT), capture_logs() as log:
            require_unavailable(await send(service, device, bodies))
        require_nothing_written(access, device)
    assert [event["sqlstate"] for event in log] == ["57014"]
    assert await require_retry(access, service, device, bodies) == {Outcome.ACCEPTED}


async def test_a_cursor_that_does_not_move(access: Access, service: Service, device: Device):
    """Whatever keeps the update of a locked stream from happening, nothing of the group is committed."""
    bodies = batch(device)
    with trigger(access, "streams", "RETURN NULL;"):
        require_unavailable(await send(service, device, bodies))
        require_nothing_written(access, device)
    assert await require_retry(access, service, device, bodies) == {Outcome.ACCEPTED}


async def test_a_hint_that_fails_undoes_nothing(access: Access, device: Device, monkeypatch: pytest.MonkeyPatch):
    """What is committed for certain is acknowledged and not tried again, though nobody could be told of it."""

    def moved(_hints: Hints, cursors: object) -> None:
        raise RuntimeError(cursors)

    monkeypatch.setattr(Hints, "moved", moved)
    async with running_service(Settings(), access) as service:
        assert words(await send(service, device, batch(device))) == [Outcome.ACCEPTED] * ENVELOPES
    assert stored(access, device).audits == [(Outcome.ACCEPTED, None)] * ENVELOPES


async def test_a_commit_that_fails(access: Access, service: Service, device: Device):
    """A constraint that is checked at COMMIT undoes all of it."""
    bodies = batch(device)
    with trigger(access, "identities", raising("23514"), at_commit=True):
        require_unavailable(await send(service, device, bodies))
        require_nothing_written(access, device)
    assert await require_retry(access, service, device, bodies) == {Outcome.ACCEPTED}


async def test_a_commit_that_comes_back_with_a_warning(access: Access, service: Service, device: Device):
    """It is what a cancelled wait for a standby looks like: committed here, certain nowhere."""
    bodies = batch(device)
    with trigger(access, "streams", "RAISE WARNING 'canceling wait';", at_commit=True):
        require_unavailable(await send(service, device, bodies))
    assert await require_retry(access, service, device, bodies) == {Outcome.DUPLICATE}


async def test_a_notice_is_no_warning(access: Access, service: Service, device: Device):
    """Only WARNING and above make a COMMIT uncertain."""
    with trigger(access, "streams", "RAISE NOTICE 'by the way';", at_commit=True):
        assert words(await send(service, device, batch(device))) == [Outcome.ACCEPTED] * ENVELOPES


@contextmanager
def impatient() -> Generator[None]:
    """The deadline of a lane is SHORT_DEADLINE_S until the block ends, so that it does not cut retries off."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lane, "DATABASE_DEADLINE_S", SHORT_DEADLINE_S)
        yield


async def test_a_commit_that_hangs(access: Access, service: Service, device: Device):
    """Past the deadline the connection is thrown away; the COMMIT may still happen, and the retry is a duplicate."""
    bodies = batch(device)
    with trigger(access, "streams", AT_COMMIT_SLEEP, at_commit=True), impatient():
        require_unavailable(await send(service, device, bodies))
    assert await require_retry(access, service, device, bodies) == {Outcome.DUPLICATE}


@pytest.mark.parametrize("ending", ["pg_cancel_backend", "pg_terminate_backend"])
async def test_a_commit_whose_server_process_is_stopped(access: Access, service: Service, device: Device, ending: str):
    """Cancelled or ended in the middle of COMMIT: an error either way, never an acknowledgement."""
    bodies = batch(device)
    with trigger(access, "streams", AT_COMMIT_SLEEP, at_commit=True):
        sending = asyncio.create_task(send(service, device, bodies))
        await _stop_committing(access, ending)
        require_unavailable(await sending)
    await require_retry(access, service, device, bodies)


async def _stop_committing(access: Access, ending: str) -> None:
    committing = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    with as_owner(access) as owner:
        await until_async(lambda: owner.execute(f"SELECT {ending}(pid) {committing}".encode()).rowcount == 1)


@pytest.fixture
async def wire(access: Access) -> AsyncIterator[tuple[Service, WireProxy]]:
    """A service whose way to the database can be spoiled."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            proxied(access, Path(folder)) as (through, proxy),
            running_service(Settings(prepared_statements=False), through) as service,
        ):
            yield service, proxy


@pytest.mark.parametrize(
    ("deed", "retried"),
    [
        (Deed.CUT_BEFORE, Outcome.ACCEPTED),
        (Deed.CUT_AFTER, Outcome.DUPLICATE),
        (Deed.TURN, Outcome.ACCEPTED),
        (Deed.SWALLOW, Outcome.ACCEPTED),
        (Deed.KEEP_ANSWER, Outcome.DUPLICATE),
    ],
)
async def test_a_wire_that_fails_around_the_commit(
    access: Access,
    wire: tuple[Service, WireProxy],
    device: Device,
    deed: Deed,
    retried: Outcome,
):
    """Before, after, or in silence: unknown to the caller, and exactly once after the retry."""
    service, proxy = wire
    bodies = batch(device)
    proxy.deed = deed
    with impatient():
        require_unavailable(await send(service, device, bodies))
    assert proxy.done == 1
    assert await require_retry(access, service, device, bodies) == {retried}


async def test_the_wire_alone_spoils_nothing(access: Access, wire: tuple[Service, WireProxy], device: Device):
    """The proxy carries a group unharmed, so the refusals above are the deeds'."""
    service, _ = wire
    assert words(await send(service, device, batch(device))) == [Outcome.ACCEPTED] * ENVELOPES


async def test_a_fault_of_our_own_does_not_end_a_lane(access: Access, service: Service, device: Device):
    """A stream that vanished, which no part of the service can do, fails its own envelopes and no others, ever."""
    other = enrol(access, "device-02")
    first, second = device.envelope(1), device.envelope(2)
    assert words(await send(service, device, [first])) == [Outcome.ACCEPTED]
    with as_owner(access) as owner:
        owner.execute("DELETE FROM streams WHERE stream = %s", [device.stream])
    for sequence in range(1, 6):
        lost, kept = await asyncio.gather(
            send(service, device, [second]), send(service, other, [other.envelope(sequence)])
        )
        require_unavailable(lost)
        assert words(kept) == [Outcome.ACCEPTED]


async def test_a_caller_that_goes_away_takes_nothing_back(access: Access, service: Service, device: Device):
    """Its envelope is committed or not at all, and the next one gets its answer."""
    body = device.envelope(1)
    with locked_stream(access, device):
        gone = asyncio.create_task(service.inbox.receive(device.inbound(body)))
        await until_async(lambda: waits_for_lock(access))
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
    again = await service.inbox.receive(device.inbound(body))
    assert isinstance(again, Receipt)
    assert again.outcome is Outcome.DUPLICATE


async def test_what_waits_when_the_service_stops_is_committed(access: Access, device: Device):
    """Leaving the service answers everyone who had submitted; later ones are told `unavailable`."""
    async with running_service(Settings(), access) as service:
        await service.inbox.receive(device.inbound(device.envelope(1)))  # its key is remembered
        waiting = [
            asyncio.create_task(service.inbox.receive(device.inbound(device.envelope(sequence))))
            for sequence in range(2, 31)
        ]
        await asyncio.sleep(0)
    assert set(words(list(await asyncio.gather(*waiting)))) <= {Outcome.ACCEPTED, Outcome.GAP, Outcome.REORDERED}
    with pytest.raises(Unavailable):
        await service.committer.probe()
    assert stored(access, device).cursor == (0, 30, 30)


async def test_an_overfull_queue_refuses_at_once(
    access: Access, service: Service, device: Device, monkeypatch: pytest.MonkeyPatch
):
    """More than the queue holds is `unavailable` without a wait, and what fits is committed."""
    monkeypatch.setattr(commit, "QUEUE_ENTRIES", 2)
    bodies = batch(device)
    verdicts = await send(service, device, bodies)
    assert all(isinstance(verdict, Refusal) for verdict in verdicts)
    require_unavailable(verdicts)
    assert words(await send(service, device, bodies[:2])) == [Outcome.ACCEPTED] * 2

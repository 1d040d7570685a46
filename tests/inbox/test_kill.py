"""`kill -9` of the service or of the whole database under load: what was acknowledged is there, exactly once.

A process of its own runs the service, sends it the envelopes of several devices and tells each acknowledgement. It is
killed, or its database is, after a random while. Then all envelopes are sent again to a fresh service: each is new or a
duplicate, and what had been acknowledged is a duplicate.
"""

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from fleet import Device, enrol, stored
from own_server import OwnServer, own_server
from postseal.outcomes import Outcome
from postseal.postgres.access import Access
from postseal.service import running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt

pytestmark = pytest.mark.anyio

DEVICES = 3
ENVELOPES = 420
"""A device's, a second of work for the load altogether; a round is killed well before its end."""
LINES = 60
UP_TO_S = 0.3
DONE_WITHIN_S = 60.0
SETTINGS = Settings(window=8192, sync_burst=10**9)
TENANTS = count()

Envelopes = dict[int, list[bytes]]
Acknowledged = dict[tuple[int, int], str]


@pytest.fixture
def server() -> Iterator[OwnServer]:
    """A database of this test's own."""
    with own_server() as server:
        yield server


def fleet(access: Access) -> tuple[list[Device], Envelopes]:
    """Devices of a tenant of their own, and what they have to say."""
    tenant = f"tenant-{next(TENANTS)}"
    devices = [enrol(access, f"device-{n}", tenant=tenant) for n in range(DEVICES)]
    sequences = range(1, ENVELOPES + 1)
    return devices, {n: [device.envelope(s) for s in sequences] for n, device in enumerate(devices)}


@asynccontextmanager
async def load(
    access: Access, devices: list[Device], envelopes: Envelopes
) -> AsyncGenerator[tuple[Process, asyncio.Task[Acknowledged]]]:
    """The process that sends, from its first acknowledgement on, and what it has told when its output ends."""
    plan = {
        "owner": access.owner,
        "passfile": str(access.passfile),
        "devices": [
            {"credential": device.token.reveal(), "envelopes": [body.decode() for body in envelopes[n]]}
            for n, device in enumerate(devices)
        ],
    }
    program = str(Path(__file__).with_name("load.py"))
    process = await asyncio.create_subprocess_exec(sys.executable, program, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(plan).encode())
        process.stdin.close()
        assert process.stdout is not None
        async with asyncio.timeout(DONE_WITHIN_S):
            first = await process.stdout.readline()
        assert first, "the load ended without an acknowledgement"
        yield process, asyncio.create_task(_told(process.stdout, first))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _told(output: asyncio.StreamReader, line: bytes) -> Acknowledged:
    told: Acknowledged = {}
    while line.endswith(b"\n"):
        device, index, outcome = line.decode().split()
        told[int(device), int(index)] = outcome
        line = await output.readline()
    return told


def require_kept(access: Access, devices: list[Device], acknowledged: Acknowledged) -> None:
    """Every acknowledged envelope is retained with its payload, and each cursor is what is retained."""
    for number, device in enumerate(devices):
        kept = stored(access, device)
        assert {index + 1 for n, index in acknowledged if n == number} <= kept.sequences.keys()
        assert kept.payloads == kept.sequences.keys()
        contiguous = 0
        while contiguous + 1 in kept.sequences:
            contiguous += 1
        assert kept.cursor == (0, contiguous, max(kept.sequences, default=0))


async def require_all_after_retry(
    access: Access, devices: list[Device], envelopes: Envelopes, acknowledged: Acknowledged
) -> None:
    """Sent again, each is new or a duplicate, a duplicate where it was acknowledged; all is there once."""
    async with running_service(SETTINGS, access) as service:
        for number, device in enumerate(devices):
            for start in range(0, ENVELOPES, LINES):
                body = b"\n".join(envelopes[number][start : start + LINES])
                verdicts = await service.inbox.receive_batch(device.inbound(body))
                assert isinstance(verdicts, list)
                for index, verdict in enumerate(verdicts, start):
                    assert isinstance(verdict, Receipt)
                    assert verdict.outcome is Outcome.DUPLICATE or (number, index) not in acknowledged
    for device in devices:
        kept = stored(access, device)
        assert kept.cursor == (0, ENVELOPES, ENVELOPES)
        assert kept.sequences.keys() == kept.payloads == set(range(1, ENVELOPES + 1))
        assert len(set(kept.sequences.values())) == ENVELOPES
    new = [outcome for outcome, _ in stored(access, devices[0]).audits if outcome != Outcome.DUPLICATE]
    assert len(new) == DEVICES * ENVELOPES


async def kill_service_round(access: Access, chance: random.Random) -> int:
    """Kill the service under load; returns how much it had acknowledged."""
    devices, envelopes = fleet(access)
    async with load(access, devices, envelopes) as (process, telling):
        await asyncio.sleep(chance.uniform(0, UP_TO_S))
        with suppress(ProcessLookupError):  # a fast machine can have done all of it before
            process.kill()
        acknowledged = await telling
    require_kept(access, devices, acknowledged)
    await require_all_after_retry(access, devices, envelopes, acknowledged)
    return len(acknowledged)


async def kill_database_round(server: OwnServer, chance: random.Random) -> None:
    """Kill the postmaster under load, start it again, and let the same service finish its work."""
    devices, envelopes = fleet(server.access)
    async with load(server.access, devices, envelopes) as (process, telling):
        await asyncio.sleep(chance.uniform(0, UP_TO_S))
        os.kill(server.postmaster, signal.SIGKILL)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(DONE_WITHIN_S):
            assert await process.wait() == 0
            acknowledged = await telling
    assert len(acknowledged) == DEVICES * ENVELOPES
    require_kept(server.access, devices, acknowledged)
    await require_all_after_retry(server.access, devices, envelopes, acknowledged)


async def test_a_service_that_is_killed(access: Access, seed: int):
    """Two rounds, killed at a random moment of the load."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    chance = random.Random(seed)
    for _ in range(2):
        assert await kill_service_round(access, chance)


async def test_a_database_that_is_killed(server: OwnServer, seed: int):
    """Two rounds; the service that loses its database goes on by itself when it is back."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    chance = random.Random(seed)
    for _ in range(2):
        await kill_database_round(server, chance)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_service_that_is_killed_often(access: Access, seed: int):
    """The same, 120 times."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    chance = random.Random(seed)
    for number in range(120):
        told = await kill_service_round(access, chance)
        print(f"round {number}: {told} acknowledged")


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_database_that_is_killed_often(server: OwnServer, seed: int):
    """The same, 60 times."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    chance = random.Random(seed)
    for _ in range(60):
        await kill_database_round(server, chance)

"""A backup that is taken while devices send: what it holds is whole, and their history, sent again, makes up the rest.

Devices send through one service, each until it is acknowledged, some of it out of order. Meanwhile a backup is taken.
It is restored elsewhere, and every device sends its whole history there: what the archive has is a duplicate, the rest
is new, and nothing is there twice.
"""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from places import Target

from fleet import Device, enrol, stored
from postseal.admin.actor import Actor
from postseal.archive import Manifest
from postseal.backup import back_up
from postseal.outcomes import Outcome
from postseal.postgres.access import Access
from postseal.restore import restore
from postseal.service import running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt

SETTINGS = Settings(window=8192, sync_burst=10**9)
LINES = 7
"""Envelopes a batch."""
BEFORE_AND_AFTER = 40
"""Batches that are acknowledged before the backup begins, and after it ended."""


@dataclass
class History:
    """What a device has sent, in the order in which it did."""

    device: Device
    sent: list[bytes] = field(default_factory=list[bytes])


async def send(access: Access, histories: list[History], archive: Path, chance: random.Random) -> Manifest:
    """Let every device send, until a backup has been taken and some more is sent."""
    batches, stop, moved = 0, asyncio.Event(), asyncio.Condition()

    async def send_on(history: History) -> None:
        nonlocal batches
        while not stop.is_set():
            next_sequence = len(history.sent) + 1
            lines = [history.device.envelope(s) for s in range(next_sequence, next_sequence + LINES)]
            chance.shuffle(lines)
            history.sent += lines
            verdicts = await service.inbox.receive_batch(history.device.inbound(b"\n".join(lines)))
            assert isinstance(verdicts, list)
            assert all(isinstance(verdict, Receipt) for verdict in verdicts)
            async with moved:
                batches += 1
                moved.notify_all()

    async def some_more() -> None:
        goal = batches + BEFORE_AND_AFTER
        async with moved:
            await moved.wait_for(lambda: batches >= goal)

    async with running_service(SETTINGS, access) as service, asyncio.TaskGroup() as tasks:
        for history in histories:
            tasks.create_task(send_on(history))
        await some_more()
        manifest = await asyncio.to_thread(back_up, access, archive, jobs=2)
        await some_more()
        stop.set()
    return manifest


async def send_again(access: Access, histories: list[History]) -> list[Outcome]:
    """Let every device send its whole history; how each envelope was answered."""
    outcomes: list[Outcome] = []
    async with running_service(SETTINGS, access) as service:
        for history in histories:
            for start in range(0, len(history.sent), LINES):
                body = b"\n".join(history.sent[start : start + LINES])
                verdicts = await service.inbox.receive_batch(history.device.inbound(body))
                assert isinstance(verdicts, list)
                for verdict in verdicts:
                    assert isinstance(verdict, Receipt)
                    outcomes.append(verdict.outcome)
    return outcomes


def restored_and_sent_again(
    access: Access, target: Target, archive: Path, chance: random.Random, *, devices: int
) -> None:
    """One round."""
    histories = [History(enrol(access, f"device-{n}")) for n in range(devices)]
    manifest = asyncio.run(send(access, histories, archive, chance))
    restore(target.access, archive, Actor("os:tester"), jobs=2)
    total = sum(len(history.sent) for history in histories)
    assert 0 < manifest.rows["identities"] < total
    assert manifest.rows["payloads"] == manifest.rows["identities"]

    outcomes = asyncio.run(send_again(target.access, histories))
    assert outcomes.count(Outcome.DUPLICATE) == manifest.rows["identities"]
    for history in histories:
        kept, last = stored(target.access, history.device), len(history.sent)
        assert kept.cursor == (0, last, last)
        assert kept.sequences.keys() == kept.payloads == set(range(1, last + 1))
        assert kept.sequences == stored(access, history.device).sequences
    print(f"{manifest.rows['identities']} of {total} envelopes were in the archive")
    # Sent once more, all of it is known.
    assert set(asyncio.run(send_again(target.access, histories))) == {Outcome.DUPLICATE}


def test_every_device_sends_its_history_again(access: Access, target: Target, archive: Path, seed: int) -> None:
    """Four devices: nothing is new that was in the archive, nothing is lost that was not."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    restored_and_sent_again(access, target, archive, random.Random(seed), devices=4)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(10))
def test_many_devices_send_their_history_again(
    access: Access, target: Target, archive: Path, seed: int, number: int
) -> None:
    """Twenty devices, ten times, against a database that has been filled before."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    restored_and_sent_again(access, target, archive, random.Random(seed + number), devices=20)

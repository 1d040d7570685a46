"""Two processes' worth of service on one database: whoever commits first decides, and nobody waits for ever."""

import asyncio
import random
from collections import Counter

import pytest

from fleet import Device, enrol, stored
from postseal.outcomes import Outcome
from postseal.postgres.access import Access
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt, Verdict

pytestmark = pytest.mark.anyio

SETTINGS = Settings(window=256, sync_burst=10**9)


async def send(service: Service, device: Device, bodies: list[bytes]) -> list[Verdict]:
    """The verdicts on one batch."""
    verdicts = await service.inbox.receive_batch(device.inbound(b"\n".join(bodies)))
    assert isinstance(verdicts, list)
    return verdicts


def outcomes(verdicts: list[Verdict]) -> list[str]:
    """Outcome or reason of each."""
    return [v.outcome if isinstance(v, Receipt) else v.reason for v in verdicts]


async def test_the_same_envelope_at_two_services_is_new_once(access: Access, device: Device):
    """Each of 60 envelopes is sent to both at once; one brings it, the other one hears `duplicate`."""
    async with running_service(SETTINGS, access) as one, running_service(SETTINGS, access) as other:
        bodies = [device.envelope(sequence) for sequence in range(1, 61)]
        answers = await asyncio.gather(
            *(service.inbox.receive(device.inbound(body)) for body in bodies for service in (one, other))
        )
    told = outcomes(answers)
    for mine, theirs in zip(told[::2], told[1::2], strict=True):
        assert [mine, theirs].count(Outcome.DUPLICATE) == 1
        assert {mine, theirs} <= set(Outcome)
    kept = stored(access, device)
    assert kept.cursor == (0, 60, 60)
    assert kept.sequences.keys() == kept.payloads == set(range(1, 61))
    assert Counter(outcome for outcome, _ in kept.audits)[Outcome.DUPLICATE] == 60
    assert len(kept.audits) == 120


async def test_many_streams_in_groups_that_cross_do_not_deadlock(access: Access, seed: int):
    """Both services get every device's batches, each in an order of its own; all is retained once."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    chance = random.Random(seed)
    devices = [enrol(access, f"device-{n}", tenant=f"tenant-{n % 3}") for n in range(12)]
    batches = [
        (device, [device.envelope(10 * part + n) for n in range(1, 11)]) for device in devices for part in range(10)
    ]
    async with running_service(SETTINGS, access) as one, running_service(SETTINGS, access) as other:

        async def all_of_them(service: Service) -> Counter[str]:
            mine = chance.sample(batches, len(batches))
            answers = await asyncio.gather(*(send(service, device, bodies) for device, bodies in mine))
            return Counter(word for verdicts in answers for word in outcomes(verdicts))

        both = sum(await asyncio.gather(all_of_them(one), all_of_them(other)), Counter[str]())
    assert both.keys() <= set(Outcome)
    assert both[Outcome.DUPLICATE] == both.total() // 2 == 12 * 100
    for device in devices:
        kept = stored(access, device)
        assert kept.cursor == (0, 100, 100)
        assert kept.sequences.keys() == kept.payloads == set(range(1, 101))
        events = {str(event) for event in kept.sequences.values()}
        assert len(events) == 100

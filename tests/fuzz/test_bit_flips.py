"""Of an envelope of each kind, no body that is one bit away is taken, by the inbox as it runs."""

import json
from collections import Counter
from pathlib import Path

import pytest
from every_kind import DATA, JOB, JOB_FILE, data_of

from fleet import Device, enrol, stored
from postseal.inbound.inbox import MAX_BATCH_LINES
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt, Refusal, Verdict

pytestmark = pytest.mark.anyio

BEFORE_THE_SIGNATURE_HOLDS = {
    Reason.ENVELOPE_MALFORMED,
    Reason.ROUTE_MISMATCH,
    Reason.IDENTITY_OUT_OF_BOUNDS,
    Reason.KEY_UNKNOWN,
    Reason.SIGNATURE_INVALID,
}


@pytest.fixture
def anyio_backend() -> str:
    """What psycopg needs."""
    return "asyncio"


def flips(body: bytes) -> list[bytes]:
    """Every body that differs from `body` in one bit."""
    flipped: list[bytes] = []
    for bit in range(len(body) * 8):
        other = bytearray(body)
        other[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(other))
    return flipped


async def verdicts_on(bodies: list[bytes], service: Service, device: Device) -> list[Verdict]:
    """What the inbox says of each body: as lines of batches, and alone where a flip made a line break."""
    verdicts = [await service.inbox.receive(device.inbound(body)) for body in bodies if b"\n" in body]
    lines = [body for body in bodies if b"\n" not in body]
    for start in range(0, len(lines), MAX_BATCH_LINES):
        batch = lines[start : start + MAX_BATCH_LINES]
        found = await service.inbox.receive_batch(device.inbound(b"\n".join(batch)))
        assert isinstance(found, list)
        assert len(found) == len(batch)
        verdicts += found
    return verdicts


@pytest.mark.parametrize("kind", DATA)
async def test_no_flipped_bit_is_taken(kind: str, access: Access, tmp_path: Path):
    """What is sent has no white space and one spelling, so no flip is the same event: every one is refused.

    None gets as far as check 4, since whatever a flip leaves readable the signature does not hold over.
    """
    (tmp_path / JOB_FILE).write_text(json.dumps(JOB))
    device = enrol(access)
    body = device.envelope(1, data=data_of(kind))
    settings = Settings(kinds_dir=str(tmp_path), sync_burst=100_000)
    async with running_service(settings, access) as service:
        verdicts = await verdicts_on(flips(body), service, device)
        assert len(verdicts) == len(body) * 8
        refusals = [verdict for verdict in verdicts if isinstance(verdict, Refusal)]
        assert len(refusals) == len(verdicts)
        counts = Counter(refusal.reason for refusal in refusals)
        print(kind, dict(counts))
        assert set(counts) == BEFORE_THE_SIGNATURE_HOLDS
        assert not stored(access, device).sequences
        receipt = await service.inbox.receive(device.inbound(body))
    assert isinstance(receipt, Receipt)
    assert receipt.outcome is Outcome.ACCEPTED

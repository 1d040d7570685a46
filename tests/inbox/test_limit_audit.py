"""The audit of limited callers, off the request path."""

import pytest

from fleet import Device, as_owner
from postseal.correlation import text
from postseal.door import RateLimited
from postseal.postgres.access import Access
from postseal.service import running_service
from postseal.settings import Settings

pytestmark = pytest.mark.anyio


async def test_what_was_counted_is_committed_when_the_service_stops(access: Access, device: Device):
    """The first refusal has its event at once, under the id that its caller was told; the rest is one count."""
    limited: list[RateLimited] = []
    async with running_service(Settings(sync_burst=100, sync_permits_per_s=0.001), access) as service:
        await service.inbox.receive_batch(device.inbound(b"\n".join(device.envelope(n) for n in range(1, 101))))
        for _ in range(8):
            with pytest.raises(RateLimited) as refused:
                await service.inbox.receive(device.inbound(device.envelope(101)))
            limited.append(refused.value)
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT occurrences, correlation_id FROM audit_events WHERE reason = 'sync_rate_limited' ORDER BY id"
        ).fetchall()
    assert [count for count, _ in rows] == [1, 7]
    assert str(rows[0][1]) == text(limited[0].correlation_id)

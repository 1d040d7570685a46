"""A key that changes between the check of its signature and the lock of the stream is judged by what it is then."""

import asyncio

import pytest

from fleet import Device, as_owner, locked_stream
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.service import Service
from until import until_async, waits_for_lock

pytestmark = pytest.mark.anyio

CHANGES = {
    Reason.KEY_REVOKED: "state = 'revoked'",
    Reason.KEY_UNKNOWN: "state = 'removed'",
    Reason.KEY_RETIRED: "state = 'retiring', accept_until = clock_timestamp()",
    Outcome.ACCEPTED: "state = 'retiring', accept_until = clock_timestamp() + interval '1 hour'",
}


@pytest.mark.parametrize(("answer", "change"), CHANGES.items(), ids=map(str, CHANGES))
async def test_the_state_under_the_lock_decides(
    access: Access, service: Service, device: Device, answer: Outcome | Reason, change: str
) -> None:
    """The envelope waits for the lock, its signature verified, while the key changes; then nothing old counts."""
    with locked_stream(access, device) as other:
        receiving = asyncio.create_task(service.inbox.receive(device.inbound(device.envelope(1))))
        await until_async(lambda: waits_for_lock(access))
        other.execute(f"UPDATE keys SET {change} WHERE keyid = %s".encode(), [device.keyid])  # noqa: S608 - of this table
    verdict = await receiving
    assert (getattr(verdict, "outcome", None) or verdict.reason) == answer
    with as_owner(access) as owner:
        uses = owner.execute("SELECT count(*) FROM key_uses").fetchone()
        kept = owner.execute("SELECT count(*) FROM identities").fetchone()
    assert uses == kept == (int(isinstance(answer, Outcome)),)

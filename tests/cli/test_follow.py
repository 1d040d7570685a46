"""`postseal inbox tail --follow` through an outage of its database."""

import asyncio
import json
import signal
import time

import pytest
from running import DEADLINE_S, on, started

from fleet import Device, enrol
from own_server import own_server
from postseal.postgres.access import Access
from postseal.service import running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt

OUTAGE_S = 7.0
"""Long enough for a second failure: a connection is waited for for 5 s."""


def send(access: Access, device: Device, sequence: int) -> None:
    """Have one envelope accepted."""

    async def receive() -> None:
        async with running_service(Settings(), access) as service:
            assert isinstance(await service.inbox.receive(device.inbound(device.envelope(sequence))), Receipt)

    asyncio.run(receive())


@pytest.mark.soak
def test_the_inbox_is_followed_through_an_outage() -> None:
    """The outage is told of once, and afterwards each envelope is shown that was not shown before."""
    with own_server() as server:
        device = enrol(server.access, "d1")
        send(server.access, device, 1)
        with started("inbox", "tail", "acme", "apollo", "--follow", "--json", **on(server.access)) as (tail, out, err):
            assert json.loads(out.next())["sequence"] == 1
            server.stop()
            assert "the database cannot be used at the moment" in err.next()
            time.sleep(OUTAGE_S)
            server.start()
            send(server.access, device, 2)
            assert json.loads(out.next())["sequence"] == 2
            tail.send_signal(signal.SIGINT)
            assert tail.wait(DEADLINE_S) == 130
            assert (out.rest(), err.rest()) == ([], [])

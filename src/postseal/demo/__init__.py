"""`postseal demo`: everything started, and the main job shown on real signed envelopes over HTTP, both ways.

1. the database, the service, a worker for the demo's tenant, a listening socket
2. a tenant with a project, a neighbouring tenant, and in each a new device, which enrols over HTTP (`cast`)
3. envelopes of each kind of fate, and what each was answered (`upward`)
4. a consumer reads back what was retained, and verifies every signature with the published key
5. the control plane's signed answer on its ways to receivers, which verify it too (`downward`)
6. how to do the same by hand (`by_hand`)

Each answer is held against the expected one, so that `--once` ends with 0 only if all of them came.
"""

import asyncio
import json
import socket

import structlog
import uvloop

from postseal import logs
from postseal.demo import by_hand, cast, downward, upward
from postseal.demo.cast import PROJECT, TENANT
from postseal.demo.worker import delivering, with_receivers_here
from postseal.ending import run_until_asked, signals_held
from postseal.errors import StartupError
from postseal.postgres.access import Access, open_access
from postseal.service import running_service
from postseal.settings import Settings
from postseal.web.server import address_of, bind, listening

WELCOME = """
postseal demo: a signed envelope in, a durable acknowledgement out; and a signed answer back, until it has arrived.

A device signs each envelope with its own key. The service checks it, commits identity, payload, cursor and audit in
one transaction, and only then acknowledges it. `contiguous` is how far the stream has no hole, `highest` how far it
has come.
"""

THE_WAY_BACK = """
The way back: the control plane accepts the first proposal. Its decision is signed with the tenant's key and sent until
it has arrived. A receiver verifies two signatures: that of the request, which is its own destination's, and that of the
envelope inside, which is the tenant's.
"""


def run(settings: Settings, *, once: bool, as_json: bool = False) -> None:
    """Start everything, show it, and stay up until interrupted; with `once`, end when it has been shown.

    `as_json` prints one document of what was sent, answered and delivered in place of the story.
    """
    logs.configure("warning")
    with signals_held(), open_access(settings, log=structlog.get_logger()) as access:
        access.check()
        flow = _demo(with_receivers_here(settings), access, once=once, as_json=as_json)
        run_until_asked(flow, uvloop.run)


async def _demo(settings: Settings, access: Access, *, once: bool, as_json: bool) -> None:
    say = _nothing if as_json else print
    async with (
        delivering(settings, access) as worker,
        running_service(settings, access, sealed=worker.wake) as service,
        listening(service, listener := _bind(settings)),
    ):
        address = address_of(listener)
        say(WELCOME)
        everybody = await cast.gather(service, address)
        device = everybody.device.name
        say(f"tenant {TENANT}, project {PROJECT}, device {device} (enrolled over HTTP)\n")
        steps = await upward.show(everybody, say)
        read = await upward.read_back(everybody, say)
        say(THE_WAY_BACK)
        deliveries = await downward.show(everybody, read[0].proposal, say)
        say(by_hand.commands(settings, address, everybody, once=once))
        if as_json:
            retained = [{"sequence": each.sequence, "eventIdentity": each.event_identity} for each in read]
            document = {"url": address, "tenant": TENANT, "device": device, "steps": steps, "readBack": retained}
            print(json.dumps(document | {"deliveries": deliveries}), flush=True)
        if not once:
            say("\nStays up until Ctrl-C.")
            await asyncio.Event().wait()


def _nothing(_text: str) -> None:
    """Say nothing."""


def _bind(settings: Settings) -> socket.socket:
    """The port of the settings, or a free one where that is taken: a demo shall not fail for that."""
    try:
        return bind(settings.host, settings.port)
    except StartupError:
        return bind(settings.host, 0)

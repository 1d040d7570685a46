"""The demo's own worker: for its tenant alone, to this machine too, and with retries that nobody has to wait for."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

from postseal.demo.cast import TENANT
from postseal.outbound.scheduler import FixedTenants
from postseal.outbound.targets import Targets
from postseal.outbound.worker import Pace, Worker
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.rules.delivery import Backoff
from postseal.settings import Settings
from postseal.worker_service import deployment_key, http_sender

LOOPBACK = "127.0.0.0/8"
CONNECTIONS = 4
PACE = Pace(poll_s=0.1, stop_grace_s=2.0, backoff=Backoff(base_s=0.25, cap_s=2.0))


def with_receivers_here(settings: Settings) -> Settings:
    """The same settings, with which deliveries may be pushed to this machine, without TLS and past any proxy."""
    allowed = (*settings.allowed_cidrs, LOOPBACK)
    return msgspec.structs.replace(settings, allow_http=True, allowed_cidrs=allowed, egress_proxy=None)


@asynccontextmanager
async def delivering(settings: Settings, access: Access) -> AsyncGenerator[Worker]:
    """Deliver the mail of the demo's tenant until the block ends. Raises StartupError."""
    clock = time.monotonic
    key = deployment_key(settings)
    async with (
        Database(access.of(Part.DELIVERY), prepare=settings.prepared_statements, size=CONNECTIONS) as database,
        http_sender(settings) as sender,
        Worker(
            database, FixedTenants(database, [TENANT], clock), sender, Targets(database, key, clock), PACE, clock=clock
        ) as worker,
    ):
        yield worker

"""Where deliveries are pushed to, and what signs the requests: looked up set-wise and remembered for a few seconds.

A changed address, a new secret and a disabled destination count after REMEMBERED_FOR_S at the latest.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.postgres import destinations
from postseal.postgres.database import Connection, Database
from postseal.remembered import Remembered
from postseal.rules.delivery import Code
from postseal.senders import Secret
from postseal.senders.secrets import DeploymentKey, SecretUnusable

REMEMBERED_FOR_S = 5.0
REMEMBERED_TARGETS = 10_000

_log: FilteringBoundLogger = structlog.get_logger("postseal.worker")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to push to. With a `fault`, which is ours, nothing can be sent; `taken_away` says that nothing may be."""

    url: str = field(default="", repr=False)
    secrets: Sequence[Secret] = field(default=(), repr=False)
    fault: Code | None = None
    taken_away: bool = False


class Targets:
    """The targets of one worker."""

    def __init__(self, database: Database, key: DeploymentKey, clock: Callable[[], float]) -> None:
        self._database = database
        self._key = key
        self._remembered: Remembered[tuple[str, int], Target] = Remembered(
            entries=REMEMBERED_TARGETS, ttl_s=REMEMBERED_FOR_S, clock=clock
        )

    async def of(self, tenant: str, streams: Collection[int]) -> dict[int, Target]:
        """The target of each stream. Raises Unavailable."""
        known = {stream: self._remembered.recall((tenant, stream)) for stream in streams}
        targets = {stream: target for stream, target in known.items() if target is not None}
        missing = [stream for stream in known if stream not in targets]
        if missing:
            targets |= await self._look_up(tenant, missing)
        return targets

    async def _look_up(self, tenant: str, streams: Sequence[int]) -> dict[int, Target]:
        async def read(connection: Connection) -> dict[int, destinations.TargetRow]:
            return await destinations.read_targets(connection, tenant, streams)

        rows = await self._database.transact(read)
        targets = {stream: self._opened(rows.get(stream)) for stream in streams}
        for stream, target in targets.items():
            if not target.taken_away:
                self._remembered.remember((tenant, stream), target)
        if unusable := sum(target.fault is not None for target in targets.values()):
            _log.error("secrets_not_opened", tenant=tenant, destinations=unusable)
        return targets

    def _opened(self, row: destinations.TargetRow | None) -> Target:
        if row is None or row.disabled or row.url is None:
            return Target(taken_away=True)
        try:
            encrypted = [(each.scheme, each.encrypted) for each in row.secrets]
            secrets = self._key.open_all(row.tenant, row.stream, encrypted)
        except SecretUnusable:
            return Target(fault=Code.SECRET_UNUSABLE)
        return Target(row.url, secrets)

"""The sealer: intents that applications left in their own transactions become deliveries (protocol section 7, Outbox).

Tenants take turns: each has one transaction of at most 100 intents, then the next one. What cannot be sealed yet waits
with a code (`SealCode`) and is tried again, ever more rarely. An intent that the database itself refuses is sought out
one by one, so that it keeps no other one waiting.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import msgspec
import psycopg
import structlog
from structlog.typing import FilteringBoundLogger

from postseal.logs import where
from postseal.outbound.outbox import MAX_SEALED, Intent, Outbox, Sealed, Unsealed, Wish
from postseal.postgres.database import Connection, Database
from postseal.postgres.intents import WaitingIntent, drop_intents, refuse_intents, take_intents, tenants_with_intents
from postseal.rules.delivery import SealCode

PAGE_TENANTS: Final = 100
MIN_POLL_SHARE = 0.5
"""Of the pause between two looks this is always waited; how much more is random, so that many sealers do not look at
once."""
FAULTY_CONTENT = (psycopg.DataError, psycopg.IntegrityError)
"""What the database says of a value that it does not take: SQLSTATE classes 22 and 23."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.sealer")
_DATA = msgspec.json.Decoder(dict[str, Any])


class Sealer:
    """Seals what is due. `database` is the part that delivers. Any number of them may work beside each other.

    `sealed` hears that something was, for certain.
    """

    def __init__(
        self, outbox: Outbox, database: Database, *, poll_s: float, sealed: Callable[[], None] = lambda: None
    ) -> None:
        self._sealed = sealed
        self._outbox = outbox
        self._database = database
        self._poll_s = poll_s

    async def run(self, stop: asyncio.Event) -> None:
        """Seal until `stop` is set: without a pause while there is something, else looking every `poll_s` or sooner.

        Whatever fails is logged and tried again.
        """
        while not stop.is_set():
            try:
                taken = await self.once(stop)
            except Exception as fault:  # noqa: BLE001 - whatever fails here must not end the sealing
                _log.warning("intents_not_read", error=type(fault).__name__, at=where(fault))
                taken = 0
            if not taken:
                pause_s = self._poll_s * random.uniform(MIN_POLL_SHARE, 1)  # noqa: S311 - jitter, no secret
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await stop.wait()

    async def once(self, stop: asyncio.Event | None = None) -> int:
        """One turn of every tenant that has intents due; returns how many were sealed or told to wait.

        After 0 nothing was due. Raises Unavailable where the tenants cannot be read.
        """
        taken, after = 0, ""
        while tenants := await self._tenants(after):
            for tenant in tenants:
                if stop is not None and stop.is_set():
                    return taken
                taken += await self._turn(tenant)
            after = tenants[-1]
        return taken

    async def _tenants(self, after: str) -> list[str]:
        return await self._database.transact(
            lambda connection: tenants_with_intents(connection, after=after, limit=PAGE_TENANTS)
        )

    async def _turn(self, tenant: str) -> int:
        """One tenant's turn; its faults are its own."""
        try:
            try:
                return await self._seal(tenant, MAX_SEALED)
            except FAULTY_CONTENT:
                return await self._one_by_one(tenant)
        except Exception as fault:  # noqa: BLE001 - one tenant's fault must not keep the others waiting
            _log.warning("intents_not_sealed", tenant=tenant, error=type(fault).__name__, at=where(fault))
            return 0

    async def _one_by_one(self, tenant: str) -> int:
        taken = 0
        for _ in range(MAX_SEALED):
            try:
                one = await self._seal(tenant, 1)
            except FAULTY_CONTENT as fault:
                one = await self._refuse_first(tenant)
                _log.warning("intent_refused", tenant=tenant, error=type(fault).__name__, sqlstate=fault.sqlstate)
            if not one:
                break
            taken += one
        return taken

    async def _seal(self, tenant: str, limit: int) -> int:
        async def work(connection: Connection) -> tuple[int, int]:
            waiting = await take_intents(connection, tenant, limit=limit)
            refused = await self._seal_some(connection, tenant, waiting)
            if refused:
                await refuse_intents(connection, tenant, list(refused.items()))
            done = [intent.delivery for intent in waiting if intent.delivery not in refused]
            if done:
                await drop_intents(connection, tenant, done)
            return len(waiting), len(done)

        taken, done = await self._database.transact(work)
        if done:
            self._sealed()
        return taken

    async def _seal_some(
        self, connection: Connection, tenant: str, waiting: list[WaitingIntent]
    ) -> dict[UUID, SealCode]:
        """Seal them; returns those that have to wait, and why."""
        wishes: list[Wish] = []
        refused: dict[UUID, SealCode] = {}
        for intent in waiting:
            try:
                wishes.append(_wish(intent))
            except (ValueError, RecursionError):
                refused[intent.delivery] = SealCode.PAYLOAD_INVALID
        results = await self._outbox.seal(connection, tenant, wishes) if wishes else []
        for wish, result in zip(wishes, results, strict=True):
            match result:
                case Unsealed():
                    refused[wish.intent.delivery] = result.code
                case Sealed():
                    pass  # under the id of an earlier one, if that had the same key
        return refused

    async def _refuse_first(self, tenant: str) -> int:
        """Let the intent wait that the database does not take."""

        async def work(connection: Connection) -> int:
            waiting = await take_intents(connection, tenant, limit=1)
            await refuse_intents(
                connection, tenant, [(intent.delivery, SealCode.PAYLOAD_INVALID) for intent in waiting]
            )
            return len(waiting)

        return await self._database.transact(work)


def _wish(waiting: WaitingIntent) -> Wish:
    """What an application wrote. ValueError or RecursionError where its data is no JSON object."""
    intent = Intent(
        destination=waiting.destination,
        data=_DATA.decode(waiting.data),
        idempotency_key=waiting.idempotency_key,
        attempt_limit=waiting.attempt_limit,
        expires_at_ms=waiting.expires_at_ms,
        delivery=waiting.delivery,
    )
    return Wish(waiting.project, f"login:{waiting.login}", intent)

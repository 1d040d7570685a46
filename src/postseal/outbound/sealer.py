"""The sealer: intents that applications left in their own transactions become deliveries (protocol section 7, Outbox).

Tenants take turns, two at a time: each has one transaction of at most 100 intents, then the next one. What cannot be
sealed yet waits with a code (`SealCode`) and is tried again, ever more rarely, or given up where that cannot help. An
intent that the database itself refuses is sought out one by one, so that it keeps no other one waiting.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import msgspec
import psycopg
import structlog
from structlog.typing import FilteringBoundLogger

from postseal.logs import where
from postseal.outbound.outbox import MAX_SEALED, Outbox
from postseal.outbound.wishes import OwnedWish, Sealed, Unsealed, Wish
from postseal.postgres.database import Connection, Database
from postseal.postgres.intents import (
    RefusedIntent,
    WaitingIntent,
    drop_intents,
    refuse_intents,
    take_intent,
    take_intents,
    tenants_with_intents,
)
from postseal.rules.delivery import SealCode, gives_up

PAGE_TENANTS: Final = 100
SIDE_BY_SIDE: Final = 2
"""Turns at once, so that a tenant whose keys are slow holds up no other: fewer than the smallest pool of a worker."""
SIGNING_S: Final = 1.0
"""For how long a turn may begin signatures. Whoever enqueues beside it waits no longer than 2 seconds for a lock."""
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
            turns = iter(tenants)
            taken += sum(await asyncio.gather(*(self._turns(turns, stop) for _ in range(SIDE_BY_SIDE))))
            if stop is not None and stop.is_set():
                break
            after = tenants[-1]
        return taken

    async def _tenants(self, after: str) -> list[str]:
        return await self._database.transact(
            lambda connection: tenants_with_intents(connection, after=after, limit=PAGE_TENANTS)
        )

    async def _turns(self, tenants: Iterator[str], stop: asyncio.Event | None) -> int:
        """One turn after another, of tenants that others take too."""
        taken = 0
        for tenant in tenants:
            if stop is not None and stop.is_set():
                break
            taken += await self._turn(tenant)
        return taken

    async def _turn(self, tenant: str) -> int:
        """One tenant's turn; its faults are its own."""
        try:
            return await self._seal_due(tenant)
        except Exception as fault:  # noqa: BLE001 - one tenant's fault must not keep the others waiting
            _log.warning("intents_not_sealed", tenant=tenant, error=type(fault).__name__, at=where(fault))
            return 0

    async def _seal_due(self, tenant: str) -> int:
        due: list[WaitingIntent] = []

        async def take(connection: Connection) -> list[WaitingIntent]:
            due[:] = await take_intents(connection, tenant, limit=MAX_SEALED)
            return due

        try:
            return await self._seal(tenant, take)
        except FAULTY_CONTENT:
            return sum([await self._seal_alone(tenant, intent.delivery) for intent in due])

    async def _seal_alone(self, tenant: str, delivery: UUID) -> int:
        """Seal one intent, or refuse it where the database does not take it."""

        async def take(connection: Connection) -> list[WaitingIntent]:
            intent = await take_intent(connection, tenant, delivery)
            return [intent] if intent else []

        async def refuse(connection: Connection) -> int:
            taken = await take(connection)
            await refuse_intents(connection, tenant, [_refused(intent, SealCode.PAYLOAD_INVALID) for intent in taken])
            return len(taken)

        try:
            return await self._seal(tenant, take)
        except FAULTY_CONTENT as fault:
            _log.warning("intent_refused", tenant=tenant, error=type(fault).__name__, sqlstate=fault.sqlstate)
            return await self._database.transact(refuse)

    async def _seal(self, tenant: str, take: Callable[[Connection], Awaitable[list[WaitingIntent]]]) -> int:
        """One transaction of what `take` finds and locks; returns how many were sealed or refused."""

        async def work(connection: Connection) -> tuple[int, int]:
            sealed, refused = await self._judge(connection, tenant, await take(connection))
            if refused:
                await refuse_intents(connection, tenant, refused)
            if sealed:
                await drop_intents(connection, tenant, sealed)
            return len(sealed), len(refused)

        sealed, refused = await self._database.transact(work)
        if sealed:
            self._sealed()
        return sealed + refused

    async def _judge(
        self, connection: Connection, tenant: str, waiting: Sequence[WaitingIntent]
    ) -> tuple[list[UUID], list[RefusedIntent]]:
        """Seal them; returns those that are, and those that are refused. What is neither stays due as it is."""
        sealed: list[UUID] = []
        refused: list[RefusedIntent] = []
        wished: list[tuple[WaitingIntent, OwnedWish]] = []
        for intent in waiting:
            try:
                wished.append((intent, _wish(intent)))
            except (ValueError, RecursionError):
                refused.append(_refused(intent, SealCode.PAYLOAD_INVALID))
        wishes = [wish for _, wish in wished]
        results = await self._outbox.seal(connection, tenant, wishes, signing_s=SIGNING_S) if wishes else []
        for (intent, _), result in zip(wished, results, strict=True):
            match result:
                case Sealed():
                    sealed.append(intent.delivery)  # under the id of an earlier one, if that had the same key
                case Unsealed(tried=True):
                    refused.append(_refused(intent, result.code))
                case Unsealed():
                    pass
        return sealed, refused


def _refused(intent: WaitingIntent, code: SealCode) -> RefusedIntent:
    return RefusedIntent(intent.delivery, code, given_up=gives_up(code, intent.tries + 1))


def _wish(waiting: WaitingIntent) -> OwnedWish:
    """What an application wrote. ValueError or RecursionError where its data is no JSON object."""
    wish = Wish(
        destination=waiting.destination,
        data=_DATA.decode(waiting.data),
        idempotency_key=waiting.idempotency_key,
        attempt_limit=waiting.attempt_limit,
        expires_at_ms=waiting.expires_at_ms,
        delivery=waiting.delivery,
    )
    return OwnedWish(waiting.project, f"login:{waiting.login}", wish)

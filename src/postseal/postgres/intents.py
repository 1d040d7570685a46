"""Intents that wait to be sealed: found, taken, refused, dropped (role delivery).

Whoever takes some then locks their destinations, seals, and drops or refuses them, all in one transaction. One that is
given up is due at no time, and stays until somebody cancels it.
"""

from collections.abc import Sequence
from typing import LiteralString
from uuid import UUID

from msgspec import Struct

from postseal.postgres import arrays
from postseal.postgres.transaction import SET_PLANS, Connection
from postseal.rules.delivery import SealCode

MAX_INTENTS = 100
"""By one transaction: its destinations are locked meanwhile."""


class WaitingIntent(Struct, frozen=True, gc=False):
    """An intent that is due to be sealed, locked by this transaction."""

    delivery: UUID
    project: str
    destination: str
    idempotency_key: str
    data: str
    """JSON text as the application wrote it: at most 8,192 bytes, of any depth, judged by nobody yet."""
    attempt_limit: int | None
    expires_at_ms: int | None
    login: str
    tries: int
    """How often it was refused."""

    def __repr__(self) -> str:
        return f"WaitingIntent({self.delivery})"


class RefusedIntent(Struct, frozen=True, gc=False):
    """An intent that was not sealed, why, and whether it is given up for that."""

    delivery: UUID
    code: SealCode
    given_up: bool


TENANTS_WITH_INTENTS: LiteralString = """
WITH RECURSIVE tenants AS (
    (SELECT i.tenant FROM intents i WHERE i.tenant > %(after)s ORDER BY i.tenant LIMIT 1)
    UNION ALL
    SELECT n.tenant
    FROM tenants t
    CROSS JOIN LATERAL (
        SELECT i.tenant FROM intents i WHERE i.tenant > t.tenant ORDER BY i.tenant LIMIT 1
    ) AS n
)
SELECT t.tenant
FROM tenants t
CROSS JOIN LATERAL (
    (
        SELECT FROM intents i WHERE i.tenant = t.tenant AND i.tries = 0 AND i.due_at <= statement_timestamp()
        ORDER BY i.tenant, i.due_at LIMIT 1
    )
    UNION ALL
    (
        SELECT FROM intents i WHERE i.tenant = t.tenant AND i.tries > 0 AND i.due_at <= statement_timestamp()
        ORDER BY i.tenant, i.due_at LIMIT 1
    )
    LIMIT 1
) AS due
LIMIT %(limit)s
"""


async def tenants_with_intents(connection: Connection, *, after: str, limit: int) -> list[str]:
    """The first `limit` tenants behind `after` ('' for all) that have intents due, by name."""
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(TENANTS_WITH_INTENTS, {"after": after, "limit": limit})
    return [tenant for (tenant,) in await cursor.fetchall()]


COLUMNS: LiteralString = """
SELECT delivery, project, destination, idempotency_key, data::text, attempt_limit,
       floor(extract(epoch FROM expires_at) * 1000)::bigint, login, tries
"""

TAKE_INTENTS: LiteralString = """
WITH again AS MATERIALIZED (
    SELECT * FROM intents
    WHERE tenant = %(tenant)s AND tries > 0 AND due_at <= statement_timestamp()
    ORDER BY tenant, due_at LIMIT %(again)s FOR UPDATE SKIP LOCKED
), fresh AS MATERIALIZED (
    SELECT * FROM intents
    WHERE tenant = %(tenant)s AND tries = 0 AND due_at <= statement_timestamp()
    ORDER BY tenant, due_at LIMIT %(limit)s - (SELECT count(*) FROM again) FOR UPDATE SKIP LOCKED
)
{columns}
FROM (SELECT * FROM again UNION ALL SELECT * FROM fresh) AS taken
ORDER BY due_at
""".replace("{columns}", COLUMNS)


async def take_intents(connection: Connection, tenant: str, *, limit: int) -> list[WaitingIntent]:
    """Lock at most `limit` (and never more than 100) due intents of a tenant, the longest due first.

    At most half of them were refused before, so that these keep no new ones waiting. Those that another transaction has
    locked are passed over.
    """
    most = min(limit, MAX_INTENTS)
    parameters = {"tenant": tenant, "limit": most, "again": most // 2}
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(TAKE_INTENTS, parameters)
    return [WaitingIntent(*row) for row in await cursor.fetchall()]


TAKE_INTENT: LiteralString = """
{columns}
FROM intents
WHERE tenant = %(tenant)s AND delivery BETWEEN %(delivery)s AND %(delivery)s AND due_at <= statement_timestamp()
ORDER BY delivery LIMIT 1 FOR UPDATE SKIP LOCKED
""".replace("{columns}", COLUMNS)


async def take_intent(connection: Connection, tenant: str, delivery: UUID) -> WaitingIntent | None:
    """Lock one due intent by its id; None if there is none (any more), or another transaction has locked it."""
    async with connection.pipeline():
        await connection.execute(f"SELECT {SET_PLANS}")
        cursor = await connection.execute(TAKE_INTENT, {"tenant": tenant, "delivery": delivery})
    row = await cursor.fetchone()
    return WaitingIntent(*row) if row else None


# They are locked by this transaction, so that each stays at its place.
DROP_INTENTS: LiteralString = """
WITH named AS MATERIALIZED (
    SELECT i.ctid AS place
    FROM unnest(%(tenants)s::text[], %(deliveries)s::uuid[]) AS n (tenant, delivery)
    CROSS JOIN LATERAL (
        SELECT i.ctid FROM intents i WHERE i.tenant = n.tenant AND i.delivery BETWEEN n.delivery AND n.delivery
        ORDER BY i.delivery LIMIT 1
    ) AS i
)
DELETE FROM intents i USING named n WHERE i.ctid = n.place
"""


async def drop_intents(connection: Connection, tenant: str, deliveries: Sequence[UUID]) -> None:
    """Delete intents that were sealed; the caller has taken them."""
    packed = arrays.uuids([delivery.bytes for delivery in deliveries])
    tenants = arrays.texts([tenant] * len(deliveries))
    await connection.execute(DROP_INTENTS, {"tenants": tenants, "deliveries": packed})


REFUSE_INTENTS: LiteralString = """
WITH named AS MATERIALIZED (
    SELECT i.ctid AS place, n.code, n.given_up
    FROM unnest(%(tenants)s::text[], %(deliveries)s::uuid[], %(codes)s::text[], %(given_up)s::boolean[])
         AS n (tenant, delivery, code, given_up)
    CROSS JOIN LATERAL (
        SELECT i.ctid FROM intents i WHERE i.tenant = n.tenant AND i.delivery BETWEEN n.delivery AND n.delivery
        ORDER BY i.delivery LIMIT 1
    ) AS i
)
UPDATE intents i
SET code = n.code, tries = i.tries + 1,
    due_at = CASE WHEN n.given_up THEN 'infinity'
                  ELSE clock_timestamp() + least(5 * 2 ^ least(i.tries, 10), 300) * interval '1 second' END
FROM named n WHERE i.ctid = n.place
"""


async def refuse_intents(connection: Connection, tenant: str, refusals: Sequence[RefusedIntent]) -> None:
    """Let intents wait, each with its code: 5 s after the first refusal, twice as long after each, at most 5 minutes.

    Those that are given up wait for ever. The caller has taken them.
    """
    parameters = {
        "tenants": arrays.texts([tenant] * len(refusals)),
        "deliveries": arrays.uuids([refusal.delivery.bytes for refusal in refusals]),
        "codes": arrays.texts([refusal.code for refusal in refusals]),
        "given_up": arrays.bools([refusal.given_up for refusal in refusals]),
    }
    await connection.execute(REFUSE_INTENTS, parameters)

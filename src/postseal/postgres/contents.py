"""Every payload that is kept, with the names under which it is kept and the key that signed it, read in one pass."""

from collections.abc import AsyncGenerator
from typing import LiteralString
from uuid import UUID

from msgspec import Struct

from postseal.postgres.transaction import Connection

ROWS_AT_ONCE = 1_000


class Content(Struct, frozen=True, gc=False):
    """A payload, and what the tables say of it."""

    tenant: str
    project: str
    producer: str | None
    """Of what came in."""
    destination: str | None
    """Of what goes out."""
    sequence: int
    event_id: UUID
    idempotency_hash: UUID | None
    idempotency_key: str | None
    event_identity: bytes
    public_key: bytes | None
    """None where there is no such key of the device, or of the tenant."""
    payload: bytes
    signature: bytes

    def __repr__(self) -> str:
        return f"Content({self.event_identity.hex()})"  # neither payload nor signature may get into a log


INBOUND: LiteralString = """
SELECT i.tenant, s.project, s.producer, NULL::text, i.sequence, i.event_id, i.idempotency_hash, NULL::text,
       i.event_identity, k.public_key, p.payload, p.signature
FROM payloads p
JOIN identities i USING (tenant, stream, sequence)
JOIN streams s USING (tenant, stream)
LEFT JOIN keys k ON k.tenant = i.tenant AND k.keyid = i.keyid AND k.device = s.producer
"""
OUTBOUND: LiteralString = """
SELECT v.tenant, d.project, NULL::text, d.destination, v.sequence, v.event_id, NULL::uuid, v.idempotency_key,
       v.event_identity, k.public_key, p.payload, p.signature
FROM payloads p
JOIN deliveries v USING (tenant, stream, sequence)
JOIN destinations d USING (tenant, stream)
LEFT JOIN signing_keys k ON k.tenant = v.tenant AND k.keyid = v.keyid
"""


async def read_contents(connection: Connection) -> AsyncGenerator[Content]:
    """All of them in no order, ROWS_AT_ONCE in memory, inside the caller's transaction."""
    for statement in (INBOUND, OUTBOUND):
        async with connection.cursor("contents", binary=True) as cursor:
            cursor.itersize = ROWS_AT_ONCE
            await cursor.execute(statement)
            async for row in cursor:
                yield Content(*row)

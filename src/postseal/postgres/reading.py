"""What devices and consumers read of streams: how far they reach, what they hold, and who signed it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.ingest import StreamKey
from postseal.postgres.key_states import ACCEPT_UNTIL_NOW, STATE_NOW
from postseal.postgres.transaction import Connection

READ_CONTIGUOUS: LiteralString = """
SELECT s.stream, s.contiguous
FROM unnest(%(tenants)s::text[], %(streams)s::bigint[]) AS wanted (tenant, stream)
JOIN streams s ON s.tenant = wanted.tenant AND s.stream = wanted.stream
"""


async def read_contiguous(connection: Connection, streams: Sequence[StreamKey]) -> dict[int, int]:
    """The contiguous cursor of each stream, by its number."""
    tenants, numbers = [stream.tenant for stream in streams], [stream.stream for stream in streams]
    cursor = await connection.execute(READ_CONTIGUOUS, {"tenants": tenants, "streams": numbers})
    return dict(await cursor.fetchall())


@dataclass(frozen=True, slots=True)
class EnvelopeRow:
    """A retained envelope. `payload` and `signature` are None once they expired; see `read_envelopes` for `fits`."""

    sequence: int
    event_identity: bytes
    accepted_at: datetime
    keyid: str
    fits: bool
    payload: bytes | None
    signature: bytes | None


# The innermost query is bounded by its LIMIT before anything is summed. An envelope whose time is over reads as
# expired whether or not the sweep has been there, unless its tenant is held: what a hold keeps can be read.
READ_ENVELOPES: LiteralString = """
SELECT sequence, event_identity, accepted_at, keyid, fits,
       CASE WHEN fits THEN payload END, CASE WHEN fits THEN signature END
FROM (
    SELECT *, coalesce(sum(octet_length(payload)) OVER before, 0) < %(max_bytes)s AS fits
    FROM (
        SELECT i.sequence, i.event_identity, i.accepted_at, i.keyid, p.payload, p.signature
        FROM identities i
        LEFT JOIN payloads p ON p.tenant = i.tenant AND p.stream = i.stream AND p.sequence = i.sequence
                            AND (p.expires_at IS NULL OR clock_timestamp() < p.expires_at
                                 OR EXISTS (SELECT FROM holds h WHERE h.tenant = %(tenant)s))
        WHERE i.tenant = %(tenant)s AND i.stream = %(stream)s
          AND %(after)s < i.sequence AND i.sequence <= %(through)s
        ORDER BY i.sequence LIMIT %(limit)s
    ) AS page
    WINDOW before AS (ORDER BY sequence ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
) AS measured
ORDER BY sequence
"""


async def read_envelopes(
    connection: Connection, stream: StreamKey, *, after: int, through: int, limit: int, max_bytes: int
) -> list[EnvelopeRow]:
    """At most `limit` retained envelopes with `after` < sequence <= `through`, in order.

    `fits` is false from the first one before which payloads of `max_bytes` were read; theirs are left out.
    """
    parameters = {
        "tenant": stream.tenant,
        "stream": stream.stream,
        "after": after,
        "through": through,
        "limit": limit,
        "max_bytes": max_bytes,
    }
    cursor = await connection.execute(READ_ENVELOPES, parameters)
    return [EnvelopeRow(*row) for row in await cursor.fetchall()]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key of a producer's; `state` "removed" is a tombstone."""

    keyid: str
    public_key: bytes
    state: str
    accept_until: datetime | None
    registered_at: datetime
    changed_at: datetime


LIST_KEYS: LiteralString = """
SELECT k.keyid, k.public_key, {state}, {accept_until}, k.registered_at, k.changed_at
FROM keys k WHERE k.tenant = %(tenant)s AND k.device = %(device)s
ORDER BY k.registered_at, k.keyid
""".replace("{state}", STATE_NOW).replace("{accept_until}", ACCEPT_UNTIL_NOW)


async def list_keys(connection: Connection, *, tenant: str, device: str) -> list[KeyRow]:
    """All keys that a device ever had, oldest first."""
    cursor = await connection.execute(LIST_KEYS, {"tenant": tenant, "device": device})
    return [KeyRow(*row) for row in await cursor.fetchall()]

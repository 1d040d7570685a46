"""When devices' keys were last used, stream by stream: noted by group commits now and then, read before a removal.

A note is written in the transaction of the envelopes that it is about and under their stream's lock, so no two
transactions write one note at once.
"""

from collections.abc import Sequence
from typing import LiteralString

from msgspec import Struct

from postseal.postgres import arrays
from postseal.postgres.exchange import Call, Statement
from postseal.postgres.transaction import Connection
from postseal.rules.keys import Use


class KeyUse(Struct, frozen=True, gc=False):
    """A key that signed new envelopes of a stream, of which the longest is kept for `retention_s`."""

    tenant: str
    keyid: str
    stream: int
    retention_s: int


NOTE: LiteralString = """
INSERT INTO key_uses (tenant, keyid, stream, last_at, kept_until)
SELECT n.tenant, n.keyid, n.stream, clock_timestamp(), clock_timestamp() + make_interval(secs => n.retention_s)
FROM unnest(%(tenant)s::text[], %(keyid)s::text[], %(stream)s::bigint[], %(retention_s)s::bigint[])
     AS n (tenant, keyid, stream, retention_s)
ON CONFLICT (tenant, keyid, stream) DO UPDATE
SET last_at = greatest(key_uses.last_at, excluded.last_at),
    kept_until = greatest(key_uses.kept_until, excluded.kept_until)
"""
_NOTE = Statement(NOTE)


def note(uses: Sequence[KeyUse]) -> Call:
    """What notes that `uses`, each key once a stream, are being made; the caller holds the streams' locks."""
    return _NOTE(
        tenant=arrays.texts([use.tenant for use in uses]),
        keyid=arrays.texts([use.keyid for use in uses]),
        stream=arrays.int8s([use.stream for use in uses]),
        retention_s=arrays.int8s([use.retention_s for use in uses]),
    )


READ: LiteralString = """
SELECT u.keyid, s.project, u.last_at, u.kept_until, octet_length(s.above) > 0
FROM key_uses u
JOIN streams s ON s.tenant = u.tenant AND s.stream = u.stream
WHERE u.tenant = %(tenant)s AND u.keyid = ANY(%(keyids)s)
ORDER BY u.keyid, s.project
"""


async def read(connection: Connection, tenant: str, keyids: list[str]) -> dict[str, list[Use]]:
    """The uses of each of a tenant's keys, by project; none of a key that never brought anything."""
    uses: dict[str, list[Use]] = {keyid: [] for keyid in keyids}
    for keyid, *columns in await (await connection.execute(READ, {"tenant": tenant, "keyids": keyids})).fetchall():
        uses[keyid].append(Use(*columns))
    return uses

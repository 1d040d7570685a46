"""The versions of tenants' sets of signing keys, and the sets as devices follow them."""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.transaction import Connection
from postseal.rules.keys import KeyState

# Milliseconds since 1970 where they are more: a database that was restored to an earlier moment has forgotten versions
# that devices have seen, and the next change must still be newer than those.
BUMP: LiteralString = """
INSERT INTO keysets (tenant, version) VALUES (%(tenant)s, extract(epoch FROM clock_timestamp()) * 1000)
ON CONFLICT (tenant) DO UPDATE
SET version = greatest(keysets.version + 1, excluded.version)
"""


async def bump(connection: Connection, tenant: str) -> None:
    """Let a tenant's set have a newer version. Acts on its signing keys begin so: they come one after the other."""
    await connection.execute(BUMP, {"tenant": tenant})


@dataclass(frozen=True, slots=True)
class SetKey:
    """A key of a set as it was registered: a retiring one stays so when its time is over, and `accept_until` tells."""

    keyid: str
    public_key: bytes
    state: KeyState
    accept_until: datetime | None


# One statement, so that version and keys belong together.
READ: LiteralString = """
SELECT coalesce(s.version, 0), k.keyid, k.public_key, k.state, k.accept_until
FROM signing_keys k
LEFT JOIN keysets s ON s.tenant = k.tenant
WHERE k.tenant = %(tenant)s AND k.state <> 'removed'
ORDER BY k.registered_at, k.keyid
"""


async def read(connection: Connection, tenant: str) -> tuple[int, list[SetKey]]:
    """The version of a tenant's set and its keys, oldest first, revoked ones included; 0 before the first one."""
    rows = await (await connection.execute(READ, {"tenant": tenant})).fetchall()
    version = rows[0][0] if rows else 0
    return version, [SetKey(keyid, bytes(key), KeyState(state), until) for _, keyid, key, state, until in rows]

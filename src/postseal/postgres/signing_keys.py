"""The public halves of tenants' signing keys: registered, found, published. The private halves never come here."""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key with which the control plane signs for a tenant; the states are those of protocol section 8."""

    keyid: str
    public_key: bytes
    state: str
    registered_at: datetime


# Of two that come at once the second waits for the first, and then conflicts with it: one key is active.
INSERT: LiteralString = """
INSERT INTO signing_keys (tenant, keyid, public_key) VALUES (%(tenant)s, %(keyid)s, %(public_key)s)
ON CONFLICT DO NOTHING
"""


async def insert_if_none_active(connection: Connection, *, tenant: str, keyid: str, public_key: bytes) -> bool:
    """Register the tenant's active signing key; False if it has one, or ever had one of that id."""
    parameters = {"tenant": tenant, "keyid": keyid, "public_key": public_key}
    return (await connection.execute(INSERT, parameters)).rowcount == 1


COLUMNS: LiteralString = "SELECT keyid, public_key, state, registered_at FROM signing_keys WHERE tenant = %(tenant)s "
FIND_ACTIVE: LiteralString = COLUMNS + "AND state = 'active'"


async def find_active(connection: Connection, tenant: str) -> SigningKey | None:
    """The key with which new envelopes of the tenant are signed."""
    row = await (await connection.execute(FIND_ACTIVE, {"tenant": tenant})).fetchone()
    return SigningKey(*row) if row else None


LIST_SIGNING: LiteralString = COLUMNS + "AND state IN ('active', 'retiring') ORDER BY registered_at, keyid"


async def list_signing(connection: Connection, tenant: str) -> list[SigningKey]:
    """The keys under which envelopes that were signed elsewhere are taken, oldest first."""
    cursor = await connection.execute(LIST_SIGNING, {"tenant": tenant})
    return [SigningKey(*row) for row in await cursor.fetchall()]


LIST_VERIFYING: LiteralString = COLUMNS + (
    "AND state IN ('active', 'retiring', 'verify-only') ORDER BY registered_at, keyid"
)


async def list_verifying(connection: Connection, tenant: str) -> list[SigningKey]:
    """The keys whose signatures are to be believed, oldest first: neither revoked ones nor removed ones."""
    cursor = await connection.execute(LIST_VERIFYING, {"tenant": tenant})
    return [SigningKey(*row) for row in await cursor.fetchall()]

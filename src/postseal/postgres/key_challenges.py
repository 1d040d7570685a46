"""What devices have to sign to bring a further key: one challenge a device, kept as its SHA-256."""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString

from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Challenge:
    """A challenge that has not expired. It is spent once `keyid` is set, by the key that `replaces` spoke for."""

    keyid: str | None
    replaces: str | None


REPLACE: LiteralString = """
INSERT INTO key_challenges AS c (tenant, device, challenge_hash, expires_at)
VALUES (%(tenant)s, %(device)s, %(challenge_hash)s, clock_timestamp() + make_interval(secs => %(lifetime_s)s))
ON CONFLICT (tenant, device) DO UPDATE
SET challenge_hash = excluded.challenge_hash, expires_at = excluded.expires_at, keyid = NULL, replaces = NULL
RETURNING c.expires_at
"""


async def replace(
    connection: Connection, *, tenant: str, device: str, challenge_hash: bytes, lifetime_s: int
) -> datetime:
    """Keep a new challenge of a device in place of the one before it; returns when it expires."""
    parameters = {"tenant": tenant, "device": device, "challenge_hash": challenge_hash, "lifetime_s": lifetime_s}
    row = await (await connection.execute(REPLACE, parameters)).fetchone()
    assert row is not None  # noqa: S101 - an upsert of one row returns one
    return row[0]


FIND_VALID: LiteralString = """
SELECT keyid, replaces FROM key_challenges
WHERE tenant = %(tenant)s AND device = %(device)s AND challenge_hash = %(challenge_hash)s
  AND clock_timestamp() < expires_at
"""


async def find_valid(connection: Connection, tenant: str, device: str, challenge_hash: bytes) -> Challenge | None:
    """The device's unexpired challenge of that hash, spent or not; the caller has locked the device."""
    parameters = {"tenant": tenant, "device": device, "challenge_hash": challenge_hash}
    row = await (await connection.execute(FIND_VALID, parameters)).fetchone()
    return Challenge(*row) if row else None


SPEND: LiteralString = """
UPDATE key_challenges SET keyid = %(keyid)s, replaces = %(replaces)s
WHERE tenant = %(tenant)s AND device = %(device)s
"""


async def spend(connection: Connection, *, tenant: str, device: str, keyid: str, replaces: str) -> None:
    """Bind a device's challenge to the key that it brought, and to the one that spoke for it."""
    await connection.execute(SPEND, {"tenant": tenant, "device": device, "keyid": keyid, "replaces": replaces})

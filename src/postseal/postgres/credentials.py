"""Opaque credentials: found by a public id, proved by the SHA-256 of a secret of 256 random bits."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import LiteralString
from uuid import UUID

from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class StoredCredential:
    """A credential that is neither expired nor revoked, by the database's clock."""

    secret_hash: bytes
    tenant: str
    account: str
    device: str | None
    role: str
    projects: frozenset[str]


FIND_VALID: LiteralString = """
SELECT secret_hash, tenant, account, device, role, projects
FROM credentials
WHERE credential_id = %(id)s AND revoked_at IS NULL AND clock_timestamp() < expires_at
"""


async def find_valid(connection: Connection, credential_id: UUID) -> StoredCredential | None:
    """The credential of that public id, or None if there is none that is valid now."""
    row = await (await connection.execute(FIND_VALID, {"id": credential_id})).fetchone()
    if row is None:
        return None
    secret_hash, tenant, account, device, role, projects = row
    return StoredCredential(bytes(secret_hash), tenant, account, device, role, frozenset(projects))


INSERT: LiteralString = """
INSERT INTO credentials (credential_id, secret_hash, tenant, account, device, role, projects, expires_at)
VALUES (%(id)s, %(secret_hash)s, %(tenant)s, %(account)s, %(device)s, %(role)s, %(projects)s,
        clock_timestamp() + make_interval(secs => %(lifetime_s)s))
RETURNING expires_at
"""


async def insert(
    connection: Connection,
    *,
    credential_id: UUID,
    secret_hash: bytes,
    tenant: str,
    account: str,
    device: str | None,
    role: str,
    projects: list[str],
    lifetime_s: int,
) -> datetime:
    """Keep a new credential; returns when it expires."""
    parameters = {
        "id": credential_id,
        "secret_hash": secret_hash,
        "tenant": tenant,
        "account": account,
        "device": device,
        "role": role,
        "projects": projects,
        "lifetime_s": lifetime_s,
    }
    row = await (await connection.execute(INSERT, parameters)).fetchone()
    assert row is not None  # noqa: S101 - an INSERT of one row returns one
    return row[0]


REVOKE: LiteralString = """
UPDATE credentials SET revoked_at = clock_timestamp()
WHERE credential_id = %(id)s AND tenant = %(tenant)s AND revoked_at IS NULL
"""


async def revoke(connection: Connection, tenant: str, credential_id: UUID) -> bool:
    """Revoke a tenant's credential; False if it has none such that is not revoked already."""
    cursor = await connection.execute(REVOKE, {"id": credential_id, "tenant": tenant})
    return cursor.rowcount == 1


LOCK_VALID: LiteralString = """
SELECT successor FROM credentials
WHERE credential_id = %(id)s AND tenant = %(tenant)s AND revoked_at IS NULL AND clock_timestamp() < expires_at
FOR NO KEY UPDATE
"""
# Renewed once more, it does not go on for longer.
REPLACE: LiteralString = """
UPDATE credentials
SET successor = %(successor)s,
    expires_at = least(expires_at, clock_timestamp() + make_interval(secs => %(overlap_s)s))
WHERE credential_id = %(id)s AND tenant = %(tenant)s
RETURNING expires_at
"""


async def replace_if_valid(
    connection: Connection, tenant: str, credential_id: UUID, *, successor: UUID, overlap_s: int
) -> datetime | None:
    """Let a credential end in `overlap_s` seconds at the latest, since it has a successor; returns when it ends.

    An earlier successor is revoked: whoever asks again did not get it. None if the credential is not valid.
    """
    names = {"id": credential_id, "tenant": tenant}
    found = await (await connection.execute(LOCK_VALID, names)).fetchone()
    if found is None:
        return None
    if found[0] is not None:
        await revoke(connection, tenant, found[0])
    parameters = names | {"successor": successor, "overlap_s": overlap_s}
    row = await (await connection.execute(REPLACE, parameters)).fetchone()
    assert row is not None  # noqa: S101 - it is locked
    return row[0]


FIND_PROJECTS: LiteralString = """
SELECT projects FROM credentials WHERE tenant = %(tenant)s AND credential_id = %(id)s
"""


async def find_projects(connection: Connection, tenant: str, credential_id: UUID) -> list[str] | None:
    """The projects of a tenant's credential, whether or not it is still valid; None if there is no such."""
    row = await (await connection.execute(FIND_PROJECTS, {"tenant": tenant, "id": credential_id})).fetchone()
    return row[0] if row else None


LIST: LiteralString = """
SELECT credential_id, account, device, role,
       ARRAY(SELECT project FROM unnest(projects) AS project
             WHERE %(projects)s::text[] IS NULL OR project = ANY(%(projects)s) ORDER BY project),
       CASE WHEN revoked_at IS NOT NULL THEN 'revoked'
            WHEN clock_timestamp() < expires_at THEN 'valid'
            ELSE 'expired' END,
       created_at, expires_at, revoked_at
FROM credentials
WHERE tenant = %(tenant)s
  AND (%(projects)s::text[] IS NULL OR projects && %(projects)s)
  AND (%(after)s::uuid IS NULL
       OR (created_at, credential_id) > (SELECT c.created_at, c.credential_id FROM credentials c
                                         WHERE c.tenant = %(tenant)s AND c.credential_id = %(after)s))
ORDER BY created_at, credential_id LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class ListedCredential:
    """A credential as administrators see it: without its secret. `state` is valid, expired or revoked.

    Of `projects` those that were asked for.
    """

    credential_id: UUID
    account: str
    device: str | None
    role: str
    projects: list[str]
    state: str
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None


async def list_of_tenant(connection: Connection, tenant: str, part: ListPart = WHOLE) -> list[ListedCredential]:
    """A tenant's credentials, oldest first; `part.after` is one's id."""
    cursor = await connection.execute(LIST, {"tenant": tenant, **asdict(part)})
    return [ListedCredential(*row) for row in await cursor.fetchall()]

"""Invitations: an operator's one-time codes, kept as their SHA-256."""

from dataclasses import dataclass
from datetime import datetime
from typing import LiteralString
from uuid import UUID

from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation that has not expired. It is spent once `keyid`, `proof_hash` and `credential_id` are set."""

    tenant: str
    device: str
    account: str
    projects: list[str]
    adds_key: bool
    reach: list[str]
    """The projects for which whoever made the code answered: the device's own then, and the invitation's."""
    keyid: str | None
    proof_hash: bytes | None
    credential_id: UUID | None


INSERT: LiteralString = """
INSERT INTO invitations (code_hash, tenant, device, account, projects, adds_key, reach, expires_at)
VALUES (%(code_hash)s, %(tenant)s, %(device)s, %(account)s, %(projects)s, %(adds_key)s,
        %(reach)s,         clock_timestamp() + make_interval(secs => %(lifetime_s)s))
RETURNING expires_at
"""


async def insert(
    connection: Connection,
    *,
    code_hash: bytes,
    tenant: str,
    device: str,
    account: str,
    projects: list[str],
    adds_key: bool,
    reach: list[str],
    lifetime_s: int,
) -> datetime:
    """Keep a new invitation; returns when it expires."""
    parameters = {
        "code_hash": code_hash,
        "tenant": tenant,
        "device": device,
        "account": account,
        "projects": projects,
        "adds_key": adds_key,
        "reach": reach,
        "lifetime_s": lifetime_s,
    }
    row = await (await connection.execute(INSERT, parameters)).fetchone()
    assert row is not None  # noqa: S101 - an INSERT of one row returns one
    return row[0]


LOCK_VALID: LiteralString = """
SELECT tenant, device, account, projects, adds_key, reach, keyid, proof_hash, credential_id
FROM invitations
WHERE code_hash = %(code_hash)s AND clock_timestamp() < expires_at
FOR NO KEY UPDATE
"""


async def lock_valid(connection: Connection, code_hash: bytes) -> Invitation | None:
    """The unexpired invitation of that code, spent or not; nobody else spends it until this transaction ends."""
    row = await (await connection.execute(LOCK_VALID, {"code_hash": code_hash})).fetchone()
    return Invitation(*row) if row else None


SPEND: LiteralString = """
UPDATE invitations SET keyid = %(keyid)s, proof_hash = %(proof_hash)s, credential_id = %(credential_id)s
WHERE code_hash = %(code_hash)s
"""


async def spend(
    connection: Connection, code_hash: bytes, *, keyid: str, proof_hash: bytes, credential_id: UUID
) -> None:
    """Bind a locked invitation to the key, proof and credential that it brought."""
    parameters = {
        "code_hash": code_hash,
        "keyid": keyid,
        "proof_hash": proof_hash,
        "credential_id": credential_id,
    }
    await connection.execute(SPEND, parameters)

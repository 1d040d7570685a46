"""Devices' public keys, found inside the scope that a credential was verified for (protocol section 4, check 3)."""

from dataclasses import dataclass
from typing import LiteralString

from postseal.postgres.ingest import StreamKey
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Signer:
    """A key that a device may have signed with, and the device's stream in one project.

    All of it is immutable, so it may be remembered; whether the key still accepts anything new is not in here.
    """

    keyid: str
    public_key: bytes
    stream: StreamKey


FIND_SIGNER: LiteralString = """
SELECT k.public_key, s.stream
FROM keys k
JOIN streams s ON s.tenant = k.tenant AND s.project = %(project)s AND s.producer = k.device
WHERE k.tenant = %(tenant)s AND k.keyid = %(keyid)s AND k.device = %(device)s AND k.state <> 'removed'
"""


async def find_signer(
    connection: Connection, *, tenant: str, device: str, project: str, keyid: str
) -> Signer | None:
    """The device's key of that id, or None: it never had one, it was removed, or it is not enrolled in the project."""
    cursor = await connection.execute(
        FIND_SIGNER, {"tenant": tenant, "device": device, "project": project, "keyid": keyid}
    )
    row = await cursor.fetchone()
    if row is None:
        return None
    public_key, stream = row
    return Signer(keyid, bytes(public_key), StreamKey(tenant, stream))

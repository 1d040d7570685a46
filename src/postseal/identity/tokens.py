"""The default credentials: opaque tokens kept in PostgreSQL.

A token is `ps_<32 hex digits of a public id>_<43 base64url characters of a secret>`. The id finds the row; the secret
has 256 random bits, for which its SHA-256 is a sufficient hash.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from uuid import UUID, uuid4

from postseal.identity.verified import Role, VerifiedIdentity
from postseal.postgres import credentials
from postseal.postgres.database import Database

_TOKEN = re.compile(r"ps_([0-9a-f]{32})_([A-Za-z0-9_-]{43})", re.ASCII)
_NOBODYS_HASH = bytes(32)


@dataclass(frozen=True, slots=True)
class NewToken:
    """A credential at the only moment at which it is known. `repr` does not show it."""

    credential_id: UUID
    secret_hash: bytes
    _token: str

    def __repr__(self) -> str:
        return f"NewToken({self.credential_id})"

    def reveal(self) -> str:
        """The token itself, to be shown once."""
        return self._token


def new_token() -> NewToken:
    """Make a credential of 256 random bits."""
    credential_id, secret = uuid4(), secrets.token_bytes(32)
    encoded = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    return NewToken(credential_id, _hash(encoded), f"ps_{credential_id.hex}_{encoded}")


class TokenVerifier:
    """The credential verifier of the shipped composition (see `CredentialVerifier`)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def verify(self, credential: str) -> VerifiedIdentity | None:
        """See `CredentialVerifier`. A token that names no row costs the same comparison as one that does."""
        parts = _TOKEN.fullmatch(credential)
        if parts is None:
            return None
        credential_id, secret = UUID(parts[1]), parts[2]
        stored = await self._database.transact(lambda connection: credentials.find_valid(connection, credential_id))
        matches = hmac.compare_digest(_hash(secret), stored.secret_hash if stored else _NOBODYS_HASH)
        if stored is None or not matches:
            return None
        return VerifiedIdentity(
            stored.tenant,
            stored.account,
            stored.device,
            Role(stored.role),
            str(credential_id),
            stored.projects,
        )


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

"""`GET /v1/keys`: the keys with which the control plane signs for a tenant, as a JWK Set (RFC 7517, RFC 8037)."""

from typing import Literal

from msgspec import Struct

from postseal.envelope import base64url
from postseal.identity.verified import Role
from postseal.postgres.database import Database
from postseal.postgres.signing_keys import list_verifying
from postseal.web.calls import Asked, Call, Reception
from postseal.web.documents import Nothing

READERS = (Role.DEVICE, Role.CONSUMER, Role.SENDER)


class SigningKey(Struct, frozen=True):
    """A public key; its `kid` is the key id of the envelopes that it signed."""

    kid: str
    x: str
    state: str
    kty: Literal["OKP"] = "OKP"
    crv: Literal["Ed25519"] = "Ed25519"
    alg: Literal["EdDSA"] = "EdDSA"
    use: Literal["sig"] = "sig"


class SigningKeySet(Struct, frozen=True):
    """The keys whose signatures hold, oldest first; new envelopes are signed with the active one."""

    keys: list[SigningKey]


class KeyCalls:
    """The signing keys of a caller's tenant. `database` is the part that delivers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def calls(self, reception: Reception) -> list[Call]:
        """The one there is."""
        return [reception.read("/v1/keys", self.list_all, roles=READERS, query=Nothing, answer=SigningKeySet)]

    async def list_all(self, asked: Asked[Nothing, Nothing]) -> SigningKeySet:
        """The public keys with which deliveries of the caller's tenant are verified; revoked ones are left out."""
        tenant = asked.caller.tenant
        found = await self._database.transact(lambda connection: list_verifying(connection, tenant), tenant=tenant)
        return SigningKeySet([SigningKey(key.keyid, base64url.encode(key.public_key), key.state) for key in found])

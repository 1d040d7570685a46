"""The keys with which the control plane signs for a tenant: `GET /v1/keys`, and signed `GET /v1/keyset`.

The former is a JWK Set (RFC 7517, RFC 8037), to be believed as far as the connection is. The latter is believed by
whoever trusts one of its keys already.
"""

from typing import Literal

from msgspec import Struct

from postseal.envelope import base64url
from postseal.envelope.keyset import SignedKeyset
from postseal.identity.verified import Role
from postseal.outbound.keyset import Keysets
from postseal.outcomes import Reason
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

    def __init__(self, database: Database, keysets: Keysets) -> None:
        self._database = database
        self._keysets = keysets

    def calls(self, reception: Reception) -> list[Call]:
        """Both of them."""
        return [
            reception.read("/v1/keys", self.list_all, roles=READERS, query=Nothing, answer=SigningKeySet),
            reception.read(
                "/v1/keyset",
                self.signed,
                roles=READERS,
                query=Nothing,
                answer=SignedKeyset,
                reasons=(Reason.SIGNING_UNAVAILABLE,),
            ),
        ]

    async def list_all(self, asked: Asked[Nothing, Nothing]) -> SigningKeySet:
        """The public keys with which deliveries of the caller's tenant are verified; revoked ones are left out."""
        tenant = asked.caller.tenant
        found = await self._database.transact(lambda connection: list_verifying(connection, tenant), tenant=tenant)
        return SigningKeySet([SigningKey(key.keyid, base64url.encode(key.public_key), key.state) for key in found])

    async def signed(self, asked: Asked[Nothing, Nothing]) -> SignedKeyset:
        """The same keys and revoked ones, signed by each that may speak for the others: to follow rotations by."""
        return await self._keysets.of(asked.caller.tenant)

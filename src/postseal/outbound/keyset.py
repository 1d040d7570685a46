"""A tenant's signed set of signing keys, as devices follow it (protocol section 8).

It is signed by every key of the set that is to be believed and whose private half is here: so whoever trusts one of
them, an old one too, can believe the others. A revoked key speaks for none.
"""

import asyncio
import time
from collections.abc import Callable

from msgspec import UNSET

from postseal.envelope import base64url, keyset
from postseal.envelope.keyset import Keyset, KeysetKey, SignedKeyset
from postseal.errors import Refused
from postseal.outbound.signer import sign
from postseal.outcomes import Reason
from postseal.postgres import keysets
from postseal.postgres.database import Database
from postseal.postgres.keysets import SetKey
from postseal.remembered import Remembered
from postseal.rules.keys import KeyState
from postseal.signing import SigningFailed, SigningKeys

REMEMBERED_FOR_S = 5.0
REMEMBERED_SETS = 1_000


class Keysets:
    """The signed sets of one process. `database` is the part that delivers.

    What was signed is remembered by its version, for as long as a private key that is taken away may still sign.
    """

    def __init__(self, database: Database, keys: SigningKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._keys = keys
        self._signed: Remembered[tuple[str, int], SignedKeyset] = Remembered(
            entries=REMEMBERED_SETS, ttl_s=REMEMBERED_FOR_S, clock=clock
        )

    async def of(self, tenant: str) -> SignedKeyset:
        """The set of a tenant as it is now. Refused `signing_unavailable` where no key of it can sign; Unavailable."""
        version, keys = await self._database.transact(
            lambda connection: keysets.read(connection, tenant), tenant=tenant
        )
        signed = self._signed.peek((tenant, version))
        if signed is None:
            signed = await self._sign(tenant, version, keys)
            self._signed.remember((tenant, version), signed)
        return signed

    async def _sign(self, tenant: str, version: int, keys: list[SetKey]) -> SignedKeyset:
        payload = keyset.encode(Keyset([_key(key) for key in keys], tenant, version))
        message = keyset.signed_bytes(payload)
        speaking = [key for key in keys if key.state is not KeyState.REVOKED]
        signatures = await asyncio.gather(*(self._signature(tenant, key, message) for key in speaking))
        found = [each for each in signatures if each is not None]
        if not found:
            raise Refused(Reason.SIGNING_UNAVAILABLE, "no signing key of the tenant's can be used here")
        return keyset.wrap(payload, found)

    async def _signature(self, tenant: str, key: SetKey, message: bytes) -> tuple[str, bytes] | None:
        try:
            return key.keyid, await sign(self._keys, tenant, key.keyid, key.public_key, message)
        except SigningFailed:
            return None  # its private half is elsewhere, or is gone: the others speak


def _key(key: SetKey) -> KeysetKey:
    until = UNSET if key.accept_until is None else int(key.accept_until.timestamp() * 1000)
    return KeysetKey(key.keyid, base64url.encode(key.public_key), key.state, until)

"""The signatures of one transaction: by the tenant's active key, verified, and over in a few seconds.

The transaction holds its destinations' locks meanwhile, so it does not wait for every signature of a slow key: what is
signed when its time is over is committed, and the rest comes in another one. What failed once is not tried again in it.
"""

import asyncio
import time
from typing import Final

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.envelope import ed25519
from postseal.logs import where
from postseal.postgres.signing_keys import SigningKey
from postseal.rules.delivery import SealCode
from postseal.signing import SigningFailed, SigningKeys

SIGN_S: Final = 2.0
"""How long one signature may take."""
SIGNING_S: Final = 3.0
"""For how long a transaction may begin signatures. With the last of them it stays well below its deadline."""

_log: FilteringBoundLogger = structlog.get_logger("postseal.outbox")


class OutOfTime(SigningFailed):
    """The transaction's time was over: nothing was tried."""


class Signer:
    """Signs for one tenant in one transaction, which may begin signatures for `budget_s` from now on."""

    def __init__(self, keys: SigningKeys, tenant: str, key: SigningKey | None, *, budget_s: float) -> None:
        self._keys = keys
        self._tenant = tenant
        self._key = key
        self._ends_s = time.monotonic() + budget_s
        self._signed = 0
        self._failed: SigningFailed | None = None

    async def sign(self, message: bytes) -> tuple[str, bytes]:
        """Key id and signature. Raises SigningFailed, and OutOfTime, which does not happen to the first one."""
        if self._failed is not None:
            raise self._failed
        if self._signed and time.monotonic() >= self._ends_s:
            raise OutOfTime(SealCode.SIGNING_FAILED, "signatures take too long")
        try:
            signed = await self._sign(self._key, message)
        except SigningFailed as failed:
            self._failed = failed
            _log.warning("not_signed", tenant=self._tenant, code=failed.code.value, why=str(failed))
            raise
        self._signed += 1
        return signed

    async def _sign(self, key: SigningKey | None, message: bytes) -> tuple[str, bytes]:
        if key is None:
            raise SigningFailed(SealCode.SIGNING_KEY_MISSING, "the tenant has no active signing key")
        return key.keyid, await sign(self._keys, self._tenant, key.keyid, key.public_key, message)


async def sign(keys: SigningKeys, tenant: str, keyid: str, public_key: bytes, message: bytes) -> bytes:
    """The signature by a registered key, verified, within SIGN_S. Raises SigningFailed, and nothing else."""
    try:
        async with asyncio.timeout(SIGN_S):
            signature = await keys.sign(tenant, keyid, message)
        holds = ed25519.verify(public_key, message, signature)
    except SigningFailed:
        raise
    except TimeoutError:
        raise SigningFailed(SealCode.SIGNING_FAILED, f"no signature within {SIGN_S:g} s") from None
    except Exception as fault:  # noqa: BLE001 - a deployment's own keys may raise anything
        raise SigningFailed(SealCode.SIGNING_FAILED, f"{type(fault).__name__} at {where(fault)[-1]}") from None
    # What is sealed stays as it is for ever: a wrong signature would be a hole that nothing fills.
    if not holds:
        raise SigningFailed(SealCode.SIGNING_FAILED, "the signature is not that of the registered key")
    return signature

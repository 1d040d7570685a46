"""Checks 0 and 1: who is calling, asked before any work is done for them (protocol section 4).

0. the peer limit, keyed by the network peer; only a credential that was not valid here within the last day is
   charged, and one that turns out to be valid gets its permit back: neither a fleet nor one bad host behind an address
   keeps the others behind it from being heard
1. the credential becomes a VerifiedIdentity
"""

import hashlib
from collections.abc import Callable

from postseal.correlation import new_correlation_id
from postseal.errors import Refused
from postseal.identity.verified import CredentialVerifier, Role, VerifiedIdentity
from postseal.limits import Quota, Rate, RateLimiter, peer_key
from postseal.outcomes import Reason
from postseal.remembered import Lookups, Remembered

REMEMBERED_CREDENTIALS = 20_000
REMEMBERED_FOR_S = 5.0
"""A revoked credential is refused after these seconds at the latest."""
ONCE_VALID_CREDENTIALS = 100_000
ONCE_VALID_FOR_S = 86_400.0
"""How long a credential that was valid is verified again without a charge."""


class RateLimited(Refused):
    """Refused by a limiter; `quota` says when to come again."""

    def __init__(self, reason: Reason, quota: Quota, correlation_id: bytes) -> None:
        super().__init__(reason, "too many requests; come again later")
        self.quota = quota
        self.correlation_id = correlation_id


class Door:
    """Identifies callers. Remembers the SHA-256 of a verified credential, never the credential."""

    def __init__(self, verifier: CredentialVerifier, peer_rate: Rate, clock: Callable[[], float]) -> None:
        self._verifier = verifier
        self._peers = RateLimiter(peer_rate, clock)
        self._verified: Remembered[bytes, VerifiedIdentity] = Remembered(
            entries=REMEMBERED_CREDENTIALS, ttl_s=REMEMBERED_FOR_S, clock=clock
        )
        self._once_valid: Remembered[bytes, str] = Remembered(
            entries=ONCE_VALID_CREDENTIALS, ttl_s=ONCE_VALID_FOR_S, clock=clock
        )

    @property
    def limiter(self) -> RateLimiter:
        """The peer limit, for what it counts."""
        return self._peers

    @property
    def lookups(self) -> Lookups:
        """How often a caller's credential was remembered."""
        return self._verified.lookups

    def charge(self, peer: str) -> str:
        """Take a permit of the peer's for work that costs much; returns the key that it is charged to."""
        key = peer_key(peer)
        quota = self._peers.take(key)
        if not quota.granted:
            raise RateLimited(Reason.PEER_RATE_LIMITED, quota, new_correlation_id())
        return key

    def give_back(self, charged: str | None) -> None:
        """Return what `charge` took, if anything, for work that turned out to be welcome."""
        if charged is not None:
            self._peers.give_back(charged)

    def recall(self, credential: str | None) -> VerifiedIdentity | None:
        """The identity of a credential that was verified within the last seconds; costs no more than a look-up."""
        return self._verified.peek(_digest(credential))

    async def identify(self, peer: str, credential: str | None) -> VerifiedIdentity:
        """The caller's identity.

        Raises Refused `peer_rate_limited` or `unauthenticated`, and Unavailable.
        """
        digest = _digest(credential)
        identity = self._verified.recall(digest)
        if identity is not None:
            return identity
        charged = None if self._once_valid.peek(digest) else self.charge(peer)
        try:
            identity = await self._verifier.verify(credential) if credential else None
        except BaseException:
            # The caller is not to blame: an outage shall not end in 429 for a whole fleet behind one address.
            self.give_back(charged)
            raise
        if identity is None:
            self._once_valid.forget(digest)
            raise Refused(Reason.UNAUTHENTICATED, "the credential is missing, unknown, expired or revoked")
        self.give_back(charged)
        self._once_valid.remember(digest, identity.tenant)
        self._verified.remember(digest, identity)
        return identity


def _digest(credential: str | None) -> bytes:
    return hashlib.sha256((credential or "").encode()).digest()


def require_role(identity: VerifiedIdentity, *roles: Role) -> None:
    """Raise Refused `role_forbidden` unless the caller has one of `roles`."""
    if identity.role not in roles:
        raise Refused(Reason.ROLE_FORBIDDEN, f"a {identity.role} credential may not do this")

"""What a device renews by itself: `POST /v1/device/keys`, behind a challenge, and `/v1/device/credential`.

Each call costs a permit of the device's, of which there are few: every key and credential is a row that stays.
"""

import time
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from postseal.correlation import new_correlation_id
from postseal.door import RateLimited
from postseal.envelope import base64url
from postseal.errors import Refused
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.limits import Rate, RateLimiter
from postseal.outcomes import Reason
from postseal.postgres.database import Database
from postseal.renewal import KeyRequest, add_key, new_challenge, renew_credential
from postseal.web.calls import Asked, Call, Reception
from postseal.web.documents import Nothing, milliseconds

DEVICES = (Role.DEVICE,)
RATE = Rate(per_s=0.1, burst=60)
"""Of one device."""
OF_ALL = (Reason.SYNC_RATE_LIMITED, Reason.ENROLMENT_REFUSED)


class DeviceChallenge(Struct, frozen=True, rename="camel"):
    """What the next key of the device has to be signed with, once, until it expires."""

    challenge: str
    expires_at_ms: int


class FurtherKey(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A new Ed25519 public key, its proof, and the signature of an active key of the device's, all in base64url.

    Both signatures are over the payload that proves an enrolment, with the challenge as its code and the new key's id.
    """

    challenge: Annotated[str, Meta(min_length=1, max_length=200)]
    public_key: Annotated[str, Meta(min_length=43, max_length=43)]
    proof: Annotated[str, Meta(min_length=86, max_length=86)]
    signature: Annotated[str, Meta(min_length=86, max_length=86)]


class DeviceKeys(Struct, frozen=True, rename="camel"):
    """The key that is active now, and the one that spoke for it.

    That one brings something new until `acceptUntilMs`; null once that is over.
    """

    keyid: str
    replaces: str
    accept_until_ms: int | None


class RenewedCredential(Struct, frozen=True, rename="camel"):
    """A credential, shown this once; the one before it goes on until `replacedUntilMs`."""

    credential: str
    expires_at_ms: int
    replaced_until_ms: int


class RenewalCalls:
    """A device's own renewals over HTTP. `database` is the administrators' part."""

    def __init__(
        self,
        database: Database,
        *,
        credential_lifetime_s: int,
        overlap_s: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._credential_lifetime_s = credential_lifetime_s
        self._overlap_s = overlap_s
        self._limiter = RateLimiter(RATE, clock)

    def calls(self, reception: Reception) -> list[Call]:
        """All of them."""
        return [
            reception.trial(
                "/v1/device/keys/challenge", self.challenge, roles=DEVICES, answer=DeviceChallenge, reasons=OF_ALL
            ),
            reception.change(
                "/v1/device/keys",
                self.add,
                roles=DEVICES,
                body=FurtherKey,
                answer=DeviceKeys,
                reasons=(*OF_ALL, Reason.CONFLICT),
            ),
            reception.trial(
                "/v1/device/credential",
                self.renew,
                roles=DEVICES,
                answer=RenewedCredential,
                reasons=(*OF_ALL, Reason.NOT_FOUND),
            ),
        ]

    async def challenge(self, asked: Asked[Nothing, Nothing]) -> DeviceChallenge:
        """Get what a further key is to be signed with; an earlier challenge is of no more use."""
        self._take_permit(asked.caller)
        made = await new_challenge(self._database, asked.caller)
        return DeviceChallenge(made.challenge, milliseconds(made.expires_at))

    async def add(self, asked: Asked[Nothing, FurtherKey]) -> DeviceKeys:
        """Rotate the device's key; the same request again brings the same answer."""
        self._take_permit(asked.caller)
        wanted = asked.body
        try:
            raw = [base64url.decode(text) for text in (wanted.public_key, wanted.proof, wanted.signature)]
        except ValueError:
            why = "publicKey, proof and signature must be in base64url without padding"
            raise Refused(Reason.REQUEST_INVALID, why) from None
        request = KeyRequest(wanted.challenge, *raw)
        added = await add_key(self._database, asked.caller, request, overlap_s=self._overlap_s)
        until = added.accept_until
        return DeviceKeys(added.keyid, added.replaces, None if until is None else milliseconds(until))

    async def renew(self, asked: Asked[Nothing, Nothing]) -> RenewedCredential:
        """Renew the credential of the call; again, another one comes in place of the one before."""
        self._take_permit(asked.caller)
        renewed = await renew_credential(
            self._database, asked.caller, lifetime_s=self._credential_lifetime_s, overlap_s=self._overlap_s
        )
        return RenewedCredential(
            renewed.credential, milliseconds(renewed.expires_at), milliseconds(renewed.replaced_until)
        )

    def _take_permit(self, caller: VerifiedIdentity) -> None:
        quota = self._limiter.take(f"{caller.tenant}/{caller.device}")
        if not quota.granted:
            raise RateLimited(Reason.SYNC_RATE_LIMITED, quota, new_correlation_id())

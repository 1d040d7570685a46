"""The closed identity that every credential is turned into (protocol section 4, check 1)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Role(StrEnum):
    """What a credential is for."""

    DEVICE = "device"
    CONSUMER = "consumer"
    SENDER = "sender"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class VerifiedIdentity:
    """A caller whose credential was verified. All of its projects belong to its one tenant."""

    tenant: str
    account: str
    device: str | None
    role: Role
    credential_id: str
    projects: frozenset[str]


class CredentialVerifier(Protocol):
    """Turns an opaque credential into the identity that it stands for."""

    async def verify(self, credential: str) -> VerifiedIdentity | None:
        """The caller's identity, or None if the credential is unknown, expired or revoked.

        Raises Unavailable if that cannot be told at the moment.
        """
        ...

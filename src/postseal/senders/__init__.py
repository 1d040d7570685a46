"""Pushing a delivery to its destination: what is sent, and who sends it (protocol section 7, "HTTP push").

`http.HttpSender` is the shipped sender. Whoever composes a service may pass another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol
from uuid import UUID

from postseal.rules.delivery import Attempted

PROBE: Final = b'{"probe":true}'
"""The body of a request that tests a destination, which no receiver takes for an envelope."""


class Scheme(StrEnum):
    """How a request is signed, as the Standard Webhooks name it."""

    V1 = "v1"
    """HMAC-SHA256 with a secret that both sides have."""
    V1A = "v1a"
    """Ed25519: the receiver has the public half alone."""


@dataclass(frozen=True, slots=True)
class Secret:
    """What signs the requests to a destination.

    For `v1` 24 to 64 random bytes. For `v1a` a private key in its `ed25519.signing_form`, the 32-byte seed and the
    public key behind it: to make the public key again for each request would cost more than the signature.
    """

    scheme: Scheme
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Mail:
    """One attempt at one delivery. Its `repr` shows neither URL, body nor secrets."""

    delivery: UUID
    tenant: str
    project: str
    destination: str
    url: str = field(repr=False)
    body: bytes = field(repr=False)
    """The stored envelope, sent byte for byte."""
    secrets: Sequence[Secret] = field(repr=False)
    """The newest first. Each of them signs."""
    attempt: int


class Sender(Protocol):
    """Makes one attempt."""

    async def send(self, mail: Mail) -> Attempted:
        """How it went. Never raises for what a receiver does; a cancellation passes through and leaves nothing behind.

        It ends within a bounded time; what takes longer than `cycle_timeout_s` is cut off, and counts. Where nothing
        was sent for a reason of its own, the result is `ours`.
        """
        ...

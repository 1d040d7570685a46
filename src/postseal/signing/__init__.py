"""The tenants' signing keys: what makes an envelope of the control plane's out of a payload (protocol section 7).

The private halves never enter the database. Whoever composes a service says where they are; `pem_folder` is a folder of
files.
"""

from typing import Protocol

from postseal.errors import PostsealError
from postseal.rules.delivery import SealCode


class SigningFailed(PostsealError):
    """Nothing was signed; `code` says why, and no number was used."""

    def __init__(self, code: SealCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class SigningKeys(Protocol):
    """Signs for tenants."""

    async def sign(self, tenant: str, keyid: str, message: bytes) -> bytes:
        """The Ed25519 signature (64 bytes) of `message` by the tenant's key of that id.

        Raises SigningFailed: the private half is not here, or cannot be used. It is asked inside a transaction that
        holds the destination's lock, and has to answer within a second or two.
        """
        ...

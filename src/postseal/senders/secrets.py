"""Destinations' secrets at rest: encrypted under the deployment's key, a file that never enters the database.

What is encrypted (XChaCha20-Poly1305, a random nonce) is bound to its tenant, stream and scheme: moved to another row
it does not open.
"""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from nacl.exceptions import CryptoError
from nacl.secret import Aead

from postseal.errors import PostsealError, StartupError
from postseal.private_files import NotPrivate, read_private, sync_folder, write_private
from postseal.senders import Scheme, Secret

KEY_BYTES: Final = 32
_VERSION: Final = b"\x01"
"""Stands in front of what is encrypted; a later form has another one."""


class SecretUnusable(PostsealError):
    """An encrypted secret does not open: it was made under another deployment key, or for another destination."""


class DeploymentKey:
    """Encrypts and opens destinations' secrets. Its `repr` shows nothing of it."""

    def __init__(self, key: bytes) -> None:
        self._aead = Aead(key)

    def __repr__(self) -> str:
        return "DeploymentKey(…)"

    def encrypt(self, tenant: str, stream: int, secret: Secret) -> bytes:
        """The secret of that destination, as the database keeps it."""
        return _VERSION + bytes(self._aead.encrypt(secret.key, _bound_to(tenant, stream, secret.scheme)))

    def open(self, tenant: str, stream: int, scheme: str, encrypted: bytes) -> Secret:
        """The secret of that destination again. Raises SecretUnusable."""
        try:
            if not encrypted.startswith(_VERSION):
                raise ValueError
            known = Scheme(scheme)
            return Secret(known, self._aead.decrypt(encrypted[len(_VERSION) :], _bound_to(tenant, stream, known)))
        except (ValueError, CryptoError):
            raise SecretUnusable(
                "a destination's secret does not open: the deployment key file is not the one it was made under"
            ) from None

    def open_all(self, tenant: str, stream: int, encrypted: Iterable[tuple[str, bytes]]) -> list[Secret]:
        """Those of a destination's secrets, by scheme, that open, in order. Raises SecretUnusable where none does.

        After the key was lost the newest one opens, and the older ones that were to sign beside it do not.
        """
        opened: list[Secret] = []
        unusable: SecretUnusable | None = None
        for scheme, each in encrypted:
            try:
                opened.append(self.open(tenant, stream, scheme, each))
            except SecretUnusable as error:
                unusable = error
        if unusable is not None and not opened:
            raise unusable
        return opened


def load_deployment_key(file: Path, *, make: bool) -> DeploymentKey:
    """Read the deployment's key: 32 bytes in a regular file that is this account's alone.

    With `make`, a file that is missing is made, once whoever else makes it at the same time. Raises StartupError with
    one line that says what to do.
    """
    try:
        if make and not file.exists():
            if not file.parent.is_dir():
                raise StartupError(f"there is no folder {file.parent} for the deployment key file: make it")
            _make(file)
        key = read_private(file, KEY_BYTES + 1)
    except FileNotFoundError:
        raise StartupError(
            f"there is no deployment key file {file}: put back the one under which destinations' secrets were made, "
            "or, before there are any, run `postseal migrate`"
        ) from None
    except OSError as error:
        raise StartupError(f"cannot use the deployment key file {file}: {error.strerror}") from None
    except NotPrivate as error:
        raise StartupError(f"the deployment key file {file} is not used: {error}") from None
    if len(key) != KEY_BYTES:
        raise StartupError(f"the deployment key file {file} does not hold exactly {KEY_BYTES} bytes")
    return DeploymentKey(key)


def _bound_to(tenant: str, stream: int, scheme: Scheme) -> bytes:
    return f"postseal destination secret\0{tenant}\0{stream}\0{scheme}".encode()


def _make(file: Path) -> None:
    """Keep a new key for certain before it is used: what it encrypts cannot be read without it."""
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    write_private(draft, secrets.token_bytes(KEY_BYTES))
    try:
        os.link(draft, file)
        sync_folder(file.parent)
    except FileExistsError:
        return  # another process was quicker: its key is the key
    finally:
        draft.unlink()

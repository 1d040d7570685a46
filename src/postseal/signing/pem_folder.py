"""Signing keys as files: `<folder>/<tenant>/<key id>.pem`, unencrypted PKCS#8, for the eyes of one account alone.

A file that another account owns, that anybody else may read, that is no regular file, or whose key has another id than
its name says is not used. What was read is remembered for REMEMBERED_FOR_S; a file that is taken away signs no longer
than that.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from structlog.typing import FilteringBoundLogger

from postseal.envelope import ed25519
from postseal.envelope.names import ID, KEYID
from postseal.postgres.home import home_of
from postseal.private_files import read_private, sync_folder, write_private
from postseal.remembered import Remembered
from postseal.rules.delivery import SealCode
from postseal.settings import Settings
from postseal.signing import SigningFailed

REMEMBERED_FOR_S = 5.0
REMEMBERED_KEYS = 1_000
MAX_PEM_BYTES = 4_096

_log: FilteringBoundLogger = structlog.get_logger("postseal.signing")


def folder_of(settings: Settings) -> Path:
    """Where a deployment keeps its signing keys."""
    return Path(settings.signing_keys_dir) if settings.signing_keys_dir else home_of(settings) / "signing"


class PemFolder:
    """The shipped SigningKeys. Its `repr` shows a folder and no key."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._keys: Remembered[tuple[str, str], bytes] = Remembered(
            entries=REMEMBERED_KEYS, ttl_s=REMEMBERED_FOR_S, clock=clock
        )

    def __repr__(self) -> str:
        return f"PemFolder({str(self._folder)!r})"

    async def sign(self, tenant: str, keyid: str, message: bytes) -> bytes:
        """See `SigningKeys`."""
        key = self._keys.peek((tenant, keyid))
        if key is None:
            # A folder can lie on a network disk, which must not stop the loop.
            key = await asyncio.to_thread(self._read, tenant, keyid)
            self._keys.remember((tenant, keyid), key)
        return ed25519.sign_with(key, message)

    def _read(self, tenant: str, keyid: str) -> bytes:
        path = path_of(self._folder, tenant, keyid)
        try:
            seed = ed25519.seed_from_pem(read_private(path, MAX_PEM_BYTES))
            if ed25519.thumbprint(ed25519.public_key(seed)) != keyid:
                raise ValueError("the key in it has another id")
        except FileNotFoundError:
            raise SigningFailed(SealCode.SIGNING_KEY_MISSING, f"there is no {path}") from None
        except (OSError, ValueError) as error:
            # Of these messages none quotes what the file holds.
            why = error.strerror if isinstance(error, OSError) else str(error)
            _log.warning("signing_key_not_used", file=str(path), why=why)
            raise SigningFailed(SealCode.SIGNING_FAILED, f"{path} cannot be used: {why}") from None
        return ed25519.signing_form(seed)


def path_of(folder: Path, tenant: str, keyid: str) -> Path:
    """The file of one key. Raises SigningFailed where tenant or key id are none, as no file could be theirs."""
    if not (ID.fullmatch(tenant) and KEYID.fullmatch(keyid)):
        raise SigningFailed(SealCode.SIGNING_KEY_MISSING, "no file can be that key's")
    return folder / tenant / f"{keyid}.pem"


def write_key(folder: Path, tenant: str, seed: bytes) -> Path:
    """Keep a private key in a new file of this account's alone, for certain; returns where. Raises OSError."""
    path = path_of(folder, tenant, ed25519.thumbprint(ed25519.public_key(seed)))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    sync_folder(folder)
    write_private(path, ed25519.seed_to_pem(seed))
    return path

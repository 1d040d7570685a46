"""The keys with which a control plane signs for a tenant, as whoever receives its deliveries has them."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from postseal.envelope import ed25519

MAX_KEY_SET_BYTES = 65_536
READ_AGAIN_S = 5.0
"""How often at most the keys are read again because one was not among them."""
READ_S = 10.0


class KeysUnreadable(Exception):
    """The tenant's keys cannot be read; the message is one line that says why."""


class EnvelopeKeys:
    """The keys with which the control plane signs for a tenant, read from a JWK Set as `GET /v1/keys` gives it.

    `read` gives its bytes. An unknown key makes them be read again, at most every READ_AGAIN_S, so that a rotation is
    followed; who asks meanwhile waits for the same reading, and a failed one counts for all until the next.
    """

    def __init__(self, read: Callable[[], Awaitable[bytes]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._keys: dict[str, bytes] = {}
        self._reading = asyncio.Lock()
        self._read_at_s: float | None = None
        self._unreadable: KeysUnreadable | None = None

    async def find(self, keyid: str) -> bytes | None:
        """The public key of that id, None if it is none of theirs. Raises KeysUnreadable."""
        if keyid not in self._keys:
            async with self._reading:
                if keyid not in self._keys and self._may_read_again():
                    await self.load()
                if keyid not in self._keys and self._unreadable is not None:
                    raise self._unreadable
        return self._keys.get(keyid)

    async def load(self) -> None:
        """Read them now. Raises KeysUnreadable."""
        try:
            self._keys = read_key_set(await self._read())
            self._unreadable = None
        except KeysUnreadable as error:
            self._unreadable = error
            raise
        finally:
            self._read_at_s = self._clock()

    def _may_read_again(self) -> bool:
        return self._read_at_s is None or self._clock() - self._read_at_s >= READ_AGAIN_S


def keys_in_file(file: Path) -> EnvelopeKeys:
    """Keys that stand in a file. Where it cannot be read they are KeysUnreadable."""

    async def read() -> bytes:
        try:
            with file.open("rb") as opened:
                return opened.read(MAX_KEY_SET_BYTES + 1)
        except OSError as error:
            raise KeysUnreadable(f"cannot read {file}: {error.strerror}") from None

    return EnvelopeKeys(read)


def keys_at(url: str, authorization: str | None) -> EnvelopeKeys:
    """Keys that a control plane serves, asked for with that Authorization header. Redirects are not followed."""
    host = urlsplit(url).hostname  # the rest of a URL may be nobody's business
    headers = {} if authorization is None else {"Authorization": authorization}

    async def read() -> bytes:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READ_S)) as session,
                session.get(url, headers=headers, allow_redirects=False) as response,
            ):
                if response.status != 200:  # noqa: PLR2004 - OK
                    raise KeysUnreadable(f"{host} answers {response.status} when asked for the tenant's keys")
                return await at_most(response.content, MAX_KEY_SET_BYTES + 1)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise KeysUnreadable(f"{host} cannot be asked for the tenant's keys: {type(error).__name__}") from None

    return EnvelopeKeys(read)


class _Jwk(Struct):
    kty: str = ""
    crv: str = ""
    x: str = ""


class _JwkSet(Struct):
    keys: list[_Jwk]


def read_key_set(raw: bytes) -> dict[str, bytes]:
    """The Ed25519 keys of a JWK Set (RFC 7517, RFC 8037) by key id, which is computed. Raises KeysUnreadable."""
    if len(raw) > MAX_KEY_SET_BYTES:
        raise KeysUnreadable(f"the set of keys has more than {MAX_KEY_SET_BYTES} bytes")
    try:
        found = [
            base64.urlsafe_b64decode(key.x + "=" * (-len(key.x) % 4))
            for key in msgspec.json.decode(raw, type=_JwkSet).keys
            if (key.kty, key.crv) == ("OKP", "Ed25519")
        ]
        for key in found:
            ed25519.check_public_key(key)
    except (ValueError, RecursionError):
        raise KeysUnreadable("this is no JWK Set with Ed25519 keys") from None
    return {ed25519.thumbprint(key): key for key in found}


async def at_most(stream: aiohttp.StreamReader, size: int) -> bytes:
    """The first bytes of a stream, `size` of them unless it ends before."""
    body = bytearray()
    while len(body) < size and (piece := await stream.read(size - len(body))):
        body += piece
    return bytes(body)

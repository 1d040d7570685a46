"""From a destination's host to addresses that may be connected to, and no way around them.

1. a name is looked up once for a new connection, in bounded time, in one of the threads that its tenant may have
2. every address that it has must be allowed, or none is used
3. the connection is made to those addresses; whatever is connected to passes the same rule once more, which is where
   an address that stands in the URL itself meets it

Nothing is looked up again between 2 and 3, and a failure on the way refuses.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from postseal.senders.addresses import Network, refused

MAX_LOOKUP_THREADS = 64
"""How many names may be looked up at once. The system's look-up cannot be cut off; one that hangs keeps its thread."""
MAX_THREADS_OF_A_TENANT = 8
"""So that seven tenants whose name servers hang leave threads to all others."""
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

AddressInfo = tuple[int, int, int, str, Any]
"""Family, type, protocol, canonical name, socket address: as `socket.getaddrinfo` gives them."""
LookUp = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]
"""The addresses of a host and port, in bounded time. Raises OSError, and LookUpNotBegun."""

asking_tenant: ContextVar[str] = ContextVar("asking_tenant", default="")
"""Whose mail a look-up is for: aiohttp tells its resolver nothing of a request but the host."""

_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
_Asked = tuple[str, str, int]
"""Tenant, host and port."""


class AddressRefused(OSError):
    """Nothing may be sent there. An OSError, as what makes connections expects."""


class LookUpNotBegun(OSError):
    """No thread was free for a look-up, so that nobody was asked: a shortage of ours."""


class SystemLookUp:
    """Asks the operating system, in threads of its own, of which each tenant has at most MAX_THREADS_OF_A_TENANT.

    For one name of a tenant at most one of them works at a time, however often it is asked for. A look-up waits for its
    thread for `begin_s`, and from then on for `timeout_s`; one that hangs keeps its thread until the system gives up.
    """

    def __init__(self, *, begin_s: float = 5.0, timeout_s: float = 5.0) -> None:
        self._begin_s = begin_s
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(MAX_LOOKUP_THREADS, "postseal-lookup")
        self._asked: dict[_Asked, asyncio.Future[list[AddressInfo]]] = {}

    async def __call__(self, host: str, port: int) -> Sequence[AddressInfo]:
        """See `LookUp`."""
        asked = (asking_tenant.get(), host, port)
        try:
            async with asyncio.timeout(self._begin_s):
                while asked not in self._asked and not self._has_thread(asked[0]):
                    await asyncio.wait(self._asked.values(), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise LookUpNotBegun("no thread was free for the look-up") from None
        answer = self._asked.get(asked) or self._begin(asked)
        async with asyncio.timeout(self._timeout_s):
            # Whoever is cancelled leaves alone; others may wait for the same answer.
            return await asyncio.shield(answer)

    def close(self) -> None:
        """Ask no more. A look-up that hangs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _has_thread(self, tenant: str) -> bool:
        of_tenant = sum(asked[0] == tenant for asked in self._asked)
        return of_tenant < MAX_THREADS_OF_A_TENANT and len(self._asked) < MAX_LOOKUP_THREADS

    def _begin(self, asked: _Asked) -> "asyncio.Future[list[AddressInfo]]":
        _, host, port = asked
        answer = asyncio.get_running_loop().run_in_executor(self._threads, _ask, host, port)
        self._asked[asked] = answer
        answer.add_done_callback(lambda done: self._forget(asked, done))
        return answer

    def _forget(self, asked: _Asked, done: "asyncio.Future[list[AddressInfo]]") -> None:
        del self._asked[asked]
        if not done.cancelled():
            done.exception()  # asyncio would complain of one that nobody waits for any more


class VettedResolver(AbstractResolver):
    """Gives aiohttp addresses that may be sent to, or none."""

    def __init__(self, allowed: Sequence[Network], look_up: LookUp) -> None:
        self._allowed = allowed
        self._look_up = look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Every address of `host`.

        Raises AddressRefused if one is refused, socket.gaierror if there is none, and another OSError where it was not
        looked up for want of threads or descriptors.
        """
        try:
            infos = await self._look_up(host, port)
        except (OSError, UnicodeError) as error:
            if is_shortage(error):
                raise
            # Too slow, not there, or no name at all.
            raise socket.gaierror(socket.EAI_FAIL, "the name cannot be looked up") from None
        for found, *_, where in infos:
            self._vet(found, where)
        asked = [info for info in infos if family in (socket.AF_UNSPEC, info[0])]
        if not asked:
            raise socket.gaierror(socket.EAI_NONAME, "the name has no address")
        return [
            ResolveResult(hostname=host, host=where[0], port=port, family=found, proto=protocol, flags=_NUMERIC)
            for found, _, protocol, _, where in asked
        ]

    def open_socket(self, info: AddressInfo) -> socket.socket:
        """A socket for a connection to that address. Raises AddressRefused, OSError."""
        family, kind, protocol, _, where = info
        self._vet(family, where)
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        """Nothing of its own is open."""

    def _vet(self, family: int, where: Any) -> None:
        try:
            if family == socket.AF_INET6:
                scope = where[3]
                is_refused = scope != 0 or refused(IPv6Address(where[0]), self._allowed)
            else:
                is_refused = family != socket.AF_INET or refused(IPv4Address(where[0]), self._allowed)
        except (ValueError, IndexError):
            is_refused = True
        if is_refused:
            raise AddressRefused("nothing may be sent to this address")


def is_shortage(error: Exception) -> bool:
    """Whether it says that this process lacks threads, descriptors or memory, and nothing about a receiver."""
    return isinstance(error, LookUpNotBegun) or (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES)


def _ask(host: str, port: int) -> list[AddressInfo]:
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG))

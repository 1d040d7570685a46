"""From a host to addresses that may be connected to, or to none."""

import asyncio
import errno
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

import pytest

from postseal.senders import resolving
from postseal.senders.resolving import (
    MAX_LOOKUP_THREADS,
    MAX_THREADS_OF_A_TENANT,
    AddressInfo,
    AddressRefused,
    LookUpNotBegun,
    SystemLookUp,
    VettedResolver,
    asking_tenant,
    is_shortage,
)
from until import until_async

Network = Any


def info(address: str, port: int = 443, scope: int = 0) -> AddressInfo:
    """One address as the system gives it."""
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, scope))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


def resolved(
    *infos: AddressInfo, allowed: Sequence[Network] = (), raises: Exception | None = None, family: int = 0
) -> list[str]:
    """The addresses that a host with these gets."""

    async def look_up(host: str, port: int) -> Sequence[AddressInfo]:
        assert (host, port) == ("example.net", 443)
        if raises is not None:
            raise raises
        return infos

    resolver = VettedResolver(allowed, look_up)
    found = asyncio.run(resolver.resolve("example.net", 443, socket.AddressFamily(family)))
    assert all((one["hostname"], one["port"]) == ("example.net", 443) for one in found)
    return [one["host"] for one in found]


def test_the_addresses_are_exactly_the_vetted_ones() -> None:
    """All that were looked up are handed on, in their order, as numbers."""
    assert resolved(info("1.1.1.1"), info("2606:4700::1"), info("1.0.0.1")) == ["1.1.1.1", "2606:4700::1", "1.0.0.1"]
    assert resolved(info("1.1.1.1"), info("2606:4700::1"), family=socket.AF_INET6) == ["2606:4700::1"]


@pytest.mark.parametrize("bad", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fd00::1", "::ffff:127.0.0.1"])
def test_one_refused_address_refuses_the_host(bad: str) -> None:
    """A name with one good address and a bad one, in whatever place, is not connected to at all."""
    for infos in ([info("1.1.1.1"), info(bad)], [info(bad), info("1.1.1.1")], [info(bad)]):
        with pytest.raises(AddressRefused):
            resolved(*infos)
        with pytest.raises(AddressRefused):  # even where only the good family is asked for
            resolved(*infos, info("2606:4700::1"), family=socket.AF_INET if ":" in bad else socket.AF_INET6)
    assert resolved(info(bad), allowed=[ip_network("::/0"), ip_network("0.0.0.0/0")]) == [bad]


def test_what_cannot_be_vetted_is_refused() -> None:
    """A scope, a family that is no IP, and an address that cannot be read."""
    everything = [ip_network("::/0"), ip_network("0.0.0.0/0")]
    for odd in (
        info("2606:4700::1", scope=2),
        (socket.AF_UNIX, socket.SOCK_STREAM, 0, "", "/run/docker.sock"),
        info("1.1.1"),
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", (b"raw", 443)),
    ):
        with pytest.raises(AddressRefused):
            resolved(odd, allowed=everything)


@pytest.mark.parametrize("error", [socket.gaierror(-2, "x"), OSError("x"), UnicodeError("x"), TimeoutError()])
def test_a_look_up_that_fails_gives_no_address(error: Exception) -> None:
    """Whatever goes wrong, the host has no address: it fails closed."""
    with pytest.raises(socket.gaierror):
        resolved(raises=error)


def test_a_name_without_address_gives_none() -> None:
    """An empty answer is a failure, not a reason to go on."""
    with pytest.raises(socket.gaierror):
        resolved()


def test_what_this_process_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few descriptors say nothing about the name."""

    def ask(_host: str, _port: int) -> list[AddressInfo]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(resolving, "_ask", ask)

    async def flow(look_up: SystemLookUp) -> None:
        with pytest.raises(OSError, match="Too many open files") as raised:
            await VettedResolver((), look_up).resolve("example.net", 443)
        assert is_shortage(raised.value)

    with looking_up() as look_up:
        asyncio.run(flow(look_up))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "::1", "::ffff:127.0.0.1"]
)
def test_numbers_that_only_the_system_reads(host: str) -> None:
    """Every spelling of loopback that the system's own look-up takes is refused."""

    async def flow() -> None:
        look_up = SystemLookUp()
        try:
            with pytest.raises(AddressRefused):
                await VettedResolver((), look_up).resolve(host, 443)
        finally:
            look_up.close()

    asyncio.run(flow())


def test_a_socket_is_opened_for_a_vetted_address_alone() -> None:
    """What connects asks once more, so that an address which was never looked up is vetted too."""
    resolver = VettedResolver([ip_network("127.0.0.1/32")], SystemLookUp())
    resolver.open_socket(info("127.0.0.1")).close()
    for bad in ("127.0.0.2", "10.0.0.1", "::1", "::ffff:10.0.0.1"):
        with pytest.raises(AddressRefused):
            resolver.open_socket(info(bad))


@contextmanager
def looking_up(**options: float) -> Iterator[SystemLookUp]:
    """The system's look-up, until the block ends."""
    look_up = SystemLookUp(**options)
    try:
        yield look_up
    finally:
        look_up.close()


@dataclass
class Names:
    """A system that answers for no name that begins with `slow`, until it is released."""

    asked: list[str] = field(default_factory=list[str])
    release: threading.Event = field(default_factory=threading.Event)

    def ask(self, host: str, port: int) -> list[AddressInfo]:
        """As `resolving._ask` does."""
        self.asked.append(host)
        if host.startswith("slow"):
            self.release.wait(30)
            raise socket.gaierror(-3, "x")
        return [info("1.1.1.1", port)]

    def of(self, prefix: str) -> list[str]:
        """The names with that prefix that were asked for."""
        return [name for name in self.asked if name.startswith(prefix)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """Such a system."""
    names = Names()
    monkeypatch.setattr(resolving, "_ask", names.ask)
    try:
        yield names
    finally:
        names.release.set()


async def resolve(look_up: SystemLookUp, host: str, tenant: str = "acme") -> list[str] | Exception:
    """The addresses that mail of the tenant gets, or why there are none."""
    asking = asking_tenant.set(tenant)
    try:
        return [one["host"] for one in await VettedResolver((), look_up).resolve(host, 443)]
    except OSError as error:
        return error
    finally:
        asking_tenant.reset(asking)


def test_a_name_that_hangs_keeps_one_thread(names: Names) -> None:
    """However often it is asked for, and whoever gives up: other names are still looked up."""

    async def flow(look_up: SystemLookUp) -> None:
        slow = await asyncio.gather(*(resolve(look_up, "slow") for _ in range(100)))
        assert all(isinstance(error, socket.gaierror) for error in slow)
        assert await resolve(look_up, "fast") == ["1.1.1.1"]
        assert names.asked == ["slow", "fast"]

    with looking_up(timeout_s=0.5) as look_up:
        asyncio.run(flow(look_up))


def test_names_that_hang_keep_the_threads_of_their_tenant_alone(names: Names) -> None:
    """A hundred names of one tenant: another's are looked up at once, also one that the first one asks for in vain."""

    async def flow(look_up: SystemLookUp) -> None:
        slow = await asyncio.gather(*(resolve(look_up, f"slow-{n}") for n in range(100)))
        assert sum(isinstance(error, LookUpNotBegun) for error in slow) == 100 - MAX_THREADS_OF_A_TENANT
        assert len(names.of("slow")) == MAX_THREADS_OF_A_TENANT
        assert isinstance(await resolve(look_up, "fast"), LookUpNotBegun)
        assert await resolve(look_up, "fast", "globex") == ["1.1.1.1"]

    with looking_up(begin_s=0.1, timeout_s=0.5) as look_up:
        asyncio.run(flow(look_up))


def test_all_tenants_together_keep_no_more_threads_than_there_are(names: Names) -> None:
    """What finds none is not queued behind those that hang: once they end, nobody is asked for who has given up."""

    async def flow(look_up: SystemLookUp) -> None:
        await asyncio.gather(*(resolve(look_up, f"slow-{n}", f"tenant-{n}") for n in range(MAX_LOOKUP_THREADS)))
        assert isinstance(await resolve(look_up, "late", "another"), LookUpNotBegun)
        names.release.set()
        await until_async(lambda: not look_up._asked)
        assert await resolve(look_up, "fast", "another") == ["1.1.1.1"]
        assert names.of("late") == []

    with looking_up(begin_s=0.1, timeout_s=0.5) as look_up:
        asyncio.run(flow(look_up))


def test_a_look_up_begins_as_soon_as_there_is_a_thread(names: Names) -> None:
    """Whoever waits for one gets it when another look-up ends, and may then take all of its time."""

    async def flow(look_up: SystemLookUp) -> None:
        slow = [asyncio.create_task(resolve(look_up, f"slow-{n}")) for n in range(MAX_THREADS_OF_A_TENANT)]
        await until_async(lambda: len(names.of("slow")) == len(slow))
        waiting = [asyncio.create_task(resolve(look_up, f"fast-{n}")) for n in range(3 * MAX_THREADS_OF_A_TENANT)]
        await asyncio.sleep(0)
        names.release.set()
        assert await asyncio.gather(*waiting) == [["1.1.1.1"]] * len(waiting)
        await asyncio.wait(slow)

    with looking_up() as look_up:
        asyncio.run(flow(look_up))

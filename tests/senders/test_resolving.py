"""From a host to addresses that may be connected to, or to none."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_network
from typing import Any

import pytest

from postseal.senders import resolving
from postseal.senders.resolving import AddressInfo, AddressRefused, SystemLookUp, VettedResolver

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

    resolver = VettedResolver(allowed, look_up, 1.0)
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


def test_a_look_up_ends_in_time() -> None:
    """A name whose servers do not answer costs the time that it may cost."""

    async def hang(_host: str, _port: int) -> Sequence[AddressInfo]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(socket.gaierror):
        asyncio.run(VettedResolver((), hang, 0.05).resolve("example.net", 443))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "::1", "::ffff:127.0.0.1"]
)
def test_numbers_that_only_the_system_reads(host: str) -> None:
    """Every spelling of loopback that the system's own look-up takes is refused."""

    async def flow() -> None:
        look_up = SystemLookUp()
        try:
            with pytest.raises(AddressRefused):
                await VettedResolver((), look_up, 5.0).resolve(host, 443)
        finally:
            look_up.close()

    asyncio.run(flow())


def test_a_socket_is_opened_for_a_vetted_address_alone() -> None:
    """What connects asks once more, so that an address which was never looked up is vetted too."""
    resolver = VettedResolver([ip_network("127.0.0.1/32")], SystemLookUp(), 1.0)
    resolver.open_socket(info("127.0.0.1")).close()
    for bad in ("127.0.0.2", "10.0.0.1", "::1", "::ffff:10.0.0.1"):
        with pytest.raises(AddressRefused):
            resolver.open_socket(info(bad))


def test_a_name_that_hangs_keeps_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked for, and whoever gives up: other names are still looked up."""
    release, asked = threading.Event(), []

    def ask(host: str, port: int) -> list[AddressInfo]:
        asked.append(host)
        if host == "slow":
            release.wait(30)
            raise socket.gaierror(-3, "x")
        return [info("1.1.1.1", port)]

    monkeypatch.setattr(resolving, "_ask", ask)

    async def flow(look_up: Callable[[str, int], Awaitable[Sequence[AddressInfo]]]) -> None:
        resolver = VettedResolver((), look_up, 0.05)
        slow = await asyncio.gather(*(resolver.resolve("slow", 443) for _ in range(100)), return_exceptions=True)
        assert all(isinstance(error, socket.gaierror) for error in slow)
        assert [one["host"] for one in await resolver.resolve("fast", 443)] == ["1.1.1.1"]
        assert asked == ["slow", "fast"]

    look_up = SystemLookUp()
    try:
        asyncio.run(flow(look_up))
    finally:
        release.set()
        look_up.close()

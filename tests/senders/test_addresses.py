"""Which addresses and URLs may be pushed to."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from random import Random

import pytest

from postseal.errors import StartupError
from postseal.senders.addresses import check_url, read_networks, refused

ANY = "0.0.0.0"  # noqa: S104 - nothing is bound to it
SPECIAL = [
    ANY, "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
    "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1",
    "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.7", "224.0.0.1",
    "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "ff02::1", "ff0e::1",
    "100::1", "2001:db8::1", "2001:2::1", "2001:10::1", "2001:20::1", "3fff::1", "5f00::1", "4000::1", "e000::1",
]  # fmt: skip
OPEN = [
    "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.1",
    "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0",
    "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
    "2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "2001:4860:4860::8888", "2003::1",
]  # fmt: skip
CARRIERS = {
    "mapped": lambda inner: IPv6Address((0xFFFF << 32) | int(inner)),
    "NAT64": lambda inner: IPv6Address(int(IPv6Address("64:ff9b::")) | int(inner)),
}
CLOSED_CARRIERS = {
    "IPv4-compatible": lambda inner: IPv6Address(int(inner)),
    "local NAT64": lambda inner: IPv6Address(int(IPv6Address("64:ff9b:1::")) | int(inner)),
    "6to4": lambda inner: IPv6Address((0x2002 << 112) | (int(inner) << 80) | 1),
    "Teredo client": lambda inner: IPv6Address(
        (0x20010000 << 96) | (int(IPv4Address("1.1.1.1")) << 64) | (int(inner) ^ 0xFFFFFFFF)
    ),
    "Teredo server": lambda inner: IPv6Address(
        (0x20010000 << 96) | (int(inner) << 64) | (int(IPv4Address("1.1.1.1")) ^ 0xFFFFFFFF)
    ),
}  # fmt: skip
SPECIAL_IPV4 = [text for text in SPECIAL if ":" not in text]


@pytest.mark.parametrize("text", SPECIAL)
def test_special_addresses_are_refused(text: str) -> None:
    """Nothing is sent to what is not of the open internet; a network that contains it allows it."""
    address = ip_address(text)
    assert refused(address)
    assert not refused(address, [ip_network(text)])


@pytest.mark.parametrize("text", OPEN)
def test_open_addresses_are_not(text: str) -> None:
    """The last address before a special block and the first one after it are open."""
    assert not refused(ip_address(text))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_address_that_carries_another_is_as_good_as_that(carrier: str) -> None:
    """Mapped or behind NAT64, an address is refused and allowed as the IPv4 address is that it stands for."""
    carry = CARRIERS[carrier]
    assert not refused(carry(IPv4Address("1.1.1.1")))
    for text in SPECIAL_IPV4:
        assert refused(carry(IPv4Address(text))), text
    assert not refused(carry(IPv4Address("10.1.2.3")), [ip_network("10.1.0.0/16")])
    assert refused(carry(IPv4Address("10.2.2.3")), [ip_network("10.1.0.0/16")])


@pytest.mark.parametrize("carrier", CLOSED_CARRIERS)
def test_a_transition_address_must_be_allowed_with_what_it_carries(carrier: str) -> None:
    """Such an address is special, whatever it carries; where its block is allowed, what it carries must be open too."""
    carry = CLOSED_CARRIERS[carrier]
    everything = [ip_network("::/0")]
    assert refused(carry(IPv4Address("1.1.1.1")))
    assert not refused(carry(IPv4Address("1.1.1.1")), everything)
    for text in SPECIAL_IPV4:
        if text != ANY or carrier != "IPv4-compatible":
            assert refused(carry(IPv4Address(text)), everything), text
    assert not refused(carry(IPv4Address("10.1.2.3")), [*everything, ip_network("10.0.0.0/8")])


@pytest.mark.parametrize("text", ["fe80::1%eth0", "::1%lo", "2606:4700:4700::1111%2", "::ffff:1.1.1.1%1"])
def test_a_scope_is_refused(text: str) -> None:
    """An address on a link of this machine lies in no network that could be allowed."""
    assert refused(IPv6Address(text))
    assert refused(IPv6Address(text), [ip_network("::/0"), ip_network("0.0.0.0/0")])


def test_an_allowed_network_allows_exactly_what_lies_in_it(seed: int) -> None:
    """For any network, each address in it is allowed, and those around it are as they were."""
    random = Random(seed)
    for _ in range(500):
        network = ip_network((random.getrandbits(32), random.randint(8, 32)), strict=False)
        for number in (int(network[0]), int(network[-1]), int(network[0]) - 1, int(network[-1]) + 1):
            address = IPv4Address(number % 2**32)
            assert refused(address, [network]) == (refused(address) and address not in network), (address, network)


def test_nothing_that_python_calls_closed_is_open(seed: int) -> None:
    """Our lists refuse at least what the standard library knows to be private, reserved or multicast."""
    random = Random(seed)
    for _ in range(20_000):
        for address in (IPv4Address(random.getrandbits(32)), IPv6Address(random.getrandbits(128))):
            assert refused(address) or (address.is_global and not address.is_multicast), address


def test_networks_of_the_setting() -> None:
    """Each CIDR is read; one that is none, or that has host bits, is told with its text."""
    assert read_networks(["10.0.0.0/8", "fd00::/8", "127.0.0.1"]) == (
        ip_network("10.0.0.0/8"),
        ip_network("fd00::/8"),
        ip_network("127.0.0.1/32"),
    )
    for wrong in ("10.0.0.1/8", "example.net", ""):
        with pytest.raises(StartupError, match=r"\Aallowed_cidrs: '.*' is no CIDR[^\n]*\Z"):
            read_networks([wrong])


GOOD_URLS = [
    "https://example.net", "https://example.net/", "https://example.net:8443/a/b?c=d&e=%2F", "https://example.net?q",
    "https://a_b.example.net/~x;y=(1)", "https://1.2.3.4/", "https://[2606:4700::1111]:443/", "https://xn--bcher-kva.de/",
    "https://localhost/", "https://EXAMPLE.net/[x]@y", "https://example.net:1/", "https://example.net:65535/",
    "https://example.net/" + "a" * (2048 - 20),
]  # fmt: skip
BAD_URLS = {
    "https://example.net/" + "a" * (2048 - 19): "2048 characters",
    "http://example.net/": "allow_http",
    "ftp://example.net/": "https://",
    "example.net": "https://",
    "//example.net": "https://",
    "HTTPS://example.net/": "https://",
    "": "https://",
    "https://user@example.net/": "credentials",
    "https://user:word@example.net/": "credentials",
    "https://example.net\\@127.0.0.1/": "percent-encoded",
    "https://example.net/#here": "fragment",
    "https://example.net/a b": "percent-encoded",
    "https://example.net/a\r\nHost: x": "percent-encoded",
    "https://example.net/%zz": "percent-encoded",
    "https://bücher.de/": "ASCII",
    "https://": "host",
    "https:///path": "host",
    "https://:443/": "host",
    "https://example.net:/": "host",
    "https://example.net:0/": "port",
    "https://example.net:65536/": "port",
    "https://example.net:99999999/": "host",
    "https://example.net:-1/": "host",
    "https://example..net/": "host",
    "https://-example.net/": "host",
    "https://example.net./": "host",
    "https://" + "a" * 64 + ".net/": "host",
    "https://" + "a." * 126 + "net/": "host",
    "https://127.1/": "host",
    "https://0x7f.1/": "host",
    "https://0x7f000001/": "host",
    "https://2130706433/": "host",
    "https://0177.0.0.1/": "host",
    "https://127.0.0.01/": "host",
    "https://1.2.3.4.5/": "host",
    "https://[::1/": "host",
    "https://[fe80::1%25eth0]/": "host",
    "https://[1.2.3.4]/": "host",
    "https://[]/": "host",
}


@pytest.mark.parametrize("url", GOOD_URLS)
def test_urls_of_destinations(url: str) -> None:
    """A destination may have any https URL with a host, and http where that is allowed."""
    check_url(url, allow_http=False)
    check_url(url.replace("https", "http", 1), allow_http=True) if len(url) < 2048 else None


@pytest.mark.parametrize("url", BAD_URLS)
def test_urls_that_are_refused(url: str) -> None:
    """What could be read in two ways, or names no receiver, is refused with one line that does not repeat it."""
    with pytest.raises(ValueError, match=BAD_URLS[url]) as raised:
        check_url(url, allow_http=False)
    line = str(raised.value)
    assert "\n" not in line
    assert "example.net" not in line

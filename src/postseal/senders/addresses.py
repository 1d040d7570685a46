"""Which URLs and addresses may be pushed to. Pure: nothing is looked up here (protocol section 7, "Sending safely").

IPv6 is refused but for what is known to be open: global unicast (2000::/3) without its special blocks, and NAT64.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

from postseal.errors import StartupError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_URL_CHARACTERS = 2_048
MAX_HOST_CHARACTERS = 253
MAX_PORT = 65_535

_SPECIAL_IPV4 = tuple(
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # behind a carrier's NAT; a cloud's metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's metadata, at a public address
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; a cloud's metadata
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved; broadcast
    )
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_SPECIAL_IPV6 = tuple(
    IPv6Network(block)
    for block in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")
_IPV4_COMPATIBLE = IPv6Network("::/96")

# The characters of RFC 3986. No others, so that no two parsers read one URL in two ways.
_CHARACTERS = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", re.ASCII)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
# What the system's resolver takes for a number: 127.1, 0x7f.1, 2130706433.
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*", re.ASCII)


def refused(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Whether nothing may be sent to `address`: it, or one that it carries, is special and lies in no allowed network.

    Special is what is not of the open internet: loopback, link-local, private, a cloud's metadata, multicast, reserved
    and the like. An address that is mapped into IPv6 is that IPv4 address. One with a scope id belongs to a link and
    not to a network: it is always refused.
    """
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return True
    return any(_is_special(form) and not any(form in network for network in allowed) for form in _with_carried(address))


def read_networks(cidrs: Iterable[str]) -> tuple[Network, ...]:
    """The networks of a setting. Raises StartupError with one line that names what is none."""
    return tuple(map(_read_network, cidrs))


def check_url(url: str, *, allow_http: bool) -> None:
    """Raise ValueError with one line, which does not repeat the URL, unless a destination may have it.

    At most 2,048 characters: `https://` (or `http://` where allowed), a host, and perhaps a port, a path, a query. What
    its host resolves to is not known before each attempt.
    """
    if len(url) > MAX_URL_CHARACTERS:
        raise ValueError(f"the URL has more than {MAX_URL_CHARACTERS} characters")
    if not _CHARACTERS.fullmatch(url):
        raise ValueError("the URL has a character that must be percent-encoded, or a host that is not in ASCII")
    if "#" in url:
        raise ValueError("the URL must have no fragment (#)")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in {"https", "http"}:
        raise ValueError("the URL must begin with https://")
    if scheme == "http" and not allow_http:
        raise ValueError("the URL must begin with https://; the setting allow_http allows http://")
    authority = re.split(r"[/?]", rest, maxsplit=1)[0]
    if "@" in authority:
        raise ValueError("the URL must hold no credentials (user@)")
    found = _AUTHORITY.fullmatch(authority)
    if not found:
        raise ValueError("the URL has no host, or one that is no name and no address")
    _check_host(found[1])
    if found[2] is not None and not 1 <= int(found[2]) <= MAX_PORT:
        raise ValueError(f"the URL's port must lie between 1 and {MAX_PORT}")


def _check_host(host: str) -> None:
    labels = host.split(".")
    try:
        if host.startswith("["):
            IPv6Address(host[1:-1])
        elif _NUMBER.fullmatch(labels[-1]):
            IPv4Address(host)
        elif len(host) > MAX_HOST_CHARACTERS or not all(map(_LABEL.fullmatch, labels)):
            raise ValueError
    except ValueError:
        raise ValueError("the URL's host is no name, no IPv4 address in four decimal parts, no IPv6 address") from None


def _read_network(cidr: str) -> Network:
    try:
        return ip_network(cidr)
    except ValueError:
        raise StartupError(f"allowed_cidrs: {cidr!r} is no CIDR such as 10.20.0.0/16 or fd00::/8") from None


def _is_special(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return any(address in block for block in _SPECIAL_IPV4)
    if address in _NAT64:
        return False  # what counts is whom it carries
    return address not in _GLOBAL_UNICAST or any(address in block for block in _SPECIAL_IPV6)


def _with_carried(address: Address) -> Iterator[Address]:
    """Every address to which a packet for `address` may go in the end."""
    if isinstance(address, IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if address in _NAT64 or address in _LOCAL_NAT64 or (address in _IPV4_COMPATIBLE and int(address) > 1):
        yield IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo

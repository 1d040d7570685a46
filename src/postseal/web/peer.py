"""Who is on the other end of the network: the socket's peer, or what a trusted proxy says of it.

`X-Forwarded-For` counts only on a connection from one of the configured CIDRs. Read from the right, the first hop that
is not in them is the peer; whatever stands left of it was written by that peer. If a hop on the way is no address, or
every hop is a proxy of ours, the socket's peer it is.
"""

import ipaddress
from collections.abc import Iterable

from postseal.errors import StartupError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
NOBODY = "unknown"
"""The peer of a connection that has no address, such as one over a Unix socket."""


class TrustedProxies:
    """The networks whose X-Forwarded-For counts. StartupError unless each is a CIDR without host bits."""

    def __init__(self, cidrs: Iterable[str]) -> None:
        try:
            self._networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
        except ValueError as error:
            raise StartupError(f"setting trusted_proxies is not valid: {error}") from None

    def peer(self, socket_peer: str | None, forwarded: list[bytes]) -> str:
        """The peer's address; `forwarded` are the values of all X-Forwarded-For fields, in order."""
        if socket_peer is None:
            return NOBODY
        if not forwarded or not self._networks or not self._trusts(_address(socket_peer)):
            return socket_peer
        for hop in reversed(b",".join(forwarded).decode("latin-1").split(",")):
            address = _address(hop.strip(" \t"))
            if address is None:
                return socket_peer
            if not self._trusts(address):
                return str(address)
        return socket_peer

    def _trusts(self, address: IpAddress | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _address(text: str) -> IpAddress | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address

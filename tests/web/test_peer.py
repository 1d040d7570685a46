"""Who the peer is: the socket's, or what a proxy that we trust says, read from the right."""

from collections.abc import Iterator

import pytest
from served import Site, running_site
from wire import post

from postseal.errors import StartupError
from postseal.postgres.access import Access
from postseal.settings import Settings
from postseal.web.peer import NOBODY, TrustedProxies

PROXIES = ("10.0.0.0/8", "fd00::/8", "127.0.0.1/32")


@pytest.mark.parametrize(
    ("socket_peer", "forwarded", "peer"),
    [
        ("10.1.1.1", [], "10.1.1.1"),
        ("10.1.1.1", [b"203.0.113.5"], "203.0.113.5"),
        ("10.1.1.1", [b"198.51.100.9, 203.0.113.5"], "203.0.113.5"),
        ("10.1.1.1", [b"203.0.113.5, 10.2.2.2"], "203.0.113.5"),
        ("10.1.1.1", [b"198.51.100.9", b"203.0.113.5,10.2.2.2"], "203.0.113.5"),
        ("10.1.1.1", [b"\t203.0.113.5 ,  fd00::7"], "203.0.113.5"),
        ("10.1.1.1", [b"nonsense, 203.0.113.5"], "203.0.113.5"),
        ("10.1.1.1", [b"203.0.113.5, nonsense"], "10.1.1.1"),
        ("10.1.1.1", [b"203.0.113.5, nonsense, 10.2.2.2"], "10.1.1.1"),
        ("10.1.1.1", [b"203.0.113.5:4711"], "10.1.1.1"),
        ("10.1.1.1", [b"203.0.113.5,"], "10.1.1.1"),
        ("10.1.1.1", [b""], "10.1.1.1"),
        ("10.1.1.1", [b"\xff"], "10.1.1.1"),
        ("10.1.1.1", [b"10.2.2.2, 10.3.3.3"], "10.1.1.1"),
        ("10.1.1.1", [b"2001:db8::5"], "2001:db8::5"),
        ("10.1.1.1", [b"::ffff:203.0.113.5"], "203.0.113.5"),
        ("::ffff:10.1.1.1", [b"203.0.113.5"], "203.0.113.5"),
        ("fd00::1", [b"203.0.113.5"], "203.0.113.5"),
        ("203.0.113.9", [b"203.0.113.5"], "203.0.113.9"),
        ("203.0.113.9", [b"10.1.1.1"], "203.0.113.9"),
        (None, [b"203.0.113.5"], NOBODY),
    ],
)
def test_the_rightmost_hop_that_is_no_proxy(socket_peer: str | None, forwarded: list[bytes], peer: str) -> None:
    """Only a trusted socket peer is believed, and only as far as its proxies reach."""
    assert TrustedProxies(PROXIES).peer(socket_peer, forwarded) == peer


def test_without_proxies_nobody_is_believed() -> None:
    """By default the field means nothing."""
    assert TrustedProxies(()).peer("127.0.0.1", [b"203.0.113.5"]) == "127.0.0.1"


@pytest.mark.parametrize("cidr", ["10.0.0.1/8", "10.0.0.0/33", "proxy.example", ""])
def test_a_wrong_network_stops_the_start(cidr: str) -> None:
    """A CIDR with host bits, or none at all, is told at start-up."""
    with pytest.raises(StartupError, match="trusted_proxies"):
        TrustedProxies((cidr,))


@pytest.fixture(scope="module")
def site(shared_access: Access) -> Iterator[Site]:
    """A server behind a proxy on this host, which gives each peer two tries."""
    settings = Settings(trusted_proxies=PROXIES, peer_burst=2, peer_permits_per_s=0.01)
    with running_site(shared_access, settings) as site:
        yield site


def test_the_identity_limit_is_the_peers_own(site: Site) -> None:
    """Two wrong credentials use one peer's limit up, and nobody else's."""
    statuses = [
        site.ask(post("wrong", b"{}", x_forwarded_for=peer)).status
        for peer in ("203.0.113.5", "203.0.113.5", "203.0.113.5", "203.0.113.6", "9.9.9.9, 203.0.113.5")
    ]
    assert statuses == [401, 401, 429, 401, 429]
    answer = site.ask(post("wrong", b"{}", x_forwarded_for="203.0.113.5"))
    assert answer.reason == "peer_rate_limited"
    assert answer.headers["ratelimit-policy"] == '"peer";q=2;w=200'
    assert answer.headers["ratelimit"] == f'"peer";r=0;t={answer.headers["retry-after"]}'


def test_a_field_in_a_trailer_is_not_believed(site: Site) -> None:
    """A client behind the proxy cannot bring the field behind its body."""
    for _ in range(4):
        raw = post("wrong", b"", x_forwarded_for="203.0.113.7", transfer_encoding="chunked")
        raw = raw.replace(b"content-length: 0\r\n", b"") + b"2\r\n{}\r\n0\r\nx-forwarded-for: 203.0.113.8\r\n\r\n"
        assert site.ask(raw).status in {400, 429}
    assert site.ask(post("wrong", b"{}", x_forwarded_for="203.0.113.8")).status == 401


def test_a_known_credential_is_not_limited_by_its_peer(site: Site) -> None:
    """A fleet behind one address does not starve because of one that shows wrong credentials."""
    peer = "203.0.113.10"
    body = site.device.envelope(1)
    assert site.ask(post(site.device.token.reveal(), body, x_forwarded_for=peer)).status == 201
    statuses = [site.ask(post("wrong", b"{}", x_forwarded_for=peer)).status for _ in range(3)]
    assert statuses == [401, 401, 429]
    assert site.ask(post(site.device.token.reveal(), body, x_forwarded_for=peer)).status == 200

"""Rate limits: a token bucket a key, in process, with a bound on how many keys are remembered.

Two instances stand before the expensive work of `receive()`: the peer limit (check 0, keyed by network peer) and
the sync limit (check 1, keyed by verified identity). Permits are all or nothing: a batch of n lines costs n.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_KEYS = 100_000
"""Beyond this the key that was used longest ago is forgotten, and with it at most one burst."""


@dataclass(frozen=True, slots=True)
class Rate:
    """`per_s` permits a second flow in, up to `burst`."""

    per_s: float
    burst: int


@dataclass(frozen=True, slots=True)
class Quota:
    """What a limiter says of one request. `retry_after_s` is 0 when it was granted."""

    granted: bool
    limit: int
    remaining: int
    retry_after_s: float
    window_s: float
    """How long an empty bucket takes to fill."""


@dataclass(slots=True)
class Tally:
    """What a limiter was asked for and answered alike, since it was made."""

    requests: int = 0
    permits: int = 0


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class RateLimiter:
    """Token buckets of one rate. `clock` is monotonic, in seconds."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self.rate = rate
        self.granted = Tally()
        self.refused = Tally()
        self.returned_permits = 0
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str, permits: int = 1) -> Quota:
        """Take `permits` for `key` if all of them are there, else none."""
        bucket = self._refilled(key)
        granted = bucket.tokens >= permits
        if granted:
            bucket.tokens -= permits
        tally = self.granted if granted else self.refused
        tally.requests += 1
        tally.permits += permits
        missing = 0.0 if granted else min(permits, self.rate.burst) - bucket.tokens
        return Quota(
            granted,
            self.rate.burst,
            int(bucket.tokens),
            missing / self.rate.per_s,
            self.rate.burst / self.rate.per_s,
        )

    def give_back(self, key: str, permits: int = 1) -> None:
        """Return what was taken for work that turned out to be welcome."""
        bucket = self._refilled(key)
        bucket.tokens = min(self.rate.burst, bucket.tokens + permits)
        self.returned_permits += permits

    def _refilled(self, key: str) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(float(self.rate.burst), now_s)
            if len(self._buckets) > MAX_KEYS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
            bucket.tokens = min(self.rate.burst, bucket.tokens + (now_s - bucket.at_s) * self.rate.per_s)
            bucket.at_s = now_s
        return bucket


def peer_key(address: str) -> str:
    """The key of a network peer: an IPv4 address, or an IPv6 address's /64, which one host can roam in."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.IPv6Network((ip, 64), strict=False))
    return str(ip)

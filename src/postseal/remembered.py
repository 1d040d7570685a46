"""A small memory of what was looked up: bounded in entries and in age."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class Lookups:
    """How often what was looked up was there, and how often not."""

    hits: int = 0
    misses: int = 0


class Remembered(Generic[K, V]):
    """At most `entries` values, each for `ttl_s` seconds of the monotonic `clock`; the oldest is forgotten first."""

    def __init__(self, *, entries: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self.lookups = Lookups()
        self._entries = entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._values: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def recall(self, key: K) -> V | None:
        """The value, unless it is too old or was never there; counted in `lookups`."""
        value = self.peek(key)
        if value is None:
            self.lookups.misses += 1
        else:
            self.lookups.hits += 1
        return value

    def peek(self, key: K) -> V | None:
        """The same, not counted."""
        found = self._values.get(key)
        if found is None:
            return None
        until_s, value = found
        if self._clock() >= until_s:
            del self._values[key]
            return None
        return value

    def forget(self, key: K) -> None:
        """Keep nothing for `key`."""
        self._values.pop(key, None)

    def remember(self, key: K, value: V) -> None:
        """Keep `value` from now on."""
        self._values.pop(key, None)
        self._values[key] = (self._clock() + self._ttl_s, value)
        if len(self._values) > self._entries:
            self._values.popitem(last=False)

"""Two encoders of RFC 8785's subset that have nothing in common say the same of any value."""

import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from independent import rfc8785

from postseal.envelope import canonical

TEXTS = st.text(st.characters(), max_size=10) | st.text(st.characters(max_codepoint=0x2F), max_size=10)
EDGES = [2**53 - 1, 2**53, -(2**53) + 1, -(2**53), 2**63, 2**64, -(2**63) - 1, 10**400]
SCALARS = st.none() | st.booleans() | st.integers() | st.sampled_from(EDGES) | TEXTS
NAMES = st.text(st.characters(max_codepoint=127), max_size=6)
WITHIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6), max_leaves=15
)
FOREIGN = st.floats() | st.sampled_from(
    ["\ud800", b"", (), {"\u00e9": 1}, {"\U0001f600": 1, "\uffff": 2}, {"\ud800": 1}]
)
BEYOND = st.recursive(
    SCALARS | FOREIGN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def form(encode: Any, value: object) -> bytes | None:
    """What an encoder makes of a value; None where it has no canonical form."""
    try:
        return encode(value)
    except ValueError:
        return None


@settings(max_examples=500, deadline=None)  # a busy machine is no failure
@given(WITHIN | BEYOND)
def test_the_encoders_agree(value: object):
    """The same bytes, or no form in both."""
    raw = form(rfc8785, value)
    assert form(canonical.encode, value) == raw
    assert canonical.is_canonical(raw or b"", value) is (raw is not None)


def test_every_character():
    """Each character of Unicode is spelled alike; halves of surrogate pairs have no spelling."""
    for start in range(0, 0x110000, 256):
        text = struct.pack("<256I", *range(start, start + 256)).decode("utf-32-le", "surrogatepass")
        assert form(canonical.encode, text) == form(rfc8785, text), hex(start)

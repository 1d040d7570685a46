"""RFC 8785 for the subset: the bytes, and what has none."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postseal.envelope import canonical

TABLE = [
    ("\b\t\n\f\r", rb'"\b\t\n\f\r"'),
    ("\x00\x0b\x1f", rb'"\u0000\u000b\u001f"'),
    ("\x7f/", b'"\x7f/"'),
    ('"\\', rb'"\"\\"'),
    ("\u00e9\u2028\U0001f600", '"\u00e9\u2028\U0001f600"'.encode()),
    (
        {"b": 1, "a": [True, False, None], "B": {"z": "", "y": -1}},
        b'{"B":{"y":-1,"z":""},"a":[true,false,null],"b":1}',
    ),
    ({"aa": 1, "a": 2, "a.": 3, "a-": 4}, b'{"a":2,"a-":4,"a.":3,"aa":1}'),
    (2**53 - 1, b"9007199254740991"),
    (-(2**53) + 1, b"-9007199254740991"),
]


@pytest.mark.parametrize(("value", "raw"), TABLE)
def test_bytes(value: object, raw: bytes):
    """Each value has exactly RFC 8785's bytes, and only these are its canonical form."""
    assert canonical.encode(value) == raw
    assert canonical.is_canonical(raw, value)
    assert not canonical.is_canonical(raw + b" ", value)


def nested(depth: int) -> list[object]:
    """Make lists in lists."""
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        {"a": [1.5]},
        float("nan"),
        2**53,
        [-(2**53)],
        {"\u00e9": 1},
        {1: 1},
        (1, 2),
        {1},
        b"bytes",
        object(),
        "\ud800",
        {"a": "\udc00"},
        nested(100_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outside_of_the_subset(value: object):
    """Floats, great integers, names beyond ASCII, other types and bottomless ones are ValueErrors."""
    with pytest.raises(ValueError):  # noqa: PT011  # the type is the promise; texts differ by cause
        canonical.encode(value)
    assert not canonical.is_canonical(b"1.0", value)


NAMES = st.text(st.characters(max_codepoint=127), max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)  # a busy machine is no failure
@given(VALUES)
def test_decoding_comes_back(value: object):
    """Any value of the subset survives the way there and back, and its bytes are canonical."""
    raw = canonical.encode(value)
    assert json.loads(raw) == value
    assert canonical.is_canonical(raw, json.loads(raw))

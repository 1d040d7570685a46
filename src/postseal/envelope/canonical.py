r"""RFC 8785: the one byte form of a JSON value, for the subset that envelopes use (protocol section 2).

The subset has ASCII member names, no floats, and integers that every JSON reader keeps exactly, within
±(2^53-1). Inside it msgspec's encoder gives RFC 8785's bytes: the short escapes \b \t \n \f \r, \u00xx in
lower case for the other control characters, and nothing else escaped but the quote and the backslash.
"""

from typing import cast

import msgspec

MAX_INTEGER = 2**53 - 1

# "sorted" orders members of structs and the tag of a union too, as "deterministic" does not.
_ENCODER = msgspec.json.Encoder(order="sorted")


def encode(value: object) -> bytes:
    """Return the canonical bytes of a JSON value: None, bool, int, str, list, dict, or a Struct at the top.

    A Struct is taken at its word: its types must have no floats, and it must have been decoded, or be decoded
    next, by those types. ValueError for whatever has no canonical form in the subset.
    """
    try:
        if not isinstance(value, msgspec.Struct):
            _check(value)
        return _ENCODER.encode(value)
    except (TypeError, RecursionError) as error:
        raise ValueError("this value has no canonical JSON form") from error


def is_canonical(raw: bytes, value: object) -> bool:
    """Say whether `raw`, which was decoded to `value`, is the canonical form of it."""
    try:
        return encode(value) == raw
    except ValueError:
        return False


def _check(value: object) -> None:
    match value:
        case None | bool() | str():
            return
        case int():
            if abs(value) > MAX_INTEGER:
                raise ValueError("an integer lies outside of ±(2^53-1)")
        case list():
            for item in cast("list[object]", value):
                _check(item)
        case dict():
            for name, item in cast("dict[object, object]", value).items():
                if not (isinstance(name, str) and name.isascii()):
                    raise ValueError("a member name is not ASCII text")
                _check(item)
        case _:
            raise ValueError(f"a {type(value).__name__} has no canonical JSON form")

"""The same rules read once more, without a line of the code under test: JSON, RFC 8785, and what an event is."""

import json
from typing import Any, cast

import jsonschema_rs
from every_kind import KINDS

from postseal.envelope.schema import payload_schema

MAX_INTEGER = 2**53 - 1
SHORT_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}

_SCHEMA = jsonschema_rs.Draft202012Validator(json.loads(payload_schema(KINDS)))


def rfc8785(value: object) -> bytes:
    """The canonical bytes of a value of the subset; ValueError for any other."""
    return _text(value).encode("utf-8")


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and -MAX_INTEGER <= value <= MAX_INTEGER:
        return str(value)
    if isinstance(value, str):
        return '"' + "".join(map(_character, value)) + '"'
    if isinstance(value, list):
        return "[" + ",".join(map(_text, cast("list[object]", value))) + "]"
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        if all(name.isascii() for name in members):
            names = sorted(members, key=lambda name: name.encode("utf-16-be"))
            return "{" + ",".join(f"{_text(name)}:{_text(members[name])}" for name in names) + "}"
    raise ValueError("not of the subset")


def _character(character: str) -> str:
    if character in SHORT_ESCAPES:
        return SHORT_ESCAPES[character]
    return f"\\u{ord(character):04x}" if character < " " else character


def read_json(raw: bytes) -> Any:
    """Read JSON in which no member is repeated and no number is a float; ValueError for any other bytes."""
    try:
        return json.loads(
            raw.decode("utf-8"), object_pairs_hook=_each_once, parse_float=_refuse, parse_constant=_refuse
        )
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_event(raw: bytes) -> bool:
    """Whether these bytes are an event, in or out, by the published schema and the canonical form."""
    try:
        value = read_json(raw)
        return _SCHEMA.is_valid(value) and rfc8785(value) == raw
    except ValueError:
        return False


def is_version_1(raw: bytes) -> bool:
    """Whether a JSON object says that it is of our protocol and version; where it repeats a member the last counts."""
    members = json.loads(raw)
    version = members.get("schemaVersion")
    return members.get("protocol") == "controlplane/v1" and type(version) is int and version == 1


def _each_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        raise ValueError("a member is repeated")
    return found


def _refuse(token: str) -> float:
    raise ValueError("a float")

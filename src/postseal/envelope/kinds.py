"""Kinds of a deployment's own: closed JSON Schemas, one a kind (protocol section 3).

`read_kinds` takes the files and refuses, before anything runs, what is not a closed schema of its kind. It is given
the validator as a function, so that a device needs none. `NO_KINDS` is a deployment that adds nothing.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from postseal.envelope.closed_schema import NotClosedError, require_closed
from postseal.errors import StartupError

MAX_KINDS: Final = 100
MAX_SCHEMA_BYTES: Final = 65_536

# A dot stands in every name, and in none of a built-in kind.
_FILE_NAME = re.compile(r"(?=.{3,63}\.json\Z)([a-z0-9][a-z0-9_-]*(?:\.[a-z0-9][a-z0-9_-]*)+)\.json\Z")

Fault = Callable[[object], str | None]
"""Says which place of `data` breaks the schema, such as `$.data.progress`, and None where `data` holds."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of a deployment's own; `schema` describes the whole of `data`."""

    name: str
    schema: dict[str, Any]
    fault: Fault


Kinds = Mapping[str, Kind]
"""By name."""
NO_KINDS: Final[Kinds] = {}


def read_kinds(files: Mapping[str, bytes], compile_schema: Callable[[dict[str, Any]], Fault]) -> Kinds:
    """Read the kinds of a deployment out of its files: name `<vendor>.<kind>.json`, content a closed JSON Schema.

    `compile_schema` makes the check of a schema that is closed; NotClosedError where it cannot. Raises StartupError
    with one line: which file, which place in it as a JSON pointer, which rule.
    """
    if len(files) > MAX_KINDS:
        raise StartupError(f"there are more than {MAX_KINDS} kind schemas")
    return {kind.name: kind for kind in (_read(file, raw, compile_schema) for file, raw in sorted(files.items()))}


def _read(file: str, raw: bytes, compile_schema: Callable[[dict[str, Any]], Fault]) -> Kind:
    named = _FILE_NAME.match(file)
    if not named:
        raise StartupError(f"kind schema {file!r}: the file is not named <vendor>.<kind>.json")
    try:
        schema = _parse(raw)
        require_closed(schema)
        _require_kind(schema, named[1])
        return Kind(named[1], schema, compile_schema(schema))
    except NotClosedError as error:
        raise StartupError(f"kind schema {file}, at {error.place}: {error.rule}") from None


def _parse(raw: bytes) -> Any:
    if len(raw) > MAX_SCHEMA_BYTES:
        raise NotClosedError((), f"longer than {MAX_SCHEMA_BYTES} bytes")
    try:
        schema = json.loads(raw.decode("utf-8"), object_pairs_hook=_each_once)
        # Strings that hold half of a surrogate pair have no UTF-8, and no payload can hold them.
        json.dumps(schema, ensure_ascii=False).encode("utf-8")
    except NotClosedError:
        raise
    except (ValueError, RecursionError):
        raise NotClosedError((), "not a JSON document in UTF-8, or nested too deep") from None
    return schema


def _each_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        names = [name for name, _ in members]
        repeated = next(name for name in names if names.count(name) > 1)
        raise NotClosedError((), f"repeats the member {json.dumps(repeated)} of an object")
    return found


def _require_kind(schema: dict[str, Any], name: str) -> None:
    if schema.get("type") != "object":
        raise NotClosedError((), "not of type object, as data is")
    kind = cast("dict[str, Any]", schema.get("properties", {}).get("kind", {}))
    if kind.get("const", kind.get("enum")) not in (name, [name]):
        raise NotClosedError(("properties", "kind"), f'not {{"const": "{name}"}}')
    if "kind" not in schema.get("required", []):
        raise NotClosedError(("required",), "without kind")

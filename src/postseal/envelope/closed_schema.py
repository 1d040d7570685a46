"""Is a JSON Schema closed? What a deployment's schema must be (protocol section 3; docs/kinds.md has every rule).

Whatever a closed schema takes is bounded: no member that the schema does not name, no null, no number but integers
that every JSON reader keeps exactly, no text or list without a bound. A subschema has one of the forms of `KEYWORDS`
and no keyword besides, so that a keyword which is not known here can open nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import quote

from postseal.envelope.canonical import MAX_INTEGER

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
MAX_SUBSCHEMAS: Final = 1000
"""Counted again behind each `$ref`, so that a few definitions cannot unfold into very many."""
MAX_DEPTH: Final = 32
"""Of subschemas within each other, along each `$ref`; data is no deeper."""

KEYWORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "$ref": ("$ref",),
    "anyOf": ("anyOf",),
    "oneOf": ("oneOf",),
    "const": ("const", "type"),
    "enum": ("enum", "type"),
    "object": ("type", "properties", "required", "additionalProperties"),
    "array": ("type", "items", "minItems", "maxItems", "uniqueItems"),
    "string": ("type", "minLength", "maxLength", "pattern"),
    "integer": ("type", "minimum", "maximum"),
    "boolean": ("type",),
}
"""What may stand in a subschema of each form; the form is told by a keyword of its name, or else by `type`."""
ANNOTATIONS: Final = ("title", "description", "$comment")
AT_THE_ROOT: Final = ("$schema", "$id", "$defs")

_SCALARS: Mapping[str, type] = {"string": str, "integer": int, "boolean": bool}
_NAME = re.compile(r"[A-Za-z0-9_.:@$-]{1,64}\Z")

# The pieces that ECMAScript, which JSON Schema means, reads as other dialects do.
_PATTERN = re.compile(
    r"""(?:
        (?![\\^$.|?*+()\[\]{}])[ -~]                           # a character for itself
      | \\[dDwWsS/\\^$.|?*+()\[\]{}]                           # a class, or a character that needs the backslash
      | [\^$.|)] | \((?:\?:|(?!\?))                            # groups, but no look-around, names or flags
      | (?:[*+?]|\{[0-9]{1,4}(?:,[0-9]{0,4})?\})(?![*+?{])     # one quantifier, not two
      | \[\^? (?: (?![\\\[\]&~-])[ -~] | \\[dDwWsS/\\^$.|?*+()\[\]{}-] | -(?!-) | &(?!&) | ~(?!~) )+ \]
    )*\Z""",
    re.VERBOSE,
)

Path = tuple[str, ...]
"""The keys that lead from the root of a schema to a place in it."""


class NotClosedError(ValueError):
    """`rule` says what is wrong at `place`, a JSON pointer in the form of a URI fragment."""

    def __init__(self, path: Path, rule: str) -> None:
        self.place = "#" + "".join("/" + quote(part.replace("~", "~0").replace("/", "~1"), safe="$:@") for part in path)
        self.rule = rule
        super().__init__(f"{self.place}: {rule}")


def require_closed(schema: object) -> None:
    """Raise NotClosedError at a place where the schema is open, or says what is not known to be closed."""
    if not isinstance(schema, dict):
        raise NotClosedError((), "not an object")
    root = cast("dict[str, Any]", schema)
    if root.get("$schema", DIALECT) != DIALECT:
        raise NotClosedError(("$schema",), f"only {DIALECT} is read")
    if not isinstance(root.get("$id", ""), str):
        raise NotClosedError(("$id",), "not a string")
    walk = _Walk(_members(root, "$defs", ()))
    walk.visit({name: root[name] for name in root if name not in AT_THE_ROOT}, (), ())
    for name, definition in walk.definitions.items():
        walk.visit(definition, ("$defs", name), ())


@dataclass(slots=True)
class _Walk:
    """A walk through a schema that follows its references; `around` has the subschemas that a visit is inside of."""

    definitions: dict[str, object]
    visits: int = 0

    def visit(self, subschema: object, path: Path, around: tuple[Path, ...]) -> None:
        self.visits += 1
        if self.visits > MAX_SUBSCHEMAS:
            raise NotClosedError(path, f"more than {MAX_SUBSCHEMAS} subschemas, counted again behind each $ref")
        if len(around) == MAX_DEPTH:
            raise NotClosedError(path, f"more than {MAX_DEPTH} subschemas within each other")
        if not isinstance(subschema, dict):
            raise NotClosedError(path, "not an object; true and false take the place of no subschema here")
        schema = cast("dict[str, Any]", subschema)
        form = _form(schema, path)
        around = (*around, path)
        _require_keywords(schema, form, path)
        match form:
            case "$ref":
                self._follow(schema["$ref"], (*path, "$ref"), around)
            case "anyOf" | "oneOf":
                for number, branch in enumerate(_filled_list(schema, form, path)):
                    self.visit(branch, (*path, form, str(number)), around)
            case "object":
                self._visit_members(schema, path, around)
            case "array":
                _require_array(schema, path)
                self.visit(schema["items"], (*path, "items"), around)
            case "string":
                _require_string(schema, path)
            case "integer":
                _require_integer(schema, path)
            case "const" | "enum":
                _require_scalars(schema, form, path)
            case _:  # a boolean has nothing to bound
                pass

    def _follow(self, target: object, path: Path, around: tuple[Path, ...]) -> None:
        name = target.removeprefix("#/$defs/") if isinstance(target, str) else ""
        if target != f"#/$defs/{name}" or name not in self.definitions:
            raise NotClosedError(path, "not #/$defs/ and the name of a definition of this file")
        definition = ("$defs", name)
        if definition in around:
            raise NotClosedError(path, "leads back to where it stands, so that nothing bounds the depth")
        self.visit(self.definitions[name], definition, around)

    def _visit_members(self, schema: dict[str, Any], path: Path, around: tuple[Path, ...]) -> None:
        if schema.get("additionalProperties") is not False:
            raise NotClosedError(path, 'an object without "additionalProperties": false')
        members = _members(schema, "properties", path)
        required = _list(schema, "required", path) if "required" in schema else []
        if not all(isinstance(name, str) and name in members for name in required):
            raise NotClosedError((*path, "required"), "names what properties does not")
        for name, member in members.items():
            self.visit(member, (*path, "properties", name), around)


def _form(schema: dict[str, Any], path: Path) -> str:
    for form in ("$ref", "anyOf", "oneOf", "const", "enum"):
        if form in schema:
            return form
    match schema.get("type"):
        case "object" | "array" | "string" | "integer" | "boolean" as form:
            return form
        case "number":
            raise NotClosedError((*path, "type"), "a number may be a float; use integer")
        case "null":
            raise NotClosedError((*path, "type"), "null is never sent; leave the member out of required")
        case None:
            raise NotClosedError(path, "without a type, const, enum, $ref, anyOf or oneOf")
        case _:
            raise NotClosedError((*path, "type"), "not one of object, array, string, integer and boolean")


def _require_keywords(schema: dict[str, Any], form: str, path: Path) -> None:
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            if not isinstance(value, str):
                raise NotClosedError((*path, keyword), "not a string")
        elif keyword == "format":
            raise NotClosedError((*path, keyword), "format refuses nothing in 2020-12; use pattern")
        elif keyword not in KEYWORDS[form]:
            raise NotClosedError((*path, keyword), f"not one of the keywords that may stand beside {form}")


def _require_array(schema: dict[str, Any], path: Path) -> None:
    for keyword in ("items", "maxItems"):
        if keyword not in schema:
            raise NotClosedError(path, f"an array without {keyword}")
    _require_counts(schema, ("minItems", "maxItems"), path)
    if not isinstance(schema.get("uniqueItems", False), bool):
        raise NotClosedError((*path, "uniqueItems"), "not true or false")


def _require_string(schema: dict[str, Any], path: Path) -> None:
    if "maxLength" not in schema and "pattern" not in schema:
        raise NotClosedError(path, "a string without maxLength or pattern")
    _require_counts(schema, ("minLength", "maxLength"), path)
    pattern = schema.get("pattern", "")
    if not (isinstance(pattern, str) and _PATTERN.match(pattern)):
        raise NotClosedError((*path, "pattern"), "not a pattern that all dialects read alike")


def _require_integer(schema: dict[str, Any], path: Path) -> None:
    for keyword in ("minimum", "maximum"):
        if keyword not in schema:
            raise NotClosedError(path, f"an integer without {keyword}")
        if not _is_exact_integer(schema[keyword]):
            raise NotClosedError((*path, keyword), "not an integer within ±(2^53-1)")


def _require_scalars(schema: dict[str, Any], form: str, path: Path) -> None:
    values = [schema[form]] if form == "const" else _filled_list(schema, form, path)
    scalar = schema.get("type")
    if scalar is not None and not (isinstance(scalar, str) and scalar in _SCALARS):
        raise NotClosedError((*path, "type"), "not one of string, integer and boolean")
    for value in values:
        if not (isinstance(value, (str, bool)) or _is_exact_integer(value)):
            raise NotClosedError((*path, form), "not strings, booleans and integers within ±(2^53-1) alone")
        if scalar is not None and type(value) is not _SCALARS[scalar]:
            raise NotClosedError((*path, form), f"not of type {scalar} alone")


def _require_counts(schema: dict[str, Any], keywords: tuple[str, ...], path: Path) -> None:
    for keyword in keywords:
        count = schema.get(keyword, 0)
        if not (_is_exact_integer(count) and count >= 0):
            raise NotClosedError((*path, keyword), "not an integer from 0 to 2^53-1")


def _is_exact_integer(value: object) -> bool:
    return type(value) is int and abs(value) <= MAX_INTEGER


def _list(schema: dict[str, Any], keyword: str, path: Path) -> list[object]:
    found: object = schema[keyword]
    if not isinstance(found, list):
        raise NotClosedError((*path, keyword), "not a list")
    return cast("list[object]", found)


def _filled_list(schema: dict[str, Any], keyword: str, path: Path) -> list[object]:
    found = _list(schema, keyword, path)
    if not found:
        raise NotClosedError((*path, keyword), "an empty list")
    return found


def _members(schema: dict[str, Any], keyword: str, path: Path) -> dict[str, object]:
    found: object = schema.get(keyword, {})
    if not isinstance(found, dict):
        raise NotClosedError((*path, keyword), "not an object")
    members = cast("dict[str, object]", found)
    if not all(_NAME.match(name) for name in members):
        raise NotClosedError((*path, keyword), "a name in it is not 1 to 64 of A-Z a-z 0-9 _ . : @ $ -")
    return members

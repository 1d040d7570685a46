"""Closed JSON Schemas: every way to be open is refused with its place, and what is closed takes what it says."""

import json
import re
from typing import Any

import pytest
from kind_samples import (
    COUNT,
    DIALECT,
    EMPTY,
    FILE,
    TEXT,
    UUID_PATTERN,
    is_taken,
    payload_of,
    read,
    refusal,
    rfc8785,
    schema_with,
)
from wire_samples import UUID_TEXT

from postseal.envelope.kinds import MAX_SCHEMA_BYTES

# -- subschemas that are open, the place that is named (below the member x), and a word of the rule

OPEN: list[tuple[object, str, str]] = [
    (True, "", "not an object"),
    (False, "", "not an object"),
    (None, "", "not an object"),
    ([], "", "not an object"),
    ({}, "", "without a type"),
    ({"description": "anything"}, "", "without a type"),
    ({"type": "number"}, "/type", "float"),
    ({"type": "number", "minimum": 0, "maximum": 1}, "/type", "float"),
    ({"type": "null"}, "/type", "null"),
    ({"type": ["string", "null"], "maxLength": 8}, "/type", "not one of"),
    ({"type": "text"}, "/type", "not one of"),
    # objects
    ({"type": "object"}, "", "additionalProperties"),
    ({"type": "object", "properties": {}, "additionalProperties": True}, "", "additionalProperties"),
    ({"type": "object", "additionalProperties": {}}, "", "additionalProperties"),
    ({"type": "object", "additionalProperties": TEXT}, "", "additionalProperties"),
    ({"type": "object", "additionalProperties": 0}, "", "additionalProperties"),
    ({"type": "object", "unevaluatedProperties": False}, "/unevaluatedProperties", "keywords"),
    (EMPTY | {"patternProperties": {"^a$": TEXT}}, "/patternProperties", "keywords"),
    (EMPTY | {"properties": {"y": {"type": "string"}}}, "/properties/y", "maxLength"),
    (EMPTY | {"properties": {"y": EMPTY | {"properties": {"z": {}}}}}, "/properties/y/properties/z", "type"),
    (EMPTY | {"properties": {"\u00e9": TEXT}}, "/properties", "a name"),
    (EMPTY | {"properties": {"a b": TEXT}}, "/properties", "a name"),
    (EMPTY | {"properties": {"a\n": TEXT}}, "/properties", "a name"),
    (EMPTY | {"properties": {"": TEXT}}, "/properties", "a name"),
    (EMPTY | {"properties": {"a" * 65: TEXT}}, "/properties", "a name"),
    (EMPTY | {"properties": []}, "/properties", "not an object"),
    (EMPTY | {"required": ["y"]}, "/required", "properties does not"),
    (EMPTY | {"required": [["y"]]}, "/required", "properties does not"),
    (EMPTY | {"required": "y"}, "/required", "not a list"),
    # arrays
    ({"type": "array", "items": COUNT}, "", "maxItems"),
    ({"type": "array", "maxItems": 3}, "", "items"),
    ({"type": "array", "maxItems": 3, "items": True}, "/items", "not an object"),
    ({"type": "array", "maxItems": 3, "items": {"type": "integer"}}, "/items", "minimum"),
    ({"type": "array", "maxItems": 3, "prefixItems": [COUNT], "items": COUNT}, "/prefixItems", "keywords"),
    ({"type": "array", "maxItems": 3, "contains": COUNT, "items": COUNT}, "/contains", "keywords"),
    ({"type": "array", "maxItems": -1, "items": COUNT}, "/maxItems", "integer"),
    ({"type": "array", "maxItems": 3.0, "items": COUNT}, "/maxItems", "integer"),
    ({"type": "array", "maxItems": True, "items": COUNT}, "/maxItems", "integer"),
    ({"type": "array", "maxItems": 3, "minItems": "1", "items": COUNT}, "/minItems", "integer"),
    ({"type": "array", "maxItems": 3, "uniqueItems": 1, "items": COUNT}, "/uniqueItems", "true or false"),
    # strings
    ({"type": "string"}, "", "maxLength or pattern"),
    ({"type": "string", "minLength": 1}, "", "maxLength or pattern"),
    ({"type": "string", "maxLength": "8"}, "/maxLength", "integer"),
    ({"type": "string", "maxLength": 2**53}, "/maxLength", "integer"),
    ({"type": "string", "maxLength": 8, "minLength": -1}, "/minLength", "integer"),
    (TEXT | {"format": "uuid"}, "/format", "pattern"),
    (TEXT | {"contentMediaType": "text/plain"}, "/contentMediaType", "keywords"),
    (TEXT | {"default": "a"}, "/default", "keywords"),
    (TEXT | {"x/y~z %": 1}, "/x~1y~0z%20%25", "keywords"),
    (TEXT | {"line\nbreak": 1}, "/line%0Abreak", "keywords"),
    ({"type": "string", "pattern": 1}, "/pattern", "pattern"),
    # integers
    ({"type": "integer"}, "", "minimum"),
    ({"type": "integer", "minimum": 0}, "", "maximum"),
    ({"type": "integer", "maximum": 0}, "", "minimum"),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 9}, "/exclusiveMinimum", "keywords"),
    (COUNT | {"multipleOf": 2}, "/multipleOf", "keywords"),
    (COUNT | {"maximum": 2**53}, "/maximum", "2^53-1"),
    (COUNT | {"minimum": -(2**53)}, "/minimum", "2^53-1"),
    (COUNT | {"maximum": 9.0}, "/maximum", "integer"),
    (COUNT | {"maximum": 9.5}, "/maximum", "integer"),
    (COUNT | {"maximum": True}, "/maximum", "integer"),
    (COUNT | {"maximum": None}, "/maximum", "integer"),
    # values
    ({"const": None}, "/const", "strings"),
    ({"const": 1.5}, "/const", "strings"),
    ({"const": 2**53}, "/const", "strings"),
    ({"const": {}}, "/const", "strings"),
    ({"const": []}, "/const", "strings"),
    ({"enum": []}, "/enum", "empty"),
    ({"enum": "a"}, "/enum", "not a list"),
    ({"enum": ["a", None]}, "/enum", "strings"),
    ({"enum": ["a", 0.5]}, "/enum", "strings"),
    ({"type": "string", "enum": ["a", 1]}, "/enum", "type string"),
    ({"type": "integer", "const": True}, "/const", "type integer"),
    ({"type": ["string"], "enum": ["a"]}, "/type", "not one of"),
    ({"type": "array", "enum": ["a"]}, "/type", "not one of"),
    ({"enum": ["a"], "maxLength": 1}, "/maxLength", "keywords"),
    # references and branches
    ({"$ref": "#"}, "/$ref", "#/$defs/"),
    ({"$ref": "#/$defs/absent"}, "/$ref", "#/$defs/"),
    ({"$ref": "#/properties/kind"}, "/$ref", "#/$defs/"),
    ({"$ref": "https://example.com/schema"}, "/$ref", "#/$defs/"),
    ({"$ref": 1}, "/$ref", "#/$defs/"),
    ({"$dynamicRef": "#x"}, "", "without a type"),
    ({"$ref": "#/$defs/text", "maxLength": 1}, "/maxLength", "keywords"),
    ({"anyOf": []}, "/anyOf", "empty"),
    ({"anyOf": [TEXT, {"type": "integer"}]}, "/anyOf/1", "minimum"),
    ({"oneOf": [TEXT, True]}, "/oneOf/1", "not an object"),
    ({"oneOf": TEXT}, "/oneOf", "not a list"),
    ({"anyOf": [TEXT], "type": "string"}, "/type", "keywords"),
    ({"allOf": [TEXT]}, "", "without a type"),
    ({"not": TEXT}, "", "without a type"),
    (TEXT | {"not": TEXT}, "/not", "keywords"),
    (EMPTY | {"if": EMPTY, "then": {}}, "/if", "keywords"),
    (EMPTY | {"$defs": {}}, "/$defs", "keywords"),
    (TEXT | {"$id": "urn:x"}, "/$id", "keywords"),
    (TEXT | {"$anchor": "x"}, "/$anchor", "keywords"),
    # annotations
    (TEXT | {"title": 1}, "/title", "not a string"),
    (TEXT | {"$comment": None}, "/$comment", "not a string"),
]


@pytest.mark.parametrize(("subschema", "place", "rule"), OPEN, ids=lambda value: re.sub(r"\W+", "-", str(value))[:50])
def test_an_open_schema_is_refused_with_its_place(subschema: object, place: str, rule: str):
    """Whatever is open, or not known to be closed, stops the start: file, place, rule."""
    message = refusal(schema_with(subschema, **{"$defs": {"text": TEXT}}))
    assert message.startswith(f"kind schema {FILE}, at #/properties/x{place}: ")
    assert rule in message.partition(": ")[2]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "#/$schema"),
        ({"$schema": DIALECT + "#"}, "#/$schema"),
        ({"$schema": None}, "#/$schema"),
        ({"$id": 1}, "#/$id"),
        ({"$vocabulary": {}}, "#/$vocabulary"),
        ({"$defs": []}, "#/$defs"),
        ({"$defs": {"a/b": TEXT}}, "#/$defs"),
        ({"$defs": {"unused": {"type": "string"}}}, "#/$defs/unused"),
        ({"additionalProperties": True}, "#"),
        ({"type": "string"}, "#/additionalProperties"),
        ({"required": ["x"]}, "#/required"),
        ({"required": ["kind", "y"]}, "#/required"),
        ({"properties": {"x": TEXT}, "required": []}, "#/properties/kind"),
        ({"properties": {"kind": TEXT}, "required": ["kind"]}, "#/properties/kind"),
        ({"properties": {"kind": {"const": "acme.jobs"}}, "required": ["kind"]}, "#/properties/kind"),
        ({"properties": {"kind": {"enum": ["acme.job", "heartbeat"]}}, "required": ["kind"]}, "#/properties/kind"),
    ],
)
def test_a_root_that_is_not_the_kinds_is_refused(changes: dict[str, Any], place: str):
    """The root says which draft, is one closed object, and names its own kind and no other."""
    assert refusal(schema_with(TEXT) | changes).startswith(f"kind schema {FILE}, at {place}: ")


@pytest.mark.parametrize("schema", [True, [], None, "x", 1, {"const": "acme.job"}])
def test_a_root_that_is_no_object_schema_is_refused(schema: object):
    """Data is an object, so its schema is one of an object."""
    assert refusal(schema).startswith(f"kind schema {FILE}, at #: ")


@pytest.mark.parametrize(
    "definitions",
    [
        {"a": {"$ref": "#/$defs/a"}},
        {"a": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}},
        {"a": TEXT, "b": {"anyOf": [{"$ref": "#/$defs/b"}]}},
    ],
)
def test_a_cycle_is_refused(definitions: dict[str, Any]):
    """A reference that leads back to itself would bound no depth, used or not."""
    assert "leads back" in refusal(schema_with({"$ref": "#/$defs/a"}, **{"$defs": definitions}))


def test_unfolding_is_bounded():
    """Definitions that each name the next one twice are not followed 2^12 times."""
    definitions: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(12)
    }
    definitions["d12"] = TEXT
    assert "more than 1000 subschemas" in refusal(schema_with({"$ref": "#/$defs/d0"}, **{"$defs": definitions}))


@pytest.mark.parametrize("levels", [31, 400, 5000])
def test_depth_is_bounded(levels: int):
    """32 subschemas within each other are taken, the root among them; no depth is an error of another kind."""
    raw = json.dumps(schema_with("deep")).encode()
    assert list(read(raw.replace(b'"deep"', nested(30)))) == ["acme.job"]
    message = refusal(raw.replace(b'"deep"', nested(levels)))
    assert message.endswith(("more than 32 subschemas within each other", "nested too deep"))


def test_depth_is_bounded_along_references():
    """A chain of definitions is as deep as it is long."""
    definitions: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(40)} | {"d40": TEXT}
    assert "within each other" in refusal(schema_with({"$ref": "#/$defs/d0"}, **{"$defs": definitions}))


def nested(levels: int) -> bytes:
    """A string behind so many levels of anyOf."""
    return b'{"anyOf":[' * levels + json.dumps(TEXT).encode() + b"]}" * levels


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b"", "not a JSON"),
        (b"{", "not a JSON"),
        (b"{} {}", "not a JSON"),
        (b"\xef\xbb\xbf{}", "not a JSON"),
        (b'{"title":"\xff"}', "not a JSON"),
        (b'{"title":"\\ud800"}', "not a JSON"),
        (b'{"title":' + b"[" * 60_000, "not a JSON"),
        (b'{"maximum":' + b"1" * 5000 + b"}", "not a JSON"),
        (b'{"type":"object","type":"object"}', 'repeats the member "type"'),
        (b'{"properties":{"a\\n":{},"a\\n":{}}}', 'repeats the member "a\\n"'),
        (b'{"maximum":NaN}', "without a type"),
        (b" " * (MAX_SCHEMA_BYTES + 1), "longer than 65536 bytes"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_json_document_is_refused(raw: bytes, rule: str):
    """Not JSON, not UTF-8, repeated members, more than the bound: the file is named."""
    message = refusal(raw)
    assert message.startswith(f"kind schema {FILE}, at #")
    assert rule in message


# -- closed ones, and what data they take

CLOSED: list[tuple[object, list[object], list[object]]] = [
    (TEXT, ["", "a" * 8, "\u00e9\u2028", "\U0001f600" * 8, '\x00\x1f\x7f"\\/'], ["a" * 9, 1, None, True, [], {}]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\U0001f600" * 3], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["a", "z" * 3000], ["", "a\n", "\na", "A", "a b"]),
    ({"type": "string", "pattern": "^(a+)+$"}, ["a" * 3000], ["a" * 3000 + "b"]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx", "xb\n"]),
    ({"type": "string", "pattern": r"^\d\w\S$"}, ["1a!"], ["\u0661a!", "1\u00e9!", "1a\u00a0"]),
    ({"type": "string", "pattern": UUID_PATTERN}, [UUID_TEXT], [UUID_TEXT.upper(), UUID_TEXT + "\n"]),
    (COUNT, [0, 9], [-1, 10, 2**53, 2**64, 10**30, "1", True, None]),
    ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, [-(2**53) + 1, 2**53 - 1], [-(2**53), 2**53]),
    ({"type": "boolean"}, [True, False], [0, 1, "true", None]),
    ({"const": 1}, [1], [True, 2, "1"]),
    ({"enum": ["a", 1, True]}, ["a", 1, True], [False, 0, "b"]),
    ({"type": "integer", "enum": [0, 1]}, [0, 1], [False, True, 2]),
    (EMPTY, [{}], [{"y": 1}, [], None]),
    (
        EMPTY | {"properties": {"y": COUNT, "@z": TEXT}, "required": ["y"]},
        [{"y": 1}, {"y": 1, "@z": ""}],
        [{}, {"@z": ""}],
    ),
    (
        {"type": "array", "maxItems": 2, "minItems": 1, "uniqueItems": True, "items": COUNT},
        [[1], [1, 2]],
        [[], [1, 2, 3], [1, 1], [-1], 1],
    ),
    ({"anyOf": [TEXT, COUNT], "title": "either"}, ["a", 1], [True, 10]),
    ({"oneOf": [COUNT, {"const": 3}, {"const": 12}]}, [1, 12], [3, 11]),
    ({"$ref": "#/$defs/word", "description": "elsewhere"}, ["word"], ["", "Word"]),
]  # fmt: skip
DEFINITIONS = {"word": {"type": "string", "pattern": "^[a-z]{1,9}$"}}


@pytest.mark.parametrize(("subschema", "good", "bad"), CLOSED, ids=range(len(CLOSED)))
def test_a_closed_schema_takes_what_it_says(subschema: object, good: list[object], bad: list[object]):
    """Each form takes the values inside of its bounds and refuses those beyond them; nothing reads the `$id`."""
    kinds = read(schema_with(subschema, **{"$id": "http://[", "$defs": DEFINITIONS}))
    assert [x for x in good if not is_taken(rfc8785(payload_of(x)), kinds)] == []
    assert [x for x in bad if is_taken(rfc8785(payload_of(x)), kinds)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?!a)", "(?<=a)a", "(?i)a", "(?m)^a$", "(?x) a", "(?<n>a)", "(?P<n>a)", r"(a)\1", r"\ba", r"\Aa",
        r"a\Z", r"\p{L}", r"\x41", r"\u0041", r"\n", "a++", "a*?", "a{2}{3}", "a{,3}", "{", "}", "]", "[]", "[^]", "[",
        "(", ")", "*", "[[:alpha:]]", "[a&&b]", "[a--b]", "[a~~b]", "[a[b]]", "\u00e9", "[\u00e0-\u00ff]", "a\n",
        "[z-a]", "a{3,1}", "a{9999}{9999}", "(((a{1000}){1000}){1000})",
    ],
)  # fmt: skip
def test_a_pattern_of_one_dialect_is_refused(pattern: str):
    """What other engines read otherwise, what needs backtracking, what is no pattern, what is too great."""
    message = refusal(schema_with({"type": "string", "pattern": pattern}))
    assert message.startswith(f"kind schema {FILE}, at #/properties/x/pattern: ")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^[a-z0-9._-]+$", "a.b_c-1", "a/b"),
        (r"^[\w.-]+(?:/[^/&~-]+){0,3}$", "a/b c/d", "a/b&"),
        (r"^(a|bc)?\.\$\{x\}\[\]\(\)\|\*\+\?\^\\\/$", r"bc.${x}[]()|*+?^\/", "bc"),
        (r"^[\]\[\\^$.|?*+(){}-]$", "]", "a"),
        (r"^[a&b~c-]$", "&", "d"),
        (r"^ {2}#-,=$", "  #-,=", "#"),
        ("", "anything", None),
    ],
)
def test_a_pattern_of_all_dialects_is_taken(pattern: str, good: str, bad: str | None):
    """Classes, groups, escapes and quantifiers mean what they mean everywhere; Python's engine says the same."""
    kinds = read(schema_with({"type": "string", "pattern": pattern}))
    for text in (good, bad or ""):
        assert is_taken(rfc8785(payload_of(text)), kinds) is bool(re.search(pattern, text))
    assert re.search(pattern, good)
    assert bad is None or not re.search(pattern, bad)

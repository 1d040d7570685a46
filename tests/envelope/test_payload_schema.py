"""The published schema against the code that validates."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError, validators
from wire_samples import DIGEST, UUID_TEXT, canonical, payloads, sample

from postseal.envelope import v1
from postseal.envelope.schema import payload_schema
from postseal.errors import Refused


def ecma_pattern(_validator: Any, pattern: str, instance: object, _schema: Any) -> Iterator[ValidationError]:
    """Read a pattern as JSON Schema means it: in Python's own reading `$` lets a newline follow."""
    if isinstance(instance, str) and not re.search(pattern.replace("$", r"\Z"), instance):
        yield ValidationError("does not match")


SCHEMA = json.loads(payload_schema())
VALIDATOR = cast("Any", validators).extend(Draft202012Validator, {"pattern": ecma_pattern})(SCHEMA)


def code_takes(payload: dict[str, Any]) -> bool:
    """Whether one direction of the code opens the payload's canonical form."""
    raw = canonical(payload)
    for read in (v1.open_payload, v1.open_delivery):
        try:
            read(raw)
        except Refused:
            continue
        return True
    return False


def places(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every member, nested ones too."""
    if isinstance(value, dict):
        for name, inner in cast("dict[str, object]", value).items():
            yield (*path, name)
            yield from places(inner, (*path, name))


# No floats with an integer's value: to a schema 1.0 is 1, and canonical form is what refuses it.
OTHER_VALUES: list[object] = [
    None, True, False, 0, 1, -1, 7, 100, 101, 10**6, 10**6 + 1, 10**7, 10**7 + 1, 2**31 - 1, 2**31, 2**40,
    2**40 + 1, 2**53 - 1, 2**53, 4_102_444_800_000, 4_102_444_800_001, 1.5, "", "a", "A", "a\n", "a" * 8,
    "a" * 8 + "\n", "a" * 63, "a" * 64, "a" * 128, "a" * 129, "-a", "\u00e9", UUID_TEXT, UUID_TEXT.upper(),
    UUID_TEXT + "\n", UUID_TEXT.replace("-", ""), DIGEST, DIGEST.upper(), DIGEST + "\n", "failed", "rejected",
    "heartbeat", "proposal", "controlplane/v1", [], {}, ["a"], {"kind": "heartbeat"},
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid payload of either direction with one to three members removed, replaced or added."""
    payload = copy.deepcopy(draw(payloads(audience=draw(st.booleans()))))
    for _ in range(draw(st.integers(1, 3))):
        *parents, name = draw(st.sampled_from(list(places(payload)) or [("data",)]))
        place = payload
        for parent in parents:
            place = place[parent]
        match draw(st.sampled_from(["remove", "replace", "add", "nudge"])):
            case "remove":
                place.pop(name, None)
            case "add":
                place[draw(st.sampled_from(["extra", "audience", "kind", "errorCode"]))] = "failed"
            case "nudge" if type(place.get(name)) is int:
                place[name] += draw(st.sampled_from([-1, 1]))
            case _:
                place[name] = draw(st.sampled_from(OTHER_VALUES))
    return payload


def test_schema_is_a_2020_12_schema():
    """The document says which draft it follows and is valid under it."""
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(SCHEMA)


@settings(deadline=None)  # a busy machine is no failure
@given(payloads(audience=False) | payloads(audience=True))
def test_schema_and_code_take_every_valid_payload(payload: dict[str, Any]):
    """All kinds, both directions, optional members there or not: both say yes."""
    assert VALIDATOR.is_valid(payload)
    assert code_takes(payload)


@settings(max_examples=200, deadline=None)  # a busy machine is no failure
@given(mutated())
def test_schema_and_code_agree(payload: dict[str, Any]):
    """On payloads around the edge of validity both say the same."""
    assert VALIDATOR.is_valid(payload) is code_takes(payload)


@pytest.mark.parametrize("path", list(places(sample())))
@pytest.mark.parametrize("value", OTHER_VALUES, ids=lambda value: repr(value)[:24])
def test_schema_and_code_agree_on_every_member(path: tuple[str, ...], value: object):
    """Each member of a heartbeat set to each odd value: both say the same."""
    payload = sample()
    *parents, name = path
    place = payload
    for parent in parents:
        place = place[parent]
    place[name] = value
    assert VALIDATOR.is_valid(payload) is code_takes(payload)


def objects(schema: object) -> Iterator[dict[str, Any]]:
    """Every schema of an object in the document."""
    if isinstance(schema, dict):
        found = cast("dict[str, Any]", schema)
        if found.get("type") == "object":
            yield found
        for inner in found.values():
            yield from objects(inner)


def test_every_object_is_closed():
    """No object of the schema takes a member that it does not name."""
    assert len(list(objects(SCHEMA))) == 7
    assert all(found["additionalProperties"] is False for found in objects(SCHEMA))

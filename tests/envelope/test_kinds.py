"""Kinds of a deployment: their names, the payloads of them, and the published schema."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError, validators
from kind_samples import DIALECT, TEXT, UUID_PATTERN, is_taken, read, refusal, rfc8785, schema_with
from wire_samples import DIGEST, UUID_TEXT, canonical, sample

from postseal.envelope import closed_schema, v1
from postseal.envelope.kinds import MAX_KINDS, read_kinds
from postseal.envelope.schema import payload_schema
from postseal.errors import Refused, StartupError
from postseal.kinds_folder import compile_schema, load_kinds
from postseal.outcomes import Reason

PAGE = (Path(__file__).parents[2] / "docs" / "kinds.md").read_text("utf-8")

# -- their names


@pytest.mark.parametrize(
    "name",
    [
        "heartbeat", "job", "acme.", ".job", "acme..job", "Acme.job", "acme.Job", "acme.job.", "acme job.x",
        "acme.-job", "acme.j\u00f6b", "a" * 62 + ".b", "acme.job\n", "acme/job.x",
    ],
)  # fmt: skip
def test_a_name_that_is_no_kind_is_refused(name: str):
    """No dot, no letters, capitals, too long: not <vendor>.<kind>, so no built-in kind can be taken over."""
    assert "not named <vendor>.<kind>.json" in refusal(schema_with(TEXT), f"{name}.json")
    assert "not named <vendor>.<kind>.json" in refusal(schema_with(TEXT), name)


@pytest.mark.parametrize("name", ["a.b", "acme.door-opened_2", "com.example.job", "4x.0", "a" * 61 + ".b"])
def test_a_name_of_a_kind_is_taken(name: str):
    """Two parts or more, 63 characters at most."""
    schema = schema_with(TEXT, properties={"kind": {"enum": [name]}, "x": TEXT})
    assert list(read(schema, f"{name}.json")) == [name]


# -- the same as another validator, on data around the edge of validity

TASK: dict[str, Any] = {
    "$schema": DIALECT,
    "type": "object",
    "additionalProperties": False,
    "required": ["kind", "taskId", "attempt", "status", "progress"],
    "properties": {
        "kind": {"const": "acme.task"},
        "taskId": {"type": "string", "pattern": UUID_PATTERN},
        "attempt": {"type": "integer", "minimum": 1, "maximum": 10**6},
        "status": {"enum": ["queued", "running", "failed"]},
        "progress": {"type": "integer", "minimum": 0, "maximum": 100},
        "digest": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
        "note": {"type": "string", "maxLength": 40},
    },
}
TREE: dict[str, Any] = {
    "$schema": DIALECT,
    "type": "object",
    "additionalProperties": False,
    "required": ["kind", "root"],
    "properties": {"kind": {"type": "string", "const": "acme.tree"}, "root": {"$ref": "#/$defs/branch"}},
    "$defs": {
        "leaf": {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": -5, "maximum": 5}, {"enum": ["", 3]}]},
        "branch": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "leaves": {"type": "array", "maxItems": 3, "uniqueItems": True, "items": {"$ref": "#/$defs/leaf"}},
                "label": {"anyOf": [{"type": "string", "maxLength": 2}, {"$ref": "#/$defs/leaf"}]},
            },
        },
    },
}
SCHEMAS = {"acme.task": TASK, "acme.tree": TREE}
KINDS = read_kinds({f"{name}.json": json.dumps(schema).encode() for name, schema in SCHEMAS.items()}, compile_schema)


def ecma_pattern(_validator: Any, pattern: str, instance: object, _schema: Any) -> Iterator[ValidationError]:
    """Read a pattern as JSON Schema means it: in Python's own reading `$` lets a newline follow."""
    if isinstance(instance, str) and not re.search(pattern.replace("$", r"\Z"), instance):
        yield ValidationError("does not match")


OtherValidator = cast("Any", validators).extend(Draft202012Validator, {"pattern": ecma_pattern})
OTHERS = {name: OtherValidator(schema) for name, schema in SCHEMAS.items()}
PUBLISHED = OtherValidator(json.loads(payload_schema(KINDS)))

TEXTS = st.text(max_size=45) | st.sampled_from(["", "a\n", UUID_TEXT, UUID_TEXT + "\n", DIGEST, "queued", "\x7f\u2028"])
INTEGERS = st.integers(-7, 101) | st.sampled_from([10**6, 2**53 - 1, 2**53, -(2**63), 2**70])
NAMES = st.sampled_from(["leaves", "label", "y"])
ODD = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
LEAVES = st.booleans() | st.integers(-6, 6) | st.sampled_from(["", "ab"])
BRANCHES = st.fixed_dictionaries({}, optional={"leaves": st.lists(LEAVES, max_size=4), "label": LEAVES})


@st.composite
def data(draw: st.DrawFn) -> dict[str, Any]:
    """Data of one of the two kinds, mostly valid, with up to two members replaced, removed or added."""
    if draw(st.booleans()):
        found: dict[str, Any] = {"kind": "acme.tree", "root": draw(BRANCHES)}
    else:
        found = {"kind": "acme.task", "taskId": draw(st.uuids().map(str)), "attempt": draw(st.integers(1, 10**6))}
        found |= {"status": draw(st.sampled_from(["queued", "failed"])), "progress": draw(st.integers(0, 100))}
        found |= draw(st.fixed_dictionaries({}, optional={"digest": st.just(DIGEST), "note": st.text(max_size=42)}))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*found, "extra"]))
        if name == "kind":
            continue
        if draw(st.booleans()):
            found[name] = draw(ODD)
        else:
            found.pop(name, None)
    return found


@settings(max_examples=600)
@given(data())
def test_two_validators_agree(data: dict[str, Any]):
    """What opens is exactly what python-jsonschema finds valid, free text of any kind included."""
    raw = rfc8785(sample() | {"data": data})
    assert is_taken(raw, KINDS) is OTHERS[data["kind"]].is_valid(data)


@given(st.text(max_size=40))
def test_text_has_one_form(text: str):
    """Free text opens in RFC 8785's form and in no other: escapes where they must be, and nowhere else."""
    payload = sample() | {"data": task() | {"note": text}}
    raw = rfc8785(payload)
    assert is_taken(raw, KINDS)
    escaped = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
    assert is_taken(escaped, KINDS) is (escaped == raw)


# -- the payload around the data


def task() -> dict[str, Any]:
    """Valid data of acme.task."""
    return {"kind": "acme.task", "taskId": UUID_TEXT, "attempt": 1, "status": "queued", "progress": 5, "note": "a"}


CANONICAL = canonical(sample() | {"data": task()})


def test_the_canonical_form_opens():
    """The data comes back as it was; built-in kinds are read beside it as ever."""
    opened = v1.open_payload(CANONICAL, KINDS)
    assert isinstance(opened, v1.DeploymentPayload)
    assert opened.data == task()
    assert isinstance(v1.open_payload(canonical(sample()), KINDS), v1.Payload)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"progress":5', b'"progress":5.0'),
        (b'"progress":5', b'"progress":5e0'),
        (b'"progress":5', b'"progress":1e1'),
        (b'"progress":5', b'"progress":5.5'),
        (b'"progress":5', b'"progress":1e999'),
        (b'"progress":5', b'"progress":-0'),
        (b'"progress":5', b'"progress":-0.0'),
        (b'"progress":5', b'"progress": 5'),
        (b'"progress":5', b'"progress":5,"progress":5'),
        (b'"progress":5', b'"progress":6,"progress":5'),
        (b'"progress":5', b'"progress":null,"progress":5'),
        (b'"progress":5', b'"progress":5,"x":1.5'),
        (b'"progress":5', b'"progress":5,"\xc3\xa9":1'),
        (b'"progress":5', b'"progress":' + b"1" * 3000),
        (b'"progress":5', b'"progress":' + b"[" * 900 + b"]" * 900),
        (b'"progress"', b'"\\u0070rogress"'),
        (b'"note":"a"', b'"note":"\\u0061"'),
        (b'"note":"a"', b'"note":"\\/"'),
        (b'"note":"a"', b'"note":"\\u00e9"'),
        (b'"note":"a"', b'"note":"\\ud83d\\ude00"'),
        (b'"note":"a"', b'"note":"\\u001F"'),
        (b'"note":"a"', b'"note":"\\u000a"'),
        (b'"kind":"acme.task"', b'"kind":"acme.task","kind":"acme.task"'),
        (b'"kind":"acme.task"', b'"kind":"acme.other"'),
        (b'"kind":"acme.task"', b'"kind":"task"'),
        (b'"kind":"acme.task"', b'"kind":["acme.task"]'),
        (b'"kind":"acme.task"', b'"kind":{}'),
        (b'"kind":"acme.task"', b'"kind":null'),
        (b'"kind":"acme.task",', b""),
        (b'{"data"', b' {"data"'),
        (b'{"data"', b'{"data":{},"data"'),
        (b'{"data"', b'{"more":1,"data"'),
        (b'"sequence":1', b'"sequence":1.0'),
        (b'"tenant":"acme"', b'"tenant":"Acme"'),
        (b'"tenant":"acme"', b'"tenant":"acme","x":1'),
        (b'"producer"', b'"audience":"a","producer"'),
        (b'"eventId":"0190d3a4', b'"eventId":"0190D3A4'),
        (b'"idempotencyKey":"heartbeat:1"', b'"idempotencyKey":"short"'),
        (b'"issuedAtMs":1767225600000', b'"issuedAtMs":-1'),
    ],
)  # fmt: skip
def test_every_other_spelling_is_payload_invalid(old: bytes, new: bytes):
    """Floats, other spellings, unknown kinds, and faults around the data: all `payload_invalid`."""
    raw = CANONICAL.replace(old, new)
    assert raw != CANONICAL
    assert not is_taken(raw, KINDS)


def test_another_kind_inside_the_data_hides_nothing():
    """A member called kind within the data, before the data's own or behind it, is a member like any other."""
    inner = {"type": "object", "additionalProperties": False, "properties": {"kind": TEXT}}
    schema = schema_with(inner, properties={"about": inner, "kind": {"const": "acme.nested"}, "x": inner})
    kinds = read(schema, "acme.nested.json")
    data = {"about": {"kind": "proposal"}, "kind": "acme.nested", "x": {"kind": "acme.x"}}
    assert is_taken(canonical(sample() | {"data": data}), kinds)
    assert not is_taken(canonical(sample() | {"data": data | {"x": {"kind": 1}}}), kinds)


def test_half_a_surrogate_pair_is_no_json():
    """As in every payload: step 2's reading refuses it."""
    with pytest.raises(Refused, match=Reason.ENVELOPE_MALFORMED):
        v1.open_payload(CANONICAL.replace(b'"note":"a"', b'"note":"\\ud800"'), KINDS)


@pytest.mark.parametrize("old", [b'"controlplane/v1"', b'"schemaVersion":1'])
def test_another_version_is_told_first(old: bytes):
    """Protocol and schemaVersion decide before anything of the data."""
    raw = CANONICAL.replace(old, old[:-1] + (b"2" if old.endswith(b"1") else b'0"')).replace(b'"queued"', b'"q"')
    with pytest.raises(Refused, match=Reason.SCHEMA_VERSION_UNSUPPORTED):
        v1.open_payload(raw, KINDS)


def test_without_the_kinds_it_is_payload_invalid():
    """A deployment that did not add the kind does not take it."""
    assert not is_taken(CANONICAL, {})


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"progress": 101}, "$.data.progress"),
        ({"s3cret": 1}, "$.data"),
        ({"note": "s3cret" * 9}, "$.data.note"),
        ({"kind": "acme.tree"}, "$.data"),
        ({"progress": json.loads("[" * 300 + "]" * 300)}, "$.data"),
    ],
)
def test_a_refusal_says_where_and_quotes_nothing(changes: dict[str, Any], place: str):
    """Names of the schema and positions, never a value or an unknown name."""
    with pytest.raises(Refused) as caught:
        v1.open_payload(canonical(sample() | {"data": task() | changes}), KINDS)
    assert caught.value.detail == f"{place} breaks its rule"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_both_directions():
    """What the control plane sends has an audience, and the same kinds."""
    payload = sample() | {"data": task()}
    payload["route"]["audience"] = "device-01"
    opened = v1.open_delivery(canonical(payload), KINDS)
    assert opened.route.audience == "device-01"
    assert v1.encode_payload(opened, KINDS) == canonical(payload)
    with pytest.raises(Refused, match="audience"):
        v1.open_payload(canonical(payload), KINDS)


@pytest.mark.parametrize("value", [5.0, 101, None, "5"])
def test_encode_payload_holds_the_schema(value: object):
    """A payload built in Python that breaks its schema, or has a float, is a ValueError before it is signed."""
    opened = v1.open_payload(CANONICAL, KINDS)
    assert isinstance(opened, v1.DeploymentPayload)
    opened.data["progress"] = value
    with pytest.raises(ValueError, match="breaks its rule"):
        v1.encode_payload(opened, KINDS)


# -- the published schema


def test_the_published_schema_has_the_kinds():
    """Valid 2020-12, closed like the built-in part, references of a kind its own; nothing added where no kind is."""
    published = json.loads(payload_schema(KINDS))
    Draft202012Validator.check_schema(published)
    assert payload_schema({}) == payload_schema()
    others = [PUBLISHED, jsonschema_rs.Draft202012Validator(published)]
    tree = {"kind": "acme.tree", "root": {"label": "ab", "leaves": [True, 1]}}
    for validator in others:
        assert validator.is_valid(sample())
        assert validator.is_valid(sample() | {"data": task()})
        assert validator.is_valid(sample() | {"data": tree})
        assert not validator.is_valid(sample() | {"data": tree | {"root": {"label": "abc"}}})
        assert not validator.is_valid(sample() | {"data": task() | {"kind": "acme.other"}})


@settings(max_examples=200)
@given(data())
def test_the_published_schema_and_the_code_agree(data: dict[str, Any]):
    """Both say the same of data around the edge of validity."""
    payload = sample() | {"data": data}
    assert PUBLISHED.is_valid(payload) is is_taken(rfc8785(payload), KINDS)


# -- the folder


def test_the_folder_is_read(tmp_path: Path):
    """Each file is a kind, also behind a link; hidden ones are left alone."""
    for name, schema in SCHEMAS.items():
        (tmp_path / f".{name}").write_text(json.dumps(schema))
        (tmp_path / f"{name}.json").symlink_to(f".{name}")
    assert set(load_kinds(tmp_path)) == set(SCHEMAS)


@pytest.mark.parametrize("name", ["README.md", "acme.job.jsn", "acme.job.json~", "job.json", "two\nlines"])
def test_another_file_in_the_folder_is_refused(tmp_path: Path, name: str):
    """A misspelt name stops the start, since devices would otherwise be refused without a word."""
    (tmp_path / name).write_text(json.dumps(schema_with(TEXT)))
    with pytest.raises(StartupError, match="is not named") as caught:
        load_kinds(tmp_path)
    assert str(caught.value).isprintable()


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path):
    """An absent folder, or a folder in the place of a file, is one line with its path."""
    with pytest.raises(StartupError, match=r"cannot read .*absent"):
        load_kinds(tmp_path / "absent")
    (tmp_path / "acme.job.json").mkdir()
    with pytest.raises(StartupError, match=r"cannot read .*acme\.job\.json"):
        load_kinds(tmp_path)


def test_the_number_of_files_is_bounded(tmp_path: Path):
    """100 kinds are taken and one more is not."""
    for number in range(MAX_KINDS):
        name = f"acme.k{number}"
        schema = schema_with(TEXT, properties={"kind": {"const": name}, "x": TEXT})
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    assert len(load_kinds(tmp_path)) == MAX_KINDS
    (tmp_path / "acme.more.json").write_text("{}")
    with pytest.raises(StartupError, match="more than 100"):
        load_kinds(tmp_path)


# -- the page


def test_the_page_names_every_keyword():
    """The table of forms, and the keywords beside it, are those of the code: none less, none more."""
    rows = re.findall(r"^\| `([^`]+)` \| ((?:`[^`]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert {form: set(re.findall("`([^`]+)`", words)) for form, words in rows} == {
        form: set(keywords) for form, keywords in closed_schema.KEYWORDS.items()
    }
    [sentence] = re.findall(r"^(`title`[^;]*); ([^(]*)\(", PAGE, re.MULTILINE)
    assert [set(re.findall("`([^`]+)`", part)) for part in sentence] == [
        set(closed_schema.ANNOTATIONS),
        set(closed_schema.AT_THE_ROOT),
    ]


def test_the_example_of_the_page():
    """The schema is closed; a minimal payload of it opens; the message shown is the one that is given."""
    [(name, text)] = re.findall(r"<!-- example: (\S+) -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    schema = json.loads(text)
    kinds = read(schema, f"{name}.json")
    found = {"kind": name, "door": "north-1", "by": "badge", "openedForMs": 5}
    assert is_taken(canonical(sample() | {"data": found}), kinds)
    assert is_taken(canonical(sample() | {"data": found | {"passedBefore": ["south-2"]}}), kinds)
    assert not is_taken(canonical(sample() | {"data": found | {"door": "north"}}), kinds)
    schema["properties"]["by"] = {"type": "string"}
    assert refusal(schema, f"{name}.json") in PAGE

"""Any JSON anywhere in an event or in the envelope around it: what opens is what was sealed, or it is refused."""

import copy
import functools
import json
import operator
from datetime import timedelta
from typing import Any, cast

import harnesses
import pytest
from every_kind import DATA, event
from hypothesis import given, settings
from hypothesis import strategies as st
from independent import is_event, rfc8785

from postseal.envelope import dsse, ed25519
from postseal.errors import Refused

SEED = bytes(range(32))
PUBLIC = ed25519.public_key(SEED)
A_HANG = timedelta(seconds=10)
"""No input of these sizes comes near it, on a busy machine either."""

NAMES = st.sampled_from(["kind", "tenant", "sequence", "note", "x", "a.b", "", "\u00e9", "__proto__"]) | st.text(
    max_size=4
)
WORDS = st.sampled_from(["heartbeat", "acme.job", "controlplane/v1", "acme\n", "\x7f\u2028\ufeff", "\U0001f600"])
STRINGS = (st.text(max_size=12) | WORDS | NAMES).flatmap(
    lambda text: st.sampled_from([json.dumps(text, ensure_ascii=False), json.dumps(text)])
)
GREAT = ["9007199254740991", "9007199254740992", "-9007199254740992", "18446744073709551616", "9" * 400]
SPELLINGS = ["0", "1", "-0", "1.0", "1e0", "1E+2", "01", "+1", ".5", "1.", "1e999", "1e-999", "0x1", "1_0", *GREAT]
NUMBERS = st.integers().map(str) | st.floats().map(json.dumps) | st.sampled_from(SPELLINGS)
ODD = st.sampled_from(
    ['"\\ud800"', '"\\u00E9"', '"\\/"', '"\x01"', "[" * 600, '{"a":' * 600 + "1" + "}" * 600, "", " 1", "tru"]
)
SCALARS = st.sampled_from(["null", "true", "false"]) | NUMBERS | STRINGS | ODD
SPACE = st.sampled_from(["", "", "", " ", "\n"])


def arrays(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON texts of arrays."""
    return st.tuples(SPACE, st.lists(inner, max_size=4)).map(lambda drawn: f"[{drawn[0]}{','.join(drawn[1])}]")


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON texts of objects, whose members may be repeated and in any order."""
    drawn_members = st.lists(st.tuples(STRINGS, SPACE, inner).map(":".join), max_size=4)
    return drawn_members.map(lambda drawn: "{" + ",".join(drawn).replace("::", ":") + "}")


ANY_JSON = st.recursive(SCALARS, lambda inner: arrays(inner) | objects(inner), max_leaves=8)
"""JSON texts, most of them valid, in every spelling."""
HERE = "\x10here\x10"
"""Stands where the drawn text goes."""


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value within a value."""
    return [path, *(place for name, inner in members(value) for place in places(inner, (*path, name)))]


def members(value: object) -> list[tuple[Any, Any]]:
    """What is in a value, by name or number."""
    if isinstance(value, dict):
        return list(cast("dict[Any, Any]", value).items())
    return list(enumerate(cast("list[Any]", value))) if isinstance(value, list) else []


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """What stands at a place."""
    return functools.reduce(operator.getitem, path, value)


def changed(value: Any, path: tuple[Any, ...], name: str | None) -> Any:
    """A value with HERE at a place in it or, where that is an object, at a further member of the place."""
    if path:
        first, *rest = path
        other = copy.copy(value)
        other[first] = changed(value[first], tuple(rest), name)
        return other
    found = dict(members(value))
    return HERE if name is None or not isinstance(value, dict) else found | {name: HERE}


def respelled(value: Any, name: object) -> list[str]:
    """Other JSON texts for a value that is a member or an item `name`, all of which a lenient reader reads as it."""
    text, reverse = json.dumps(value, ensure_ascii=False), dict(reversed(members(value)))
    texts = [text, f" {text}", json.dumps(value, indent=1), f"null,{json.dumps(name)}:{text}"]
    if isinstance(value, str):
        texts.append('"' + "".join(f"\\u{ord(character):04X}" for character in value) + '"')
    elif type(value) is int:
        texts += [f"{value}.0", f"{value}e0", f"{value}0e-1"]
    elif isinstance(value, dict):
        texts.append(json.dumps(reverse, separators=(",", ":"), ensure_ascii=False))
    return texts


@st.composite
def with_any_json(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> bytes:
    """The canonical text of a value with one place in it changed: any JSON there, or beside it, or another spelling."""
    value = draw(values)
    path = draw(st.sampled_from(places(value)))
    if draw(st.booleans()):
        further, there = draw(st.none() | NAMES.filter(str.isascii)), draw(ANY_JSON)
    else:
        further, there = None, draw(st.sampled_from(respelled(at(value, path), path[-1] if path else None)))
    text = rfc8785(changed(value, path, further)).decode()
    return text.replace(rfc8785(HERE).decode(), there).encode("utf-8", "surrogatepass")


EVENTS = st.sampled_from(list(DATA)).map(event)
SENT = EVENTS.map(lambda found: found | {"route": found["route"] | {"audience": "device-01"}})
ANY_EVENT = with_any_json(EVENTS | SENT)


def envelope_of(payload: bytes) -> dsse.Envelope:
    """The payload sealed, sent and taken in."""
    sealed = dsse.seal(payload, SEED)
    envelope = dsse.unwrap(dsse.wrap(sealed.payload, sealed.keyid, sealed.signature))
    assert envelope == sealed
    assert ed25519.verify(PUBLIC, envelope.signed_bytes, envelope.signature)
    return envelope


@settings(max_examples=250, deadline=A_HANG)
@given(ANY_EVENT.filter(lambda raw: 1 <= len(raw) <= dsse.MAX_PAYLOAD_BYTES))
def test_any_json_anywhere_in_an_event(raw: bytes):
    """It opens, to these very bytes, exactly if it is an event; else it is refused for the reason of its step."""
    envelope = envelope_of(raw)
    assert envelope.payload == raw
    harnesses.payload(envelope.payload)


@settings(max_examples=100, deadline=A_HANG)
@given(ANY_JSON.map(str.encode).filter(lambda raw: 1 <= len(raw) <= dsse.MAX_PAYLOAD_BYTES))
def test_any_json_as_the_payload(raw: bytes):
    """What is signed is given back whatever it is, and is no event."""
    harnesses.payload(envelope_of(raw).payload)
    assert not is_event(raw)


def outer(kind: str) -> Any:
    """An envelope as JSON."""
    sealed = dsse.seal(rfc8785(event(kind)), SEED)
    return json.loads(dsse.wrap(sealed.payload, sealed.keyid, sealed.signature))


OUTERS = {kind: outer(kind) for kind in DATA}


@settings(max_examples=200, deadline=A_HANG)
@given(with_any_json(st.sampled_from(list(OUTERS.values()))))
def test_any_json_anywhere_in_the_envelope(raw: bytes):
    """A body is read as another library reads it, or is malformed; no third thing."""
    harnesses.body(raw)


@settings(max_examples=100, deadline=A_HANG)
@given(
    st.sampled_from(list(OUTERS)), st.permutations(["payload", "payloadType", "signatures"]), st.booleans(), st.data()
)
def test_what_is_free_in_the_envelope_is_free(kind: str, order: list[str], reverse: bool, data: st.DataObject):
    """Any order and any white space between tokens is the same envelope, to us and to another library."""
    [signature] = OUTERS[kind]["signatures"]
    signature = dict(sorted(signature.items(), reverse=reverse))
    found = {name: [signature] if name == "signatures" else OUTERS[kind][name] for name in order}
    space = st.text(" \t\r\n", max_size=3)
    raw = json.dumps(found, separators=(f"{data.draw(space)},{data.draw(space)}", f"{data.draw(space)}:"))
    raw = data.draw(space) + raw.replace("[", f"[{data.draw(space)}").replace("}", data.draw(space) + "}")
    assert dsse.unwrap(raw.encode()).payload == rfc8785(event(kind))
    harnesses.body(raw.encode())


@pytest.mark.parametrize("kind", DATA)
def test_each_kind_opens_and_no_cut_of_it(kind: str):
    """The events that the others start from are events; without its end, none of them is."""
    raw = rfc8785(event(kind))
    assert is_event(raw)
    harnesses.payload(raw)
    for length in range(1, len(raw)):
        harnesses.payload(raw[:length])
    with pytest.raises(Refused):
        dsse.unwrap(raw)


@pytest.mark.parametrize("kind", DATA)
def test_no_other_spelling_of_any_member(kind: str):
    """Whatever a lenient reader would read as the same event is another text, and refused."""
    value = event(kind)
    canonical = rfc8785(value)
    for path in places(value):
        text = rfc8785(changed(value, path, None)).decode()
        for there in respelled(at(value, path), path[-1] if path else None):
            raw = text.replace(rfc8785(HERE).decode(), there).encode()
            harnesses.payload(raw)
            assert is_event(raw) is (raw == canonical)


@pytest.mark.soak
@settings(max_examples=5000, deadline=A_HANG)
@given(ANY_EVENT.filter(lambda raw: 1 <= len(raw) <= dsse.MAX_PAYLOAD_BYTES))
def test_much_more_json_anywhere_in_an_event(raw: bytes):
    """The same as above, for minutes."""
    harnesses.payload(envelope_of(raw).payload)

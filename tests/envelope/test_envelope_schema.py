"""The published schema of the outer envelope against the code that reads it."""

import base64
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from postseal.envelope import dsse
from postseal.envelope.schema import envelope_schema
from postseal.errors import Refused

SCHEMA = json.loads(envelope_schema())
SEALED = dsse.seal(b"{}", bytes(range(32)))
GOOD: dict[str, Any] = json.loads(dsse.wrap(SEALED.payload, SEALED.keyid, SEALED.signature))
[SIGNATURE] = GOOD["signatures"]


def text(size_bytes: int) -> str:
    """So many bytes in base64."""
    return base64.b64encode(bytes(size_bytes)).decode()


def signed(**changes: Any) -> dict[str, Any]:
    """The envelope with its signature changed."""
    return GOOD | {"signatures": [SIGNATURE | changes]}


TAKEN = [
    GOOD,
    *(GOOD | {"payload": text(size)} for size in (1, 2, 3, 4094, 4095, 4096)),
    signed(keyid="A" * 43),
    signed(sig=text(64)),
]
REFUSED = [
    [],
    {},
    {name: value for name, value in GOOD.items() if name != "payload"},
    GOOD | {"more": 1},
    GOOD | {"payload": ""},
    GOOD | {"payload": 1},
    GOOD | {"payload": None},
    GOOD | {"payload": text(4099)},
    GOOD | {"payload": text(1).rstrip("=")},
    GOOD | {"payload": text(3) + " "},
    GOOD | {"payload": "e-_9"},
    GOOD | {"payloadType": "application/json"},
    GOOD | {"signatures": []},
    GOOD | {"signatures": [SIGNATURE, SIGNATURE]},
    GOOD | {"signatures": SIGNATURE},
    signed(more=1),
    signed(keyid="A" * 42),
    signed(keyid="A" * 42 + "="),
    signed(keyid=None),
    signed(sig=text(63)),
    signed(sig=text(65)),
    signed(sig=text(64).rstrip("=")),
]


def test_the_schema_is_one() -> None:
    """It holds against the dialect that it names."""
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(("envelope", "taken"), [(e, True) for e in TAKEN] + [(e, False) for e in REFUSED])
def test_schema_and_code_agree(envelope: object, taken: bool) -> None:
    """What the one takes, so does the other."""
    assert Draft202012Validator(SCHEMA).is_valid(envelope) is taken
    body = json.dumps(envelope).encode()
    if taken:
        dsse.unwrap(body)
    else:
        with pytest.raises(Refused, match="envelope_malformed"):
            dsse.unwrap(body)

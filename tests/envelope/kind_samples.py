"""Schemas of kinds to test with, how they are read, and what is taken of them."""

import json
from typing import Any

import pytest
from wire_samples import sample

from postseal.envelope import v1
from postseal.envelope.kinds import Kinds, read_kinds
from postseal.errors import Refused, StartupError
from postseal.kinds_folder import compile_schema
from postseal.outcomes import Reason

DIALECT = "https://json-schema.org/draft/2020-12/schema"
UUID_PATTERN = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
FILE = "acme.job.json"

TEXT = {"type": "string", "maxLength": 8}
COUNT = {"type": "integer", "minimum": 0, "maximum": 9}
EMPTY = {"type": "object", "additionalProperties": False}


def schema_with(subschema: object, **root: object) -> dict[str, Any]:
    """A schema of the kind acme.job whose one other member is `x`."""
    return {
        "$schema": DIALECT,
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "x"],
        "properties": {"kind": {"const": "acme.job"}, "x": subschema},
    } | root


def read(schema: object, file: str = FILE) -> Kinds:
    """The kinds of one file."""
    raw = schema if isinstance(schema, bytes) else json.dumps(schema).encode()
    return read_kinds({file: raw}, compile_schema)


def refusal(schema: object, file: str = FILE) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(StartupError) as caught:
        read(schema, file)
    message = str(caught.value)
    assert message.isprintable()
    return message


def payload_of(x: object) -> dict[str, Any]:
    """A payload of the kind acme.job."""
    return sample() | {"data": {"kind": "acme.job", "x": x}}


def rfc8785(value: object) -> bytes:
    """Canonical bytes by another encoder than ours, for ASCII names and any text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def is_taken(raw: bytes, kinds: Kinds) -> bool:
    """Whether the payload opens; every refusal here is `payload_invalid`."""
    try:
        opened = v1.open_payload(raw, kinds)
    except Refused as refused:
        if refused.reason is not Reason.PAYLOAD_INVALID:
            raise
        return False
    assert isinstance(opened, v1.DeploymentPayload)
    assert v1.encode_payload(opened, kinds) == raw
    return True

"""One valid event of every kind, with all of its members, and the kinds of a deployment to read them by."""

import json
from typing import Any

from postseal.envelope.kinds import read_kinds
from postseal.kinds_folder import compile_schema

UUID_TEXT = "0190d3a4-7b7c-7cc1-8e5b-0123456789ab"
DIGEST = "sha256:" + "0f" * 32

JOB_FILE = "acme.job.json"
JOB: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "additionalProperties": False,
    "required": ["kind", "note"],
    "properties": {
        "kind": {"const": "acme.job"},
        "note": {"type": "string", "maxLength": 40},
        "digest": {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
        "steps": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/step"}},
        "size": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    },
    "$defs": {
        "step": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"done": {"type": "boolean"}, "rank": {"oneOf": [{"enum": ["a", ""]}, {"const": 1}]}},
        }
    },
}
KINDS = read_kinds({JOB_FILE: json.dumps(JOB).encode()}, compile_schema)

DATA: dict[str, dict[str, Any]] = {
    "proposal": {
        "proposalId": UUID_TEXT,
        "revision": 7,
        "action": "create",
        "contentDigest": DIGEST,
        "contentBytes": 1024,
    },
    "proposal-decision": {
        "proposalId": UUID_TEXT,
        "revision": 7,
        "decision": "rejected",
        "reasonCode": "stale-revision",
    },
    "task-status": {
        "taskId": UUID_TEXT,
        "attempt": 2,
        "status": "failed",
        "progress": 40,
        "errorCode": "timeout",
        "resultDigest": DIGEST,
    },
    "acknowledgement": {"ackEventId": UUID_TEXT, "verdict": "applied"},
    "heartbeat": {"bootId": UUID_TEXT, "uptimeMs": 5, "queueDepth": 0},
    "acme.job": {
        "note": "J\u00f6b\n",
        "digest": DIGEST,
        "steps": [{"done": True, "rank": 1}, {}],
        "size": -5,
    },
}
"""What `data` holds beside `kind`."""


def data_of(kind: str) -> dict[str, Any]:
    """Valid data of a kind."""
    return {"kind": kind, **DATA[kind]}


def event(kind: str) -> dict[str, Any]:
    """A fresh valid event that came in."""
    return {
        "protocol": "controlplane/v1",
        "schemaVersion": 1,
        "route": {"tenant": "acme", "project": "apollo", "producer": "device-01"},
        "eventId": UUID_TEXT,
        "idempotencyKey": "example:1",
        "sequence": 1,
        "issuedAtMs": 1767225600000,
        "data": json.loads(json.dumps(data_of(kind))),
    }

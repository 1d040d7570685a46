"""Payloads to test with: one sample, and hypothesis strategies for every valid one."""

import json
from typing import Any

from hypothesis import strategies as st

SEED = bytes(range(32))
UUID_TEXT = "0190d3a4-7b7c-7cc1-8e5b-0123456789ab"
DIGEST = "sha256:" + "0f" * 32

MAX_INTEGER = 2**53 - 1


def canonical(value: object) -> bytes:
    """Canonical bytes by another encoder than ours; right for ASCII strings and integers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sample() -> dict[str, Any]:
    """Make a fresh valid inbound payload: a heartbeat."""
    return {
        "protocol": "controlplane/v1",
        "schemaVersion": 1,
        "route": {"tenant": "acme", "project": "apollo", "producer": "device-01"},
        "eventId": UUID_TEXT,
        "idempotencyKey": "heartbeat:1",
        "sequence": 1,
        "issuedAtMs": 1767225600000,
        "data": {"kind": "heartbeat", "bootId": UUID_TEXT, "uptimeMs": 5, "queueDepth": 0},
    }


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers of a closed range, its ends often."""
    return st.one_of(st.integers(low, high), st.sampled_from([low, high]))


UUIDS = st.uuids().map(str)
IDS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
DIGESTS = st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True)
REVISIONS = integers(1, 2**31 - 1)

DATA: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "proposal": st.fixed_dictionaries(
        {
            "kind": st.just("proposal"),
            "proposalId": UUIDS,
            "revision": REVISIONS,
            "action": st.sampled_from(["create", "update", "withdraw"]),
            "contentDigest": DIGESTS,
            "contentBytes": integers(0, 2**40),
        }
    ),
    "proposal-decision": st.fixed_dictionaries(
        {
            "kind": st.just("proposal-decision"),
            "proposalId": UUIDS,
            "revision": REVISIONS,
            "decision": st.sampled_from(["accepted", "rejected", "deferred"]),
        },
        optional={"reasonCode": st.sampled_from(["policy", "stale-revision", "unauthorised", "capacity", "other"])},
    ),
    "task-status": st.fixed_dictionaries(
        {
            "kind": st.just("task-status"),
            "taskId": UUIDS,
            "attempt": integers(1, 10**6),
            "status": st.sampled_from(["queued", "running", "succeeded", "failed", "cancelled"]),
            "progress": integers(0, 100),
        },
        optional={
            "errorCode": st.sampled_from(
                ["timeout", "invalid-input", "dependency-failed", "resource-exhausted", "internal"]
            ),
            "resultDigest": DIGESTS,
        },
    ),
    "acknowledgement": st.fixed_dictionaries(
        {
            "kind": st.just("acknowledgement"),
            "ackEventId": UUIDS,
            "verdict": st.sampled_from(["received", "applied", "rejected"]),
        }
    ),
    "heartbeat": st.fixed_dictionaries(
        {
            "kind": st.just("heartbeat"),
            "bootId": UUIDS,
            "uptimeMs": integers(0, MAX_INTEGER),
            "queueDepth": integers(0, 10**7),
        }
    ),
}


def payloads(*, audience: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Draw valid payloads of every kind, all with an audience or all without."""
    names = ["tenant", "project", "producer", *(["audience"] if audience else [])]
    return st.fixed_dictionaries(
        {
            "protocol": st.just("controlplane/v1"),
            "schemaVersion": st.just(1),
            "route": st.fixed_dictionaries(dict.fromkeys(names, IDS)),
            "eventId": UUIDS,
            "idempotencyKey": st.from_regex(r"[A-Za-z0-9._:-]{8,128}", fullmatch=True),
            "sequence": integers(1, MAX_INTEGER),
            "issuedAtMs": integers(0, 4_102_444_800_000),
            "data": st.one_of(*DATA.values()),
        }
    )

"""The payload of controlplane/v1: closed metadata, read in two stages (protocol sections 3 and 4).

Before the signature holds, `read_claims` reads only what can refuse, each step only after the one before it:

    2a  the payload is a JSON object                        else envelope_malformed
    2b  Claims.route: three strings                         else identity_out_of_bounds
        (the caller compares them with who is calling       else route_mismatch)
    2d  Claims.identities: present, typed, in their bounds  else identity_out_of_bounds

After the signature holds, `open_payload` reads all of it:

    4   protocol and schemaVersion are ours                 else schema_version_unsupported
        every member is known, typed and in its bounds,
        and the bytes are the canonical form                else payload_invalid

Where a member is repeated, both stages read the last one, and the canonical form then refuses the payload.

What is right in every point is decoded once, by `read_claims`, and no step needs to look again. Only where something is
amiss does each step read for itself, so that the first one that refuses the payload says why.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from postseal.envelope import canonical, names
from postseal.envelope.dsse import MAX_PAYLOAD_BYTES
from postseal.envelope.kinds import NO_KINDS, Kinds
from postseal.errors import Refused
from postseal.outcomes import Reason

PROTOCOL: Final = "controlplane/v1"
SCHEMA_VERSION: Final = 1

# msgspec searches a pattern anywhere, and `$` would let a newline follow.
Id = Annotated[str, Meta(pattern=rf"^{names.ID.pattern}\Z")]
IdempotencyKey = Annotated[str, Meta(pattern=rf"^{names.IDEMPOTENCY_KEY.pattern}\Z")]
Digest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Sequence = Annotated[int, Meta(ge=1, le=canonical.MAX_INTEGER)]
TimeMs = Annotated[int, Meta(ge=0, le=4_102_444_800_000)]  # up to the year 2100
Revision = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Closed(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """An object of the payload: the members below and no others; an optional one is left out, never null."""


class Proposal(Closed, frozen=True, tag_field="kind", tag="proposal"):
    """A device puts a revision of a proposal forward; its content travels elsewhere, by digest."""

    proposal_id: UUID
    revision: Revision
    action: Literal["create", "update", "withdraw"]
    content_digest: Digest
    content_bytes: Annotated[int, Meta(ge=0, le=2**40)]


class ProposalDecision(Closed, frozen=True, tag_field="kind", tag="proposal-decision"):
    """What was decided about one revision of a proposal."""

    proposal_id: UUID
    revision: Revision
    decision: Literal["accepted", "rejected", "deferred"]
    reason_code: Literal["policy", "stale-revision", "unauthorised", "capacity", "other"] | UnsetType = UNSET


class TaskStatus(Closed, frozen=True, tag_field="kind", tag="task-status"):
    """How far one attempt at a task has come; progress in percent."""

    task_id: UUID
    attempt: Annotated[int, Meta(ge=1, le=10**6)]
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    progress: Annotated[int, Meta(ge=0, le=100)]
    error_code: (
        Literal["timeout", "invalid-input", "dependency-failed", "resource-exhausted", "internal"] | UnsetType
    ) = UNSET
    result_digest: Digest | UnsetType = UNSET


class Acknowledgement(Closed, frozen=True, tag_field="kind", tag="acknowledgement"):
    """What became of an event that the other side sent."""

    ack_event_id: UUID
    verdict: Literal["received", "applied", "rejected"]


class Heartbeat(Closed, frozen=True, tag_field="kind", tag="heartbeat"):
    """A sign of life: which boot, how long it is up, how much waits to be sent."""

    boot_id: UUID
    uptime_ms: Annotated[int, Meta(ge=0, le=canonical.MAX_INTEGER)]
    queue_depth: Annotated[int, Meta(ge=0, le=10**7)]


Data = Proposal | ProposalDecision | TaskStatus | Acknowledgement | Heartbeat


class Route(Closed, frozen=True):
    """Where an event comes from; the control plane adds the `audience`, its destination's id."""

    tenant: Id
    project: Id
    producer: Id
    audience: Id | UnsetType = UNSET


class _RouteClaim(Struct):
    tenant: str
    project: str
    producer: str


class Identities(Struct, frozen=True, kw_only=True, rename="camel"):
    """What makes an event one event in its stream."""

    event_id: UUID
    idempotency_key: IdempotencyKey
    sequence: Sequence


class _Event(Closed, frozen=True):
    protocol: Literal["controlplane/v1"]
    schema_version: Literal[1]
    route: Route
    event_id: UUID
    idempotency_key: IdempotencyKey
    sequence: Sequence
    issued_at_ms: TimeMs


class Payload(_Event, frozen=True):
    """One event. Built in Python its bounds are not checked before `encode_payload`."""

    data: Data


class DeploymentPayload(_Event, frozen=True):
    """One event of a kind that the deployment added; a closed schema describes its `data`, `kind` included."""

    data: dict[str, Any]


def _no_float(_token: str) -> float:
    raise ValueError("a float")


# float() takes the numbers that msgspec's own reading refuses as too great: they are JSON, and refused later.
_CLAIMS = msgspec.json.Decoder(dict[str, Any], float_hook=float)
_PAYLOAD = msgspec.json.Decoder(Payload)
# A schema takes 1.0 for an integer. Other than that, what a closed schema takes is within the canonical subset.
_DEPLOYMENT_PAYLOAD = msgspec.json.Decoder(DeploymentPayload, float_hook=_no_float)
_KIND = re.compile(rb'"kind":"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Claims:
    """A payload before its signature holds: good only to refuse it."""

    payload: bytes
    kinds: Kinds
    """Those of the deployment, by which it is read."""
    event: Payload | DeploymentPayload | None
    """All of it, if it is canonical and each member in its bounds; of a deployment's kind no schema was asked yet."""

    @property
    def members(self) -> dict[str, Any]:
        """Whatever the object has, held against no rule."""
        return _members(self.payload)

    def route(self) -> Route:
        """Return what the payload says its route is: three strings, held against no pattern.

        Refused with `identity_out_of_bounds` where one is absent or no string.
        """
        if self.event is not None:
            return self.event.route
        try:
            claim = msgspec.convert(self.members.get("route"), _RouteClaim)
        except msgspec.ValidationError:
            detail = "route has no tenant, project and producer that are all strings"
            raise Refused(Reason.IDENTITY_OUT_OF_BOUNDS, detail) from None
        return Route(tenant=claim.tenant, project=claim.project, producer=claim.producer)

    def identities(self) -> Identities:
        """Return them; Refused with `identity_out_of_bounds` where one is absent or breaks its rule."""
        if (event := self.event) is not None:
            return Identities(event_id=event.event_id, idempotency_key=event.idempotency_key, sequence=event.sequence)
        members = self.members
        try:
            identities = msgspec.convert(members, Identities)
        except msgspec.ValidationError as error:
            raise Refused(Reason.IDENTITY_OUT_OF_BOUNDS, f"{_place(error)} breaks its rule") from None
        # msgspec reads a UUID in capitals, or without hyphens, too.
        if str(identities.event_id) != members["eventId"]:
            raise Refused(Reason.IDENTITY_OUT_OF_BOUNDS, "eventId is no lower-case UUID")
        return identities


def read_claims(payload: bytes, kinds: Kinds = NO_KINDS) -> Claims:
    """Step 2a. Refused with `envelope_malformed` unless the payload is a JSON object."""
    try:
        event = _decode(payload, kinds)
        if canonical.is_canonical(payload, event):
            return Claims(payload, kinds, event)
    except (ValueError, RecursionError):
        pass
    _members(payload)
    return Claims(payload, kinds, None)


def open_claims(claims: Claims) -> Payload | DeploymentPayload:
    """Step 4: read an event that came in. Refused with `schema_version_unsupported` or `payload_invalid`.

    An event whose kind is one of the deployment's is a DeploymentPayload, every other one a Payload.
    """
    opened = claims.event
    if opened is None:
        opened = _open(claims.payload, claims.kinds)
    else:
        _require_schema(opened, claims.kinds)
    if opened.route.audience is not UNSET:
        raise Refused(Reason.PAYLOAD_INVALID, "route.audience is only for what the control plane sends")
    return opened


def open_payload(payload: bytes, kinds: Kinds = NO_KINDS) -> Payload | DeploymentPayload:
    """Steps 2a and 4 at once, of a payload whose claims nobody needs."""
    return open_claims(read_claims(payload, kinds))


def open_delivery(payload: bytes, kinds: Kinds = NO_KINDS) -> Payload | DeploymentPayload:
    """Read an event that the control plane sent: as `open_payload`, but `route.audience` must be there."""
    opened = _open(payload, kinds)
    if opened.route.audience is UNSET:
        raise Refused(Reason.PAYLOAD_INVALID, "route.audience is absent")
    return opened


def encode_payload(payload: Payload | DeploymentPayload, kinds: Kinds = NO_KINDS) -> bytes:
    """Return the canonical bytes, ready to sign; ValueError past 4,096, or where a member breaks its rule."""
    raw = canonical.encode(payload)
    if len(raw) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"the payload has {len(raw)} bytes, more than {MAX_PAYLOAD_BYTES}")
    try:
        _open(raw, kinds)
    except Refused as refused:
        raise ValueError(refused.detail) from None
    return raw


def _members(payload: bytes) -> dict[str, Any]:
    """Refused with `envelope_malformed` unless there are any."""
    try:
        return _CLAIMS.decode(payload)
    except (ValueError, RecursionError):
        # No chained cause, here and below: msgspec's messages may quote the payload.
        raise Refused(Reason.ENVELOPE_MALFORMED, "the payload is no JSON object") from None


def _open(payload: bytes, kinds: Kinds) -> Payload | DeploymentPayload:
    try:
        opened = _decode(payload, kinds)
    except (ValueError, RecursionError) as error:
        raise _fault(payload, _broken_rule(error)) from None
    _require_schema(opened, kinds)
    if not canonical.is_canonical(payload, opened):
        raise Refused(Reason.PAYLOAD_INVALID, "the payload is not in RFC 8785 canonical form")
    return opened


def _decode(payload: bytes, kinds: Kinds) -> Payload | DeploymentPayload:
    """Read all members; of a deployment's kind, which is one of `kinds`, those outside of `data`."""
    if not (kinds and _spells_one_of(payload, kinds)):
        return _PAYLOAD.decode(payload)
    opened = _DEPLOYMENT_PAYLOAD.decode(payload)
    kind = opened.data.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("none of the deployment's kinds")
    return opened


def _spells_one_of(payload: bytes, kinds: Kinds) -> bool:
    """Whether one of `kinds` stands somewhere as `data.kind` does in canonical form; no kind of ours has such text."""
    return any(name.decode("utf-8", "replace") in kinds for name in _KIND.findall(payload))


def _require_schema(opened: Payload | DeploymentPayload, kinds: Kinds) -> None:
    """Hold the data of a deployment's kind against its schema."""
    if isinstance(opened, DeploymentPayload) and (place := kinds[opened.data["kind"]].fault(opened.data)):
        raise Refused(Reason.PAYLOAD_INVALID, f"{place} breaks its rule")


def _fault(payload: bytes, detail: str) -> Refused:
    """Which of step 4's two reasons a payload earns that cannot be read as ours."""
    members = _members(payload)
    version = members.get("schemaVersion")
    # True and 1.0 equal 1 in Python and are other things in JSON.
    if members.get("protocol") != PROTOCOL or type(version) is not int or version != SCHEMA_VERSION:
        detail = f"protocol and schemaVersion are not {PROTOCOL} and {SCHEMA_VERSION}"
        return Refused(Reason.SCHEMA_VERSION_UNSUPPORTED, detail)
    return Refused(Reason.PAYLOAD_INVALID, detail)


def _broken_rule(error: Exception) -> str:
    place = _place(error)
    return f"{place} is none that is known here" if place == "$.data.kind" else f"{place} breaks its rule"


def _place(error: Exception) -> str:
    """Where in the payload a msgspec error lies, such as `$.data.progress`: names of ours, never a value."""
    found = re.search(r" - at `(\$[A-Za-z.]+)`\Z", str(error))
    return found[1] if found else "the payload"

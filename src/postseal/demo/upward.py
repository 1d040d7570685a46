"""Mail from a device: envelopes of each kind of fate, what each is answered, and what a consumer reads back."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from postseal.demo.calls import require
from postseal.demo.cast import PROJECT, TENANT, Cast, Device
from postseal.envelope import canonical, dsse, ed25519, v1
from postseal.errors import PostsealError
from postseal.outcomes import Outcome, Reason


@dataclass(frozen=True, slots=True)
class Step:
    """One envelope to send. `verified` says whether its signature is reached, and holds."""

    what: str
    sender: Device
    body: bytes
    expected: Outcome | Reason
    verified: bool


@dataclass(frozen=True, slots=True)
class Retained:
    """A proposal that a consumer has read and verified."""

    sequence: int
    event_identity: str
    proposal: v1.Proposal


async def show(cast: Cast, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Send all of them. Raises PostsealError where one is answered otherwise than expected."""
    answers: list[dict[str, Any]] = []
    for step in _story(cast.device, cast.neighbour):
        _, answer = await step.sender.client.send("POST", "/v1/envelopes", step.body, dsse.ENVELOPE_MEDIA_TYPE)
        say(_line(step, answer))
        require(answer.get("outcome", answer.get("reason")), step.expected, step.what)
        answers.append({"sent": step.what, "signatureVerified": step.verified, "answer": answer})
    return answers


async def read_back(cast: Cast, say: Callable[[str], None]) -> list[Retained]:
    """Read what was retained, as a consumer, and verify each envelope with the device's published key."""
    say("\nread back by a consumer, and checked with the device's published key:")
    device, project = cast.device.name, f"/v1/projects/{PROJECT}"
    keys = (await cast.consumer.get(f"{project}/producers/{device}/keys"))["items"]
    by_keyid = {key["keyid"]: _from_base64url(key["publicKey"]) for key in keys}
    page = await cast.consumer.get(f"{project}/streams/{device}/envelopes?after=0")
    read = [_opened(item, by_keyid) for item in page["items"]]
    require([each.sequence for each in read], [1, 2, 3], "the sequences that a consumer reads")
    for each in read:
        say(f"  sequence {each.sequence}  {each.event_identity[:16]}…  verified")
    return read


def _story(device: Device, neighbour: Device) -> list[Step]:
    first, second, third = (device.envelope(sequence) for sequence in (1, 2, 3))
    return [
        Step("an envelope, sequence 1", device, first, Outcome.ACCEPTED, verified=True),
        Step("the same bytes once more", device, first, Outcome.DUPLICATE, verified=True),
        Step("sequence 3, which leaves a hole", device, third, Outcome.GAP, verified=True),
        Step("the late sequence 2, which fills it", device, second, Outcome.REORDERED, verified=True),
        Step("a forged one, changed after signing", device, _forged(device), Reason.SIGNATURE_INVALID, verified=False),
        Step(
            "one of another tenant's device",
            neighbour,
            neighbour.envelope(1, tenant=TENANT),
            Reason.ROUTE_MISMATCH,
            verified=False,
        ),
        Step(
            "one with a member nobody defined",
            device,
            device.envelope(4, note="hello"),
            Reason.PAYLOAD_INVALID,
            verified=True,
        ),
    ]


def _forged(device: Device) -> bytes:
    """An envelope whose payload was changed and kept in canonical form: only the signature tells."""
    envelope = dsse.unwrap(device.envelope(4))
    return dsse.wrap(
        envelope.payload.replace(b'"action":"create"', b'"action":"update"'), envelope.keyid, envelope.signature
    )


def _line(step: Step, answer: dict[str, Any]) -> str:
    signature = "verified" if step.verified else "-"
    if "outcome" in answer:
        words = f"{answer['outcome']:<18} contiguous {answer['contiguousThrough']}, highest {answer['highest']}"
    else:
        words = f"refused: {answer['reason']}"
    return f"  {step.what:<37} signature {signature:<9} -> {words}"


def _opened(item: dict[str, Any], keys: dict[str, bytes]) -> Retained:
    envelope = dsse.unwrap(canonical.encode(item["envelope"]))
    if not ed25519.verify(keys[envelope.keyid], envelope.signed_bytes, envelope.signature):
        raise PostsealError(f"the signature of sequence {item['sequence']} does not hold")
    require(envelope.identity.hex(), item["eventIdentity"], "the identity of what a consumer reads")
    proposal = v1.open_payload(envelope.payload).data
    if not isinstance(proposal, v1.Proposal):
        raise PostsealError(f"sequence {item['sequence']} is no proposal")
    return Retained(item["sequence"], item["eventIdentity"], proposal)


def _from_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

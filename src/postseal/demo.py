"""`postseal demo`: everything started, and the main job shown on real signed envelopes over HTTP.

1. the database, the service, a listening socket
2. a tenant with a project, a neighbouring tenant, and in each a new device, which enrols over HTTP
3. envelopes of each kind of fate, and what each was answered
4. a consumer reads back what was retained, and verifies every signature with the published key
5. how to do the same by hand

Each answer is held against the expected one, so that `--once` ends with 0 only if all of them came.
"""

import asyncio
import base64
import http.client
import json
import secrets
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
import uvloop

from postseal import logs
from postseal.admin import credentials, devices, tenants
from postseal.admin.actor import Actor
from postseal.envelope import canonical, dsse, ed25519, enrolment
from postseal.errors import AdminError, PostsealError, StartupError
from postseal.identity.verified import Role
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import open_access
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.web.server import bind, listening

TENANT, NEIGHBOUR, PROJECT = "demo", "demo-neighbour", "main"
ACTOR = Actor("demo")
INVITATION_S = 600
CREDENTIAL_S = 86_400
HTTP_TIMEOUT_S = 15

WELCOME = """
postseal demo: a signed envelope in, a durable acknowledgement out.

A device signs each envelope with its own key. The service checks it, commits identity, payload, cursor and audit in
one transaction, and only then acknowledges it. `contiguous` is how far the stream has no hole, `highest` how far it
has come.
"""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the demo: its key never leaves it."""

    tenant: str
    name: str
    seed: bytes
    credential: str

    def envelope(self, sequence: int, *, tenant: str | None = None, **open_members: str) -> bytes:
        """A signed proposal, as the bytes that go over the wire."""
        data = {
            "kind": "proposal",
            "proposalId": str(uuid.uuid4()),
            "revision": 1,
            "action": "create",
            "contentDigest": "sha256:" + secrets.token_hex(32),
            "contentBytes": 2048,
        }
        payload = {
            "protocol": "controlplane/v1",
            "schemaVersion": 1,
            "route": {"tenant": tenant or self.tenant, "project": PROJECT, "producer": self.name},
            "eventId": str(uuid.uuid4()),
            "idempotencyKey": f"demo:{secrets.token_hex(8)}",
            "sequence": sequence,
            "issuedAtMs": time.time_ns() // 1_000_000,
            "data": data | open_members,
        }
        envelope = dsse.seal(canonical.encode(payload), self.seed)
        return dsse.wrap(envelope.payload, envelope.keyid, envelope.signature)


@dataclass(frozen=True, slots=True)
class Step:
    """One envelope to send. `verified` says whether its signature is reached, and holds."""

    what: str
    sender: Device
    body: bytes
    expected: Outcome | Reason
    verified: bool


def run(settings: Settings, *, once: bool, as_json: bool = False) -> None:
    """Start everything, show it, and stay up until interrupted; with `once`, end when it has been shown.

    `as_json` prints one document of what was sent and answered in place of the story.
    """
    logs.configure("warning")
    with open_access(settings, log=structlog.get_logger()) as access:
        access.check()
        uvloop.run(_demo(settings, running_service(settings, access), once=once, as_json=as_json))


async def _demo(settings: Settings, entering: Any, *, once: bool, as_json: bool) -> None:
    say = _nothing if as_json else print
    async with entering as service, listening(service, _bind(settings)) as address:
        say(WELCOME)
        device, neighbour, reader = await _cast(service, address)
        say(f"tenant {TENANT}, project {PROJECT}, device {device.name} (enrolled over HTTP)\n")
        answers: list[dict[str, Any]] = []
        for step in _story(device, neighbour):
            answer = await asyncio.to_thread(_send, address, step)
            say(_line(step, answer))
            _require(answer.get("outcome", answer.get("reason")), step.expected)
            answers.append({"sent": step.what, "signatureVerified": step.verified, "answer": answer})
        say("\nread back by a consumer, and checked with the device's published key:")
        read = await asyncio.to_thread(_read_back, address, device, reader)
        for item in read:
            say(f"  sequence {item['sequence']}  {item['eventIdentity'][:16]}…  verified")
        say(_by_hand(settings, address, device, once=once))
        if as_json:
            document = {"url": address, "tenant": TENANT, "device": device.name, "steps": answers, "readBack": read}
            print(json.dumps(document), flush=True)
        if not once:
            say("\nStays up until Ctrl-C.")
            await asyncio.Event().wait()


def _nothing(_text: str) -> None:
    """Say nothing."""


def _bind(settings: Settings) -> Any:
    """The port of the settings, or a free one where that is taken: a demo shall not fail for that."""
    try:
        return bind(settings.host, settings.port)
    except StartupError:
        return bind(settings.host, 0)


async def _cast(service: Service, address: str) -> tuple[Device, Device, str]:
    """A new device, a new device of the neighbour, and the credential of a consumer who reads what came in."""
    for tenant in (TENANT, NEIGHBOUR):
        await _make_if_new(service, tenant)
    run_id = secrets.token_hex(4)
    device = await _enrolled(service, address, TENANT, f"sensor-{run_id}")
    neighbour = await _enrolled(service, address, NEIGHBOUR, f"stranger-{run_id}")
    reader = await service.admin.transact(
        lambda connection: credentials.create(
            connection, ACTOR, TENANT, role=Role.CONSUMER, projects=[PROJECT], lifetime_s=CREDENTIAL_S
        )
    )
    return device, neighbour, reader.credential


async def _make_if_new(service: Service, tenant: str) -> None:
    try:
        await service.admin.transact(lambda connection: tenants.create(connection, ACTOR, tenant))
        await service.admin.transact(lambda connection: tenants.create_project(connection, ACTOR, tenant, PROJECT))
    except AdminError as error:
        if error.reason is not Reason.CONFLICT:
            raise


async def _enrolled(service: Service, address: str, tenant: str, name: str) -> Device:
    """Invite a device as an operator does; the device makes its key and proves that it has it."""
    invitation = await service.admin.transact(
        lambda connection: devices.invite(connection, ACTOR, tenant, name, projects=[PROJECT], lifetime_s=INVITATION_S)
    )
    seed = ed25519.generate()
    public_key = ed25519.public_key(seed)
    keyid = ed25519.thumbprint(public_key)
    proof = enrolment.prove(seed, code=invitation.code, device=name, keyid=keyid, tenant=tenant)
    request = {"code": invitation.code, "publicKey": _base64url(public_key), "proof": _base64url(proof)}
    answer = await asyncio.to_thread(
        _call, address, "POST", "/v1/enrolments", json.dumps(request).encode(), "application/json", None
    )
    return Device(tenant, name, seed, answer["credential"])


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


def _send(address: str, step: Step) -> dict[str, Any]:
    return _call(address, "POST", "/v1/envelopes", step.body, dsse.ENVELOPE_MEDIA_TYPE, step.sender.credential)


def _line(step: Step, answer: dict[str, Any]) -> str:
    signature = "verified" if step.verified else "-"
    if "outcome" in answer:
        words = f"{answer['outcome']:<18} contiguous {answer['contiguousThrough']}, highest {answer['highest']}"
    else:
        words = f"refused: {answer['reason']}"
    return f"  {step.what:<37} signature {signature:<9} -> {words}"


def _read_back(address: str, device: Device, credential: str) -> list[dict[str, Any]]:
    """Read what was retained, as a consumer, and verify each envelope with the producer's published key."""
    project = f"/v1/projects/{PROJECT}"
    keys = _call(address, "GET", f"{project}/producers/{device.name}/keys", None, None, credential)["items"]
    by_keyid = {key["keyid"]: _from_base64url(key["publicKey"]) for key in keys}
    page = _call(address, "GET", f"{project}/streams/{device.name}/envelopes?after=0", None, None, credential)
    for item in page["items"]:
        envelope = dsse.unwrap(canonical.encode(item["envelope"]))
        if not ed25519.verify(by_keyid[envelope.keyid], envelope.signed_bytes, envelope.signature):
            raise PostsealError(f"the signature of sequence {item['sequence']} does not hold")
    _require([item["sequence"] for item in page["items"]], [1, 2, 3])
    return [{"sequence": item["sequence"], "eventIdentity": item["eventIdentity"]} for item in page["items"]]


def _by_hand(settings: Settings, address: str, device: Device, *, once: bool) -> str:
    program = sys.argv[0]
    if Path(program).is_relative_to(Path.cwd()):
        program = str(Path(program).relative_to(Path.cwd()))
    where = f" --data-dir {settings.data_dir}" if settings.data_dir else ""
    when = f"after `{program} serve{where}`" if once else "in a second terminal while this one stays up"
    mine = device.name.replace("sensor", "my-device")
    return f"""
{address}

The same by hand, {when}:

  {program} device enroll {TENANT} {mine} --project {PROJECT} --generate --key-out {mine}.pem{where}
  {program} envelope seal --key {mine}.pem {TENANT} {PROJECT} {mine} 1 | curl -sS {address}/v1/envelopes \\
    -H 'Authorization: Bearer <the credential>' -H 'Content-Type: {dsse.ENVELOPE_MEDIA_TYPE}' --data-binary @-
  {program} inbox tail {TENANT} {PROJECT}{where}"""


def _call(
    address: str, method: str, path: str, body: bytes | None, media_type: str | None, credential: str | None
) -> dict[str, Any]:
    """One HTTP request; the answer's JSON, whatever its status."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=HTTP_TIMEOUT_S)
    headers = {"Content-Type": media_type, "Authorization": f"Bearer {credential}" if credential else None}
    try:
        connection.request(method, path, body, {name: value for name, value in headers.items() if value})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def _require(found: object, expected: object) -> None:
    if found != expected:
        raise PostsealError(f"the demo expected {expected} and got {found}")


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _from_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

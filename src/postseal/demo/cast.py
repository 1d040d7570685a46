"""Who takes part: a tenant with a project and a signing key, a neighbouring tenant, a new device in each, programs."""

import asyncio
import base64
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from postseal.admin import credentials, devices, signing_keys, tenants
from postseal.admin.actor import Actor
from postseal.demo.calls import Client
from postseal.envelope import canonical, dsse, ed25519, enrolment
from postseal.errors import AdminError
from postseal.identity.verified import Role
from postseal.outcomes import Reason
from postseal.postgres.database import Connection
from postseal.service import Service
from postseal.signing.pem_folder import folder_of, write_key

TENANT, NEIGHBOUR, PROJECT = "demo", "demo-neighbour", "main"
ACTOR = Actor("demo")
INVITATION_S = 600
CREDENTIAL_S = 86_400


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the demo: its key never leaves it."""

    tenant: str
    name: str
    seed: bytes = field(repr=False)
    client: Client

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
class Cast:
    """Everybody of one run. Its id stands in the names of what the run makes, since no name is used twice."""

    run_id: str
    device: Device
    neighbour: Device
    """A device of another tenant."""
    consumer: Client
    """A program that reads what came in."""
    sender: Client
    """A program of the control plane that sends."""
    operator: Client


async def gather(service: Service, address: str) -> Cast:
    """Make whoever is missing; the devices enrol over HTTP."""
    for tenant in (TENANT, NEIGHBOUR):
        await _make_if_new(service, tenant)
    await _make_signing_key_if_none(service)
    run_id = secrets.token_hex(4)
    return Cast(
        run_id,
        await _enrolled(service, address, TENANT, f"sensor-{run_id}"),
        await _enrolled(service, address, NEIGHBOUR, f"stranger-{run_id}"),
        await _client(service, address, Role.CONSUMER),
        await _client(service, address, Role.SENDER),
        await _client(service, address, Role.OPERATOR),
    )


async def _make_if_new(service: Service, tenant: str) -> None:
    await _is_new(service, lambda connection: tenants.create(connection, ACTOR, tenant))
    await _is_new(service, lambda connection: tenants.create_project(connection, ACTOR, tenant, PROJECT))


async def _make_signing_key_if_none(service: Service) -> None:
    if not await _is_new(service, lambda connection: signing_keys.require_none(connection, TENANT)):
        return
    seed = ed25519.generate()
    # First the file: what is registered can be signed with.
    await asyncio.to_thread(write_key, folder_of(service.settings), TENANT, seed)
    await service.admin.transact(
        lambda connection: signing_keys.create(connection, ACTOR, TENANT, ed25519.public_key(seed))
    )


async def _is_new(service: Service, act: Callable[[Connection], Awaitable[object]]) -> bool:
    """Do it, unless it was done in an earlier run."""
    try:
        await service.admin.transact(act)
    except AdminError as error:
        if error.reason is not Reason.CONFLICT:
            raise
        return False
    return True


async def _client(service: Service, address: str, role: Role) -> Client:
    issued = await service.admin.transact(
        lambda connection: credentials.create(
            connection, ACTOR, TENANT, role=role, projects=[PROJECT], lifetime_s=CREDENTIAL_S
        )
    )
    return Client(address, issued.credential)


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
    answer = await Client(address).post("/v1/enrolments", request)
    return Device(tenant, name, seed, Client(address, answer["credential"]))


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

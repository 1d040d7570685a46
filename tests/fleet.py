"""A fleet to test with: tenants, projects, devices with keys, credentials and streams, and what they send."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import psycopg

from postseal.envelope import canonical, dsse, ed25519
from postseal.identity.tokens import NewToken, new_token
from postseal.identity.verified import Role, VerifiedIdentity
from postseal.inbound.inbox import Inbound
from postseal.postgres.access import Access

PEER = "192.0.2.7"
LIFETIME_S = 3600
ACCOUNT = "owner-1"
BOOT_ID = "0190d3a4-7b7c-7cc1-8e5b-0123456789ab"


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is enrolled in one project; `seed` is its private key."""

    tenant: str
    project: str
    name: str
    seed: bytes = field(repr=False)
    stream: int
    token: NewToken = field(repr=False)

    @property
    def keyid(self) -> str:
        """The id of its first key."""
        return ed25519.thumbprint(ed25519.public_key(self.seed))

    def payload(self, sequence: int, /, **changes: Any) -> dict[str, Any]:
        """A valid heartbeat under fresh names; `changes` replaces members, and leaves out those given as `...`."""
        event_id = str(uuid4())
        members: dict[str, Any] = {
            "protocol": "controlplane/v1",
            "schemaVersion": 1,
            "route": {"tenant": self.tenant, "project": self.project, "producer": self.name},
            "eventId": event_id,
            "idempotencyKey": f"key:{event_id}",
            "sequence": sequence,
            "issuedAtMs": 1_767_225_600_000,
            "data": {"kind": "heartbeat", "bootId": BOOT_ID, "uptimeMs": 5, "queueDepth": 0},
        } | changes
        return {name: value for name, value in members.items() if value is not ...}

    def envelope(self, sequence: int, /, *, seed: bytes | None = None, **changes: Any) -> bytes:
        """The signed bytes of `payload`."""
        return signed(self.payload(sequence, **changes), seed or self.seed)

    def inbound(self, body: bytes) -> Inbound:
        """A request of this device, which the door knows."""
        known = VerifiedIdentity(
            self.tenant, ACCOUNT, self.name, Role.DEVICE, str(self.token.credential_id), frozenset({self.project})
        )
        return Inbound(known, body)


def signed(payload: dict[str, Any], seed: bytes) -> bytes:
    """An envelope over the canonical form of `payload`."""
    sealed = dsse.seal(canonical.encode(payload), seed)
    return dsse.wrap(sealed.payload, sealed.keyid, sealed.signature)


def payload_of(body: bytes) -> dict[str, Any]:
    """What an envelope carries."""
    return json.loads(dsse.unwrap(body).payload)


def enrol(
    access: Access,
    name: str = "device-01",
    *,
    tenant: str = "acme",
    project: str = "apollo",
    seed: bytes | None = None,
) -> Device:
    """Make a device, and its tenant and project where they are missing."""
    seed = seed or ed25519.generate()
    scope = {"tenant": tenant, "project": project, "device": name, "account": ACCOUNT}
    with as_owner(access) as owner:
        owner.execute("INSERT INTO tenants VALUES (%(tenant)s) ON CONFLICT DO NOTHING", scope)
        owner.execute("INSERT INTO projects VALUES (%(tenant)s, %(project)s) ON CONFLICT DO NOTHING", scope)
        owner.execute("INSERT INTO devices VALUES (%(tenant)s, %(device)s, %(account)s)", scope)
        row = owner.execute(
            "INSERT INTO streams (tenant, project, producer) "
            "VALUES (%(tenant)s, %(project)s, %(device)s) RETURNING stream",
            scope,
        ).fetchone()
    assert row is not None
    device = Device(tenant, project, name, seed, row[0], issue(access, tenant, name, [project]))
    add_key(access, device, seed)
    return device


def issue(access: Access, tenant: str, device: str | None, projects: list[str], role: str = "device") -> NewToken:
    """A credential of a device, or of another role where `device` is None."""
    token = new_token()
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO credentials (credential_id, secret_hash, tenant, account, device, role, projects, expires_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s))",
            [token.credential_id, token.secret_hash, tenant, ACCOUNT, device, role, projects, LIFETIME_S],
        )
    return token


def add_key(access: Access, device: Device, seed: bytes) -> str:
    """Register one more key of the device's; returns its id."""
    public_key = ed25519.public_key(seed)
    keyid = ed25519.thumbprint(public_key)
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO keys (tenant, keyid, device, public_key) VALUES (%s, %s, %s, %s)",
            [device.tenant, keyid, device.name, public_key],
        )
    return keyid


def as_owner(access: Access) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection that may do anything, in the schema of postseal; every statement commits by itself."""
    return psycopg.connect(access.owner, autocommit=True, options="-c search_path=postseal")


@contextmanager
def locked_stream(access: Access, device: Device) -> Iterator[psycopg.Connection[Any]]:
    """A connection in whose transaction the device's stream is locked, as a group commit locks it."""
    with as_owner(access) as owner, owner.transaction():
        owner.execute("SELECT 1 FROM streams WHERE stream = %s FOR NO KEY UPDATE", [device.stream])
        yield owner


@dataclass(frozen=True, slots=True)
class Stored:
    """What the database keeps of one stream."""

    cursor: tuple[int, int, int]
    """floor, contiguous, highest"""
    sequences: dict[int, UUID]
    payloads: set[int]
    audits: list[tuple[str, str | None]]
    """Outcome and reason of the tenant's audit events of envelopes, oldest first."""


def stored(access: Access, device: Device) -> Stored:
    """Read all of it in one snapshot."""
    stream = [device.tenant, device.stream]
    with as_owner(access) as owner, owner.transaction():
        owner.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor = owner.execute(
            "SELECT floor, contiguous, highest FROM streams WHERE tenant = %s AND stream = %s", stream
        ).fetchone()
        identities = owner.execute(
            "SELECT sequence, event_id FROM identities WHERE tenant = %s AND stream = %s", stream
        ).fetchall()
        payloads = owner.execute("SELECT sequence FROM payloads WHERE tenant = %s AND stream = %s", stream).fetchall()
        audits = owner.execute(
            "SELECT outcome, reason FROM audit_events WHERE tenant = %s ORDER BY id", [device.tenant]
        ).fetchall()
    assert cursor is not None
    return Stored(
        cursor,
        dict(identities),
        {sequence for (sequence,) in payloads},
        [(outcome, reason) for outcome, reason in audits],
    )

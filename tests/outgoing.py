"""What is sent, to test with: signing keys, destinations, and what the database keeps of deliveries."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec

from fleet import as_owner
from postseal.envelope import dsse, ed25519, v1
from postseal.outbound.wishes import Wish
from postseal.postgres.access import Access
from postseal.signing.pem_folder import write_key

TENANT, PROJECT, DESTINATION = "acme", "apollo", "orders"
URL = "https://receiver.example.net/hook"


@dataclass(frozen=True, slots=True)
class Destination:
    """One destination."""

    access: Access = field(repr=False)
    stream: int
    name: str = DESTINATION
    project: str = PROJECT
    tenant: str = TENANT

    def rows(self) -> list["Kept"]:
        """What is sealed for it, in order."""
        query = (
            "SELECT d.sequence, d.delivery, d.event_id, d.idempotency_key, d.event_identity, d.keyid, p.payload,"
            " p.signature, q.lane, q.attempt_limit, q.expires_at FROM deliveries d"
            " JOIN payloads p USING (tenant, stream, sequence) LEFT JOIN queue q USING (tenant, stream, sequence)"
            " WHERE tenant = %s AND stream = %s ORDER BY sequence"
        )
        with as_owner(self.access) as owner:
            return [Kept(*row) for row in owner.execute(query, [self.tenant, self.stream]).fetchall()]

    def end(self, sequence: int, state: str, code: str | None = None, *, attempts: int = 1) -> None:
        """Let a delivery that waits have ended so, after so many attempts that failed with its code."""
        place = {"tenant": self.tenant, "stream": self.stream, "sequence": sequence}
        project = self.project if state == "dead" else None
        given = place | {"state": state, "code": code, "project": project, "attempts": attempts}
        with as_owner(self.access) as owner, owner.transaction():
            owner.execute(
                "INSERT INTO settlements (tenant, stream, sequence, state, code, project, attempt, attempt_limit)"
                " SELECT tenant, stream, sequence, %(state)s, %(code)s, %(project)s, %(attempts)s, attempt_limit"
                " FROM queue WHERE tenant = %(tenant)s AND stream = %(stream)s AND sequence = %(sequence)s",
                given,
            )
            owner.execute(
                "DELETE FROM queue WHERE tenant = %(tenant)s AND stream = %(stream)s AND sequence = %(sequence)s", place
            )
            owner.execute(
                "UPDATE destination_health SET settled = settled + 1 WHERE tenant = %(tenant)s AND stream = %(stream)s",
                place,
            )
            if code is not None:
                owner.execute(
                    "INSERT INTO attempts (tenant, stream, sequence, attempt, code)"
                    " SELECT %(tenant)s, %(stream)s, %(sequence)s, n, %(code)s FROM generate_series(1, %(attempts)s) n",
                    given,
                )

    def queued(self, sequence: int, changes: str) -> None:
        """Change the row of a delivery that waits, by the right side of an UPDATE."""
        with as_owner(self.access) as owner:
            statement = f"UPDATE queue SET {changes} WHERE tenant = %s AND stream = %s AND sequence = %s"  # noqa: S608
            owner.execute(statement.encode(), [self.tenant, self.stream, sequence])

    def disable(self, reason: str = "operator") -> None:
        """Disable it, and hold its mail."""
        with as_owner(self.access) as owner, owner.transaction():
            owner.execute(
                "UPDATE destinations SET disabled_at = now(), disabled_reason = %s WHERE tenant = %s AND stream = %s",
                [reason, self.tenant, self.stream],
            )
            owner.execute(
                "UPDATE queue SET lane = 'held' WHERE tenant = %s AND stream = %s", [self.tenant, self.stream]
            )

    def highest(self) -> int:
        """The last sequence that was given out."""
        with as_owner(self.access) as owner:
            row = owner.execute(
                "SELECT highest FROM destinations WHERE tenant = %s AND stream = %s", [self.tenant, self.stream]
            ).fetchone()
        assert row is not None
        return row[0]


@dataclass(frozen=True, slots=True)
class Kept:
    """A delivery as the database keeps it."""

    sequence: int
    delivery: UUID
    event_id: UUID
    idempotency_key: str
    event_identity: bytes
    keyid: str
    payload: bytes
    signature: bytes
    lane: str | None
    attempt_limit: int | None
    expires_at: Any

    @property
    def event(self) -> dict[str, Any]:
        """What its payload says."""
        return msgspec.json.decode(self.payload)


def new_tenant(access: Access, tenant: str = TENANT, *projects: str) -> None:
    """Make a tenant with its projects, apollo where none are named."""
    with as_owner(access) as owner:
        owner.execute("INSERT INTO tenants VALUES (%s) ON CONFLICT DO NOTHING", [tenant])
        for project in projects or (PROJECT,):
            owner.execute("INSERT INTO projects VALUES (%s, %s) ON CONFLICT DO NOTHING", [tenant, project])


def signing_key(access: Access, folder: Path, tenant: str = TENANT) -> bytes:
    """Give a tenant its active signing key; returns the seed, whose file is in `folder`."""
    seed = ed25519.generate()
    register(access, seed, tenant)
    write_key(folder, tenant, seed)
    return seed


def register(access: Access, seed: bytes, tenant: str = TENANT, state: str = "active") -> str:
    """Register the public half of a tenant's signing key; returns its id."""
    public_key = ed25519.public_key(seed)
    keyid = ed25519.thumbprint(public_key)
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO signing_keys (tenant, keyid, public_key, state, accept_until) VALUES (%s, %s, %s, %s,"
            " CASE WHEN %s = 'retiring' THEN clock_timestamp() + interval '1 hour' END)",
            [tenant, keyid, public_key, state, state],
        )
    return keyid


def new_destination(
    access: Access,
    name: str = DESTINATION,
    *,
    tenant: str = TENANT,
    project: str = PROJECT,
    mode: str = "push",
    url: str = URL,
    max_pending: int = 1000,
) -> Destination:
    """Make a destination, and its tenant and project where they are missing."""
    new_tenant(access, tenant, project)
    with as_owner(access) as owner:
        row = owner.execute(
            "INSERT INTO destinations (tenant, project, destination, mode, url, max_pending)"
            " VALUES (%s, %s, %s, %s, %s, %s) RETURNING stream",
            [tenant, project, name, mode, url if mode == "push" else None, max_pending],
        ).fetchone()
        assert row is not None
        owner.execute("INSERT INTO destination_health (tenant, stream) VALUES (%s, %s)", [tenant, row[0]])
    return Destination(access, row[0], name, project, tenant)


def decision(**changes: Any) -> dict[str, Any]:
    """The data of a decision about a fresh proposal; `changes` replaces members."""
    return {
        "kind": "proposal-decision",
        "proposalId": str(uuid4()),
        "revision": 1,
        "decision": "accepted",
    } | changes


def wish(destination: str = DESTINATION, /, **members: Any) -> Wish:
    """A wish of a decision under a fresh key; `members` replaces what it has."""
    return Wish(**({"destination": destination, "data": decision(), "idempotency_key": str(uuid4())} | members))


def require_whole(destination: Destination, public_key: bytes) -> list[Kept]:
    """Numbers go from 1 to the highest without a hole; each is signed over what its row says. Returns all."""
    rows = destination.rows()
    assert [row.sequence for row in rows] == list(range(1, destination.highest() + 1))
    for row in rows:
        envelope = dsse.unwrap(dsse.wrap(row.payload, row.keyid, row.signature))
        assert ed25519.verify(public_key, envelope.signed_bytes, row.signature)
        assert row.keyid == ed25519.thumbprint(public_key)
        assert row.event_identity == envelope.identity
        event = v1.open_delivery(row.payload)
        assert event.route == v1.Route(
            tenant=destination.tenant,
            project=destination.project,
            producer="controlplane",
            audience=destination.name,
        )
        assert (event.sequence, event.event_id) == (row.sequence, row.event_id)
        assert event.idempotency_key == row.idempotency_key
    return rows


def audited(access: Access, tenant: str = TENANT) -> list[tuple[str, str, str, bytes | None]]:
    """Account, action, outcome and event identity of a tenant's trail, oldest first."""
    with as_owner(access) as owner:
        query = "SELECT account, action, outcome, event_identity FROM audit_events WHERE tenant = %s ORDER BY id"
        return owner.execute(query, [tenant]).fetchall()

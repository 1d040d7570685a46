"""Destinations with mail in them, worked on by the functions of the service as the roles of the service."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from uuid import UUID, uuid4

import psycopg

from fleet import as_owner
from postseal.postgres import destinations
from postseal.postgres.access import Access
from postseal.postgres.database import Part, connect
from postseal.postgres.deliveries import Claimed, Lease, Wanted, WorkLane, claim
from postseal.postgres.sealing import SealedRow, insert_sealed, lock_destinations
from postseal.postgres.settles import Settle, settle
from postseal.postgres.transaction import Connection, in_transaction
from postseal.rules.delivery import Code, Verdict

T = TypeVar("T")
Work = Callable[[Connection], Awaitable[T]]
URL = "https://receiver.example/mail"
TABLES = (
    "attempts",
    "settlements",
    "queue",
    "payloads",
    "deliveries",
    "intents",
    "enqueue_logins",
    "destination_secrets",
    "destination_health",
    "destinations",
    "signing_keys",
    "audit_events",
    "holds",
    "projects",
    "tenants",
)


def transact(access: Access, work: Work[T], part: Part = Part.DELIVERY) -> T:
    """The result of one transaction on a connection of the part's role."""
    return asyncio.run(transact_in_loop(access, work, part))


async def transact_in_loop(access: Access, work: Work[T], part: Part = Part.DELIVERY) -> T:
    """The same for whoever is in an event loop."""
    connection = await connect(access.of(part), prepare=False)
    try:
        return await in_transaction(connection, work)
    finally:
        await connection.close()


@dataclass(frozen=True, slots=True)
class Place:
    """A destination of a database, and what tests do with its mail."""

    access: Access
    tenant: str
    project: str
    name: str
    stream: int

    def seal(self, count: int = 1, **changes: Any) -> list[UUID]:
        """Seal so many deliveries; returns their ids."""

        async def work(connection: Connection) -> list[UUID]:
            return await seal(connection, self, count, **changes)

        return transact(self.access, work)

    def claim(
        self, *, fresh: int = 100, retries: int = 100, lane: WorkLane = "push", lease_s: float = 60, **since: Any
    ) -> Claimed:
        """Claim from this destination alone."""
        wanted = Wanted(self.stream, fresh, retries, **since)

        async def work(connection: Connection) -> Claimed:
            return await claim(connection, self.tenant, [wanted], lane=lane, lease_s=lease_s)

        return transact(self.access, work)

    def lease(self, **options: Any) -> Lease:
        """Claim what is one delivery."""
        [lease] = self.claim(**options).leases
        return lease

    def settle(self, *settles: Settle) -> set[tuple[int, int]]:
        """Settle, and return the fenced ones."""

        async def work(connection: Connection) -> set[tuple[int, int]]:
            return await settle(connection, self.tenant, settles)

        return transact(self.access, work)

    def kill(self, count: int = 1, *, code: Code = Code.STATUS_5XX, **changes: Any) -> list[UUID]:
        """Seal so many deliveries and give them up; returns their ids."""
        deliveries = self.seal(count, **changes)
        leases = self.claim(fresh=count).leases
        assert not self.settle(*(settled(lease, Verdict.DEAD, code) for lease in leases))
        return deliveries

    def end_leases(self) -> None:
        """Let all leases of the destination have ended a second ago."""
        self.as_owner(
            "UPDATE queue SET due_at = clock_timestamp() - interval '1 second' "
            "WHERE tenant = %(tenant)s AND stream = %(stream)s AND stage = 'leased'"
        )

    def make_due(self) -> None:
        """Let all that waits have been due for a second."""
        self.as_owner(
            "UPDATE queue SET due_at = clock_timestamp() - interval '1 second' "
            "WHERE tenant = %(tenant)s AND stream = %(stream)s AND stage <> 'leased'"
        )

    def expire(self) -> None:
        """Let the expiry of all that is queued have passed a second ago."""
        self.as_owner(
            "UPDATE queue SET expires_at = clock_timestamp() - interval '1 second', "
            "due_at = least(due_at, clock_timestamp() - interval '1 second') "
            "WHERE tenant = %(tenant)s AND stream = %(stream)s"
        )

    def disable(self, reason: Literal["operator", "gone"] = "operator") -> None:
        """Disable it, as an administrator."""

        async def work(connection: Connection) -> bool:
            return await destinations.disable(connection, self.tenant, self.stream, reason=reason)

        assert transact(self.access, work, Part.ADMIN)

    def enable(self) -> None:
        """Enable it, as an administrator."""

        async def work(connection: Connection) -> bool:
            return await destinations.enable(connection, self.tenant, self.stream)

        assert transact(self.access, work, Part.ADMIN)

    def rows(self, columns: str, table: str, order: str = "sequence") -> list[tuple[Any, ...]]:
        """What a table holds of this destination."""
        with as_owner(self.access) as owner:
            statement = f"SELECT {columns} FROM {table} WHERE tenant = %s AND stream = %s ORDER BY {order}"  # noqa: S608
            return owner.execute(statement.encode(), [self.tenant, self.stream]).fetchall()

    def as_owner(self, statement: str) -> None:
        """Change something behind the service's back."""
        with as_owner(self.access) as owner:
            owner.execute(statement.encode(), {"tenant": self.tenant, "stream": self.stream})


def place(
    access: Access,
    name: str = "orders",
    *,
    tenant: str = "acme",
    project: str = "apollo",
    mode: destinations.Mode = "push",
    max_pending: int = 1000,
) -> Place:
    """Make a destination, and its tenant and project where they are missing."""
    with as_owner(access) as owner:
        owner.execute("INSERT INTO tenants VALUES (%s) ON CONFLICT DO NOTHING", [tenant])
        owner.execute("INSERT INTO projects VALUES (%s, %s) ON CONFLICT DO NOTHING", [tenant, project])

    async def work(connection: Connection) -> int | None:
        url = URL if mode == "push" else None
        return await destinations.create(connection, tenant, project, name, mode=mode, url=url, max_pending=max_pending)

    stream = transact(access, work, Part.ADMIN)
    assert stream is not None
    return Place(access, tenant, project, name, stream)


async def seal(connection: Connection, place: Place, count: int, **changes: Any) -> list[UUID]:
    """Seal so many deliveries inside the caller's transaction; returns their ids."""
    locked = await lock_destinations(connection, place.tenant, [(place.project, place.name)])
    destination = locked.destinations[place.project, place.name]
    rows = [
        sealed_row(place, destination.highest + number, lane=destination.lane, **changes)
        for number in range(1, count + 1)
    ]
    await insert_sealed(connection, place.tenant, rows)
    return [row.delivery for row in rows]


def sealed_row(place: Place, sequence: int, **changes: Any) -> SealedRow:
    """A delivery under fresh names; `changes` replaces members."""
    delivery = uuid4()
    members: dict[str, Any] = {
        "stream": place.stream,
        "sequence": sequence,
        "delivery": delivery,
        "event_id": uuid4(),
        "idempotency_key": f"key:{delivery}",
        "content_hash": hashlib.sha256(b"content" + delivery.bytes).digest(),
        "event_identity": hashlib.sha256(delivery.bytes).digest(),
        "keyid": "k" * 43,
        "payload": b'{"sequence":%d}' % sequence,
        "signature": b"s" * 64,
        "lane": "push",
        "attempt_limit": 3,
        "expires_at_ms": None,
        "project": place.project,
        "account": "billing",
        "correlation_id": uuid4(),
    }
    return SealedRow(**members | changes)


def settled(lease: Lease, verdict: Verdict, code: Code | None = None, **more: Any) -> Settle:
    """What becomes of a lease."""
    return Settle(lease.stream, lease.sequence, lease.attempt, lease.token, verdict, code, **more)


def delivered(leases: Sequence[Lease]) -> list[Settle]:
    """All of them were."""
    return [settled(lease, Verdict.DELIVERED) for lease in leases]


def require_whole(access: Access) -> None:
    """Each delivery is in exactly one of queue and settlements, and what is pending is counted right."""
    with as_owner(access) as owner:
        astray = owner.execute(
            "SELECT v.stream, v.sequence, q.sequence, s.sequence FROM deliveries v "
            "LEFT JOIN queue q USING (tenant, stream, sequence) "
            "LEFT JOIN settlements s USING (tenant, stream, sequence) "
            "WHERE (q.sequence IS NULL) = (s.sequence IS NULL)"
        ).fetchall()
        counted = owner.execute(
            "SELECT d.stream, d.highest - h.settled, "
            "(SELECT count(*) FROM queue q WHERE q.tenant = d.tenant AND q.stream = d.stream), "
            "d.highest, (SELECT count(*) FROM deliveries v WHERE v.tenant = d.tenant AND v.stream = d.stream) "
            "FROM destinations d JOIN destination_health h USING (tenant, stream)"
        ).fetchall()
    assert astray == []
    assert [row for row in counted if row[1] != row[2] or row[3] != row[4]] == []


def empty(access: Access) -> None:
    """Take everything out that tests of mail put in: a new clone a test would take longer than most of them."""
    with as_owner(access) as owner, owner.transaction():
        for table in TABLES:
            owner.execute(f"DELETE FROM {table}".encode())  # noqa: S608


def moment(access: Access, offset_s: float = 0) -> Any:
    """The database's time, so many seconds later."""
    with as_owner(access) as owner:
        row = owner.execute("SELECT clock_timestamp() + make_interval(secs => %s)", [offset_s]).fetchone()
    assert row is not None
    return row[0]


def login_of_application(access: Access, name: str, password: str) -> str:
    """The connection string of a login that a deployment made for an application."""
    return psycopg.conninfo.make_conninfo(access.owner, user=name, password=password, passfile="/dev/null")

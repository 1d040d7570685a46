"""A database in which something of everything is, written by the service's own parts: nothing in it is amiss."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet import Device, as_owner, enrol
from outgoing import Destination, new_destination, signing_key, wish
from postseal.admin import streams
from postseal.admin.actor import Actor
from postseal.envelope.kinds import NO_KINDS
from postseal.outbound.outbox import Outbox
from postseal.outbound.wishes import Sealed
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.postgres.dead_letters import redrive_one
from postseal.postgres.deliveries import Wanted, claim
from postseal.postgres.mail import cancel
from postseal.postgres.settles import Settle, renew, settle
from postseal.rules.delivery import Code, Verdict
from postseal.service import running_service
from postseal.settings import Settings
from postseal.signing.pem_folder import PemFolder
from postseal.verdicts import Receipt

ACCOUNT = "owner-1"
LEASE_S = 3600.0
TABLES = """
SELECT relname FROM pg_class WHERE relnamespace = 'postseal'::regnamespace AND relkind IN ('r', 'S') ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Healthy:
    """What was made."""

    access: Access
    whole: Device
    """Acme's device-01: 1 to 10, 12, 13 and 15 are retained; the payload of 1 was swept."""
    raised: Device
    """Acme's device-02: 1, 3 and 5; the floor was raised to 2."""
    foreign: Device
    """Umbra's device-01: 1 to 3."""
    orders: Destination
    """Acme's, by sequence: 1 delivered, 2 dead, 3 tried and waiting, 4 out, 5 and 6 under leases that have ended (6
    without an attempt left), 7 dead and redriven, 8 cancelled, 9 expired, 10 never tried."""
    held: Destination
    """One delivery, held."""
    pulled: Destination
    """One delivery, never tried."""
    foreign_orders: Destination
    """Umbra's: one delivery, never tried."""


async def populate(access: Access, folder: Path) -> Healthy:
    """Make all of it in an empty database; signing keys get into `folder`."""
    whole, raised = enrol(access, "device-01"), enrol(access, "device-02")
    foreign = enrol(access, "device-01", tenant="umbra")
    async with running_service(Settings(window=64), access) as service:
        for device, sequences in ((whole, [*range(1, 11), 13, 12, 15]), (raised, [1, 3, 5]), (foreign, [1, 2, 3])):
            for sequence in sequences:
                body = device.envelope(sequence)
                for _ in range(2):  # the second one is a duplicate
                    assert isinstance(await service.inbox.receive(device.inbound(body)), Receipt)
        await service.inbox.receive(whole.inbound(whole.envelope(5)))  # a conflict
        await service.inbox.receive(whole.inbound(b"{}"))
    async with Database(access.of(Part.ADMIN), prepare=True) as admin:
        await admin.transact(
            lambda connection: streams.raise_floor(
                connection, Actor(ACCOUNT), "acme", "apollo", "device-02", floor=2, reason="lost"
            )
        )
    with as_owner(access) as owner:
        owner.execute("DELETE FROM payloads WHERE tenant = 'acme' AND stream = %s AND sequence = 1", [whole.stream])
    orders, held = new_destination(access), new_destination(access, "held")
    pulled = new_destination(access, "device-01", mode="pull")
    foreign_orders = new_destination(access, tenant="umbra")
    for tenant in ("acme", "umbra"):
        signing_key(access, folder, tenant)
    async with Database(access.of(Part.DELIVERY), prepare=True) as database:
        outbox = Outbox(database, PemFolder(folder), kinds=NO_KINDS, attempt_limit=8)
        await _order(database, outbox, orders)
        for destination in (held, pulled, foreign_orders):
            await _seal(outbox, destination)
        async with Database(access.of(Part.ADMIN), prepare=True) as admin:
            [eighth] = [row.delivery for row in orders.rows() if row.sequence == 8]
            await admin.transact(lambda connection: cancel(connection, "acme", "apollo", eighth))
            [seventh] = [row.delivery for row in orders.rows() if row.sequence == 7]
            await admin.transact(lambda connection: redrive_one(connection, "acme", "apollo", seventh, budget=8))
    orders.end(9, "expired", attempts=0)
    held.disable()
    return Healthy(access, whole, raised, foreign, orders, held, pulled, foreign_orders)


async def _order(database: Database, outbox: Outbox, orders: Destination) -> None:
    await _seal(outbox, orders, *([{}] * 5), {"attempt_limit": 1}, {})
    wanted = [Wanted(orders.stream, 7, 0)]
    claimed = await database.transact(
        lambda connection: claim(connection, orders.tenant, wanted, lane="push", lease_s=LEASE_S)
    )
    one, two, three, _, five, six, seven = sorted(claimed.leases, key=lambda lease: lease.sequence)
    ends = [
        Settle(orders.stream, lease.sequence, lease.attempt, lease.token, verdict, code, LEASE_S)
        for lease, verdict, code in (
            (one, Verdict.DELIVERED, None),
            (two, Verdict.DEAD, Code.REJECTED),
            (three, Verdict.RETRY, Code.STATUS_5XX),
            (seven, Verdict.DEAD, Code.REJECTED),
        )
    ]
    assert await database.transact(lambda connection: settle(connection, orders.tenant, ends)) == set()
    lost = [five, six]
    assert await database.transact(lambda connection: renew(connection, orders.tenant, lost, lease_s=-60.0)) == set()
    await _seal(outbox, orders, {}, {}, {})


async def _seal(outbox: Outbox, destination: Destination, *options: dict[str, Any]) -> None:
    wishes = [wish(destination.name, **each) for each in options or ({},)]
    for result in await outbox.enqueue(destination.tenant, destination.project, wishes, ACCOUNT):
        assert isinstance(result, Sealed)


def dump(access: Access) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables and sequences, by name."""
    with as_owner(access) as owner:
        names = [name for (name,) in owner.execute(TABLES.encode()).fetchall()]
        return {
            name: sorted(owner.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(name))).fetchall(), key=repr)
            for name in names
        }


@contextmanager
def copied(access: Access) -> Iterator[Access]:
    """A copy of a database to which nobody is connected, dropped at the end."""
    template, name = conninfo_to_dict(access.owner)["dbname"], f"test_{uuid4().hex}"
    assert isinstance(template, str)
    with as_owner(replace(access, owner=make_conninfo(access.owner, dbname="postgres"))) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
        try:
            yield replace(access, owner=make_conninfo(access.owner, dbname=name))
        finally:
            owner.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

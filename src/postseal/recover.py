"""After a crash or a restore: what waits, what was given up, what is missing; and ended leases are taken back.

1. read, in one snapshot: leases, dead letters, holes in devices' streams, and streams that nobody has written to since
   a restore
2. release what is out under leases that have ended, so that no worker waits for one that is dead

Nothing else is written. No attempt, limit, cursor, floor or identity is reset: what is missing stays missing until a
device sends it or an operator raises the floor, and what was given up is sent again by `dead-letter redrive` alone.
"""

from dataclasses import dataclass
from datetime import datetime

import psycopg

from postseal.admin.actor import Actor
from postseal.postgres.database import Database
from postseal.postgres.invariants import open_snapshot, read_time
from postseal.postgres.recovery import (
    DeadLetters,
    Leases,
    Listed,
    last_restore,
    list_dead_letters,
    list_holes,
    list_leases,
    list_quiet,
    release_ended,
    tenants_with_ended_leases,
)
from postseal.postgres.streams import Stream
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found, and what was done."""

    at: datetime
    """Of the snapshot, by the database's clock."""
    since: datetime | None
    """From when on a stream counts as written to; None: no restore is known, and none was named."""
    leases: Listed[Leases]
    dead_letters: Listed[DeadLetters]
    holes: Listed[Stream]
    quiet: Listed[Stream] | None
    """Streams that nobody has written to since; None where `since` is."""
    released: int
    """Deliveries whose leases had ended, and that wait again."""


async def recover(
    reading: str, delivery: Database, actor: Actor, *, since: datetime | None = None, releases: bool = True
) -> Recovery:
    """Look at everything, and release what is out under leases that have ended, unless that is not wanted.

    `reading` is the connection string of the role for administrators. `since` is by default when the database was
    restored last. Each tenant's trail tells what was released (`lease.release`). Raises psycopg.Error, and Unavailable:
    then some may have been released.
    """
    async with await psycopg.AsyncConnection.connect(reading, autocommit=True, prepare_threshold=None) as connection:
        await open_snapshot(connection)
        at = await read_time(connection)
        since = since or await last_restore(connection)
        leases, dead_letters = await list_leases(connection), await list_dead_letters(connection)
        holes = await list_holes(connection)
        quiet = None if since is None else await list_quiet(connection, since)
        tenants = await tenants_with_ended_leases(connection)
        await connection.execute("COMMIT")
    released = 0
    for tenant in tenants if releases else ():
        while number := await delivery.transact(lambda connection, t=tenant: _release(connection, actor, t)):
            released += number
    return Recovery(at, since, leases, dead_letters, holes, quiet, released)


async def _release(connection: Connection, actor: Actor, tenant: str) -> int:
    released = await release_ended(connection, tenant)
    if released:
        await actor.acted(connection, "lease.release", tenant=tenant, released=released)
    return released

"""Destinations, the secrets that sign requests to them, and how they fare."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, LiteralString
from uuid import UUID

from postseal.postgres.transaction import Connection

Mode = Literal["push", "pull"]


@dataclass(frozen=True, slots=True)
class Destination:
    """A destination as it stands, with its health.

    `disabled_reason` is 'operator', 'gone' (it answered 410) or 'retired' (its device was, so that it stays disabled).
    """

    stream: int
    project: str
    destination: str
    mode: Mode
    url: str | None
    max_pending: int
    disabled_at: datetime | None
    disabled_reason: str | None
    created_at: datetime
    highest: int
    pending: int
    failing_since: datetime | None
    last_failure_at: datetime | None
    last_code: str | None
    last_success_at: datetime | None
    next_due_at: datetime | None
    """When the next of its mail that waits or is out is due; None where there is none or it is held."""


@dataclass(frozen=True, slots=True)
class ListedSecret:
    """A secret without its secret. `sign_until` None: it signs until further notice."""

    secret: UUID
    scheme: str
    created_at: datetime
    sign_until: datetime | None


@dataclass(frozen=True, slots=True)
class EncryptedSecret:
    """A secret that still signs, as it lies in the database."""

    scheme: str
    encrypted: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TargetRow:
    """What a worker needs to know of a destination; `secrets` are those that sign now, newest first."""

    tenant: str
    stream: int
    project: str
    destination: str
    mode: Mode
    url: str | None
    disabled: bool
    secrets: list[EncryptedSecret]


CREATE: LiteralString = """
WITH made AS (
    INSERT INTO destinations (tenant, project, destination, mode, url, max_pending)
    VALUES (%(tenant)s, %(project)s, %(destination)s, %(mode)s, %(url)s, %(max_pending)s)
    ON CONFLICT DO NOTHING RETURNING tenant, stream
), healthy AS (
    INSERT INTO destination_health (tenant, stream) SELECT tenant, stream FROM made
)
SELECT stream FROM made
"""


async def create(
    connection: Connection,
    tenant: str,
    project: str,
    destination: str,
    *,
    mode: Mode,
    url: str | None,
    max_pending: int,
) -> int | None:
    """Make a destination; returns its stream, or None if the project has one of that name."""
    parameters = {
        "tenant": tenant,
        "project": project,
        "destination": destination,
        "mode": mode,
        "url": url,
        "max_pending": max_pending,
    }
    row = await (await connection.execute(CREATE, parameters)).fetchone()
    return row[0] if row else None


# The next one due is the first entry of one of six ranges of index; a minimum over the rows would read them all.
COLUMNS: LiteralString = """
SELECT d.stream, d.project, d.destination, d.mode, d.url, d.max_pending, d.disabled_at, d.disabled_reason,
       d.created_at, d.highest, d.highest - h.settled, h.failing_since, h.last_failure_at, h.last_code,
       h.last_success_at,
       (
           SELECT min(first.due_at)
           FROM (VALUES ('fresh'), ('retry'), ('leased')) AS s (stage)
           CROSS JOIN LATERAL (
               (
                   SELECT q.due_at FROM queue q
                   WHERE q.tenant = d.tenant AND q.stream = d.stream AND q.stage = s.stage AND q.lane = 'push'
                   ORDER BY q.due_at LIMIT 1
               )
               UNION ALL
               (
                   SELECT q.due_at FROM queue q
                   WHERE q.tenant = d.tenant AND q.stream = d.stream AND q.stage = s.stage AND q.lane = 'pull'
                   ORDER BY q.due_at LIMIT 1
               )
           ) AS first
       )
FROM destinations d
JOIN destination_health h ON h.tenant = d.tenant AND h.stream = d.stream
WHERE d.tenant = %(tenant)s AND d.project = %(project)s
"""
FIND: LiteralString = COLUMNS + "AND d.destination = %(destination)s"


async def find(connection: Connection, tenant: str, project: str, destination: str) -> Destination | None:
    """One destination, if there is such."""
    parameters = {"tenant": tenant, "project": project, "destination": destination}
    row = await (await connection.execute(FIND, parameters)).fetchone()
    return Destination(*row) if row else None


LOCK: LiteralString = """
SELECT FROM destinations
WHERE tenant = %(tenant)s AND project = %(project)s AND destination = %(destination)s FOR NO KEY UPDATE
"""


async def lock(connection: Connection, tenant: str, project: str, destination: str) -> Destination | None:
    """The same, which nobody else changes until this transaction ends; nor is anything sealed for it meanwhile."""
    parameters = {"tenant": tenant, "project": project, "destination": destination}
    await connection.execute(LOCK, parameters)
    # Another statement, which sees it as it is locked.
    return await find(connection, tenant, project, destination)


LIST: LiteralString = COLUMNS + "AND d.destination > %(after)s ORDER BY d.destination LIMIT %(limit)s"


async def list_of_project(
    connection: Connection, tenant: str, project: str, *, after: str, limit: int
) -> list[Destination]:
    """A project's destinations by name, at most `limit` from the first one behind `after` ('' for all) on."""
    parameters = {"tenant": tenant, "project": project, "after": after, "limit": limit}
    return [Destination(*row) for row in await (await connection.execute(LIST, parameters)).fetchall()]


DISABLE: LiteralString = """
UPDATE destinations SET disabled_at = clock_timestamp(), disabled_reason = %(reason)s
WHERE tenant = %(tenant)s AND stream = %(stream)s AND disabled_at IS NULL
"""


async def disable(connection: Connection, tenant: str, stream: int, *, reason: Literal["operator", "gone"]) -> bool:
    """Let nothing more of a destination be claimed; False if it was disabled already.

    The caller then calls `lanes.hold` until it returns 0, in transactions of their own.
    """
    parameters = {"tenant": tenant, "stream": stream, "reason": reason}
    return (await connection.execute(DISABLE, parameters)).rowcount == 1


ENABLE: LiteralString = """
UPDATE destinations SET disabled_at = NULL, disabled_reason = NULL
WHERE tenant = %(tenant)s AND stream = %(stream)s AND disabled_at IS NOT NULL
"""


async def enable(connection: Connection, tenant: str, stream: int) -> bool:
    """Let mail go to a destination again; False if it was enabled already.

    The caller then calls `lanes.unhold` until it returns 0, in transactions of their own.
    """
    return (await connection.execute(ENABLE, {"tenant": tenant, "stream": stream})).rowcount == 1


LOCK_OF_DEVICE: LiteralString = """
SELECT project, stream FROM destinations
WHERE tenant = %(tenant)s AND destination = %(device)s AND mode = 'pull'
ORDER BY stream FOR NO KEY UPDATE
"""
RETIRE: LiteralString = """
UPDATE destinations SET disabled_at = coalesce(disabled_at, clock_timestamp()), disabled_reason = 'retired'
WHERE tenant = %(tenant)s AND stream = ANY (%(streams)s)
"""


async def retire_of_device(connection: Connection, tenant: str, device: str) -> dict[str, int]:
    """Disable all that a device pulls from, for ever; returns the streams by project.

    What was disabled already keeps its time. The caller then calls `lanes.hold` as for `disable`.
    """
    cursor = await connection.execute(LOCK_OF_DEVICE, {"tenant": tenant, "device": device})
    pulled: dict[str, int] = dict(await cursor.fetchall())
    await connection.execute(RETIRE, {"tenant": tenant, "streams": list(pulled.values())})
    return pulled


CHANGE: LiteralString = """
UPDATE destinations
SET url = coalesce(%(url)s::text, url), max_pending = coalesce(%(max_pending)s::bigint, max_pending)
WHERE tenant = %(tenant)s AND stream = %(stream)s
"""


async def change(connection: Connection, tenant: str, stream: int, *, url: str | None, max_pending: int | None) -> None:
    """Give a destination another address (a push destination alone has one), or other room; what is None stays."""
    parameters = {"tenant": tenant, "stream": stream, "url": url, "max_pending": max_pending}
    await connection.execute(CHANGE, parameters)


INSERT_ENCRYPTED: LiteralString = """
INSERT INTO destination_secrets (tenant, stream, secret, scheme, encrypted)
VALUES (%(tenant)s, %(stream)s, %(secret)s, %(scheme)s, %(encrypted)s)
"""


async def insert_secret(
    connection: Connection, tenant: str, stream: int, *, secret: UUID, scheme: str, encrypted: bytes
) -> None:
    """Add a secret, which signs from now on; `secret` names it, so that the encryption can be bound to the name."""
    parameters = {"tenant": tenant, "stream": stream, "secret": secret, "scheme": scheme, "encrypted": encrypted}
    await connection.execute(INSERT_ENCRYPTED, parameters)


LET_OLDER_SIGN_UNTIL: LiteralString = """
UPDATE destination_secrets o
SET sign_until = least(o.sign_until, clock_timestamp() + make_interval(secs => %(for_s)s))
FROM destination_secrets n
WHERE n.tenant = %(tenant)s AND n.stream = %(stream)s AND n.secret = %(newest)s
  AND o.tenant = n.tenant AND o.stream = n.stream AND o.scheme = n.scheme AND o.secret <> n.secret
"""


async def let_older_sign_until(connection: Connection, tenant: str, stream: int, *, newest: UUID, for_s: int) -> int:
    """Let all other secrets of the scheme of `newest` sign `for_s` seconds more at most; returns how many there are.

    The caller has the destination's lock: a secret that came at the same time would sign for ever.
    """
    parameters = {"tenant": tenant, "stream": stream, "newest": newest, "for_s": for_s}
    return (await connection.execute(LET_OLDER_SIGN_UNTIL, parameters)).rowcount


DELETE_ENDED: LiteralString = """
DELETE FROM destination_secrets
WHERE tenant = %(tenant)s AND stream = %(stream)s AND sign_until <= clock_timestamp()
"""


async def delete_ended_secrets(connection: Connection, tenant: str, stream: int) -> None:
    """Take out the secrets of a destination that sign no more."""
    await connection.execute(DELETE_ENDED, {"tenant": tenant, "stream": stream})


LIST_SECRETS: LiteralString = """
SELECT secret, scheme, created_at, sign_until FROM destination_secrets
WHERE tenant = %(tenant)s AND stream = %(stream)s ORDER BY created_at DESC, secret
"""


async def list_secrets(connection: Connection, tenant: str, stream: int) -> list[ListedSecret]:
    """All secrets of a destination, newest first."""
    cursor = await connection.execute(LIST_SECRETS, {"tenant": tenant, "stream": stream})
    return [ListedSecret(*row) for row in await cursor.fetchall()]


READ_TARGETS: LiteralString = """
SELECT d.stream, d.project, d.destination, d.mode, d.url, d.disabled_at IS NOT NULL, s.scheme, s.encrypted
FROM unnest(%(streams)s::bigint[]) AS w (stream)
JOIN destinations d ON d.tenant = %(tenant)s AND d.stream = w.stream
LEFT JOIN destination_secrets s ON s.tenant = d.tenant AND s.stream = d.stream
                                AND (s.sign_until IS NULL OR clock_timestamp() < s.sign_until)
ORDER BY d.stream, s.created_at DESC, s.secret
"""


async def read_targets(connection: Connection, tenant: str, streams: Sequence[int]) -> dict[int, TargetRow]:
    """The targets of a tenant's streams by stream (role delivery); one that is not there does not exist."""
    parameters = {"tenant": tenant, "streams": list(streams)}
    targets: dict[int, TargetRow] = {}
    for row in await (await connection.execute(READ_TARGETS, parameters)).fetchall():
        stream, project, destination, mode, url, disabled, *secret = row
        target = targets.setdefault(stream, TargetRow(tenant, stream, project, destination, mode, url, disabled, []))
        if secret[0] is not None:
            target.secrets.append(EncryptedSecret(*secret))
    return targets

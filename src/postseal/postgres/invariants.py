"""What holds in every snapshot of the database, asked of all of it; here what both directions share.

A proof is one statement. It returns a row for each breach: the invariant that is broken, the place (tenant, project,
producer or destination, sequence, as far as there is one), and what was found there. Statements read whole tables in
whatever order the planner likes, spill to the server's disk where they must, and return nothing where all is well; so
neither side's memory grows with the database. Those that go through a table stream by stream do it by lateral joins,
which are index scans whatever the statistics say: a database that was just restored has none.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import LiteralString

from psycopg.rows import TupleRow

from postseal.postgres.transaction import Connection


class Invariant(StrEnum):
    """What can be broken: stable words. `docs/verifying.md` tells what each promises."""

    SCHEMA = "schema"
    GRANTS = "grants"
    # the database
    STREAM_ID_SHARED = "stream_id_shared"
    NUMBERS_BEHIND = "numbers_behind"
    REFERENCE_BROKEN = "reference_broken"
    KEY_MISNAMED = "key_misnamed"
    # inbound
    IDENTITY_MISSING = "identity_missing"
    IDENTITY_UNMARKED = "identity_unmarked"
    HIGHEST_WRONG = "highest_wrong"
    BITMAP_MALFORMED = "bitmap_malformed"
    FLOOR_UNEXPLAINED = "floor_unexplained"
    # outbound
    DELIVERY_MISSING = "delivery_missing"
    DELIVERY_UNNUMBERED = "delivery_unnumbered"
    DELIVERY_NOWHERE = "delivery_nowhere"
    DELIVERY_TWICE = "delivery_twice"
    DELIVERY_UNKNOWN = "delivery_unknown"
    DELIVERY_IMPOSSIBLE = "delivery_impossible"
    SETTLED_WRONG = "settled_wrong"
    # both
    KEY_UNKNOWN = "key_unknown"
    AUDIT_MISSING = "audit_missing"
    ACCEPTED_LOST = "accepted_lost"
    ACCEPTED_TWICE = "accepted_twice"
    PAYLOAD_ORPHANED = "payload_orphaned"
    PAYLOAD_MISSING = "payload_missing"
    PAYLOAD_EXPIRY = "payload_expiry"
    EVENT_IDENTITY_WRONG = "event_identity_wrong"
    CONTENT_WRONG = "content_wrong"
    SIGNATURE_WRONG = "signature_wrong"


@dataclass(frozen=True, slots=True)
class Breach:
    """One place where an invariant does not hold. None of its members is a secret, a payload or a signature."""

    invariant: Invariant
    tenant: str | None
    project: str | None
    producer: str | None
    """Of an inbound stream."""
    destination: str | None
    """Of an outbound one."""
    sequence: int | None
    detail: str

    def __str__(self) -> str:
        """One line for people."""
        names = (self.tenant, self.project, self.producer or self.destination, self.sequence)
        place = " ".join(str(name) for name in names if name is not None)
        return f"{self.invariant}: {place}: {self.detail}" if place else f"{self.invariant}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Proof:
    """One statement, and what it proves in a few words."""

    name: str
    statement: LiteralString


# The snapshot is taken by the first statement after these. A login for which row level security would leave rows out
# gets an error instead. Its reads wait for nobody but a migration, and stop nobody but one.
BEGIN: LiteralString = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
SET_BOUNDS: LiteralString = """
SELECT set_config('search_path', 'postseal', true), set_config('row_security', 'off', true),
       set_config('lock_timeout', '5s', true), set_config('statement_timeout', '0', true),
       set_config('idle_in_transaction_session_timeout', '5min', true),
       set_config('work_mem', '64MB', true), set_config('cursor_tuple_fraction', '1', true),
       set_config('jit', 'off', true)
"""
NOW: LiteralString = "SELECT now()"


async def open_snapshot(connection: Connection) -> None:
    """Begin the one transaction in which everything is read. Nothing can be written in it."""
    await connection.execute(BEGIN)
    await connection.execute(SET_BOUNDS)


async def read_time(connection: Connection) -> datetime:
    """When the transaction began, by the database's clock."""
    [now] = await _row(connection, NOW)
    return now


HAS_SCHEMA: LiteralString = "SELECT to_regclass('postseal.schema_migrations') IS NOT NULL"
VERSION: LiteralString = "SELECT coalesce(max(version), 0) FROM schema_migrations"


async def read_version(connection: Connection) -> int:
    """The version of the database's schema; 0 for none."""
    [has_schema] = await _row(connection, HAS_SCHEMA)
    if not has_schema:
        return 0
    [version] = await _row(connection, VERSION)
    return version


async def find_breaches(connection: Connection, proof: Proof) -> AsyncGenerator[Breach]:
    """What a proof finds, row by row as the server sends it, however much that is."""
    async for row in connection.cursor().stream(proof.statement):
        invariant, *columns = row
        yield Breach(Invariant(invariant), *columns)


COUNT_ROWS: LiteralString = """
SELECT (SELECT count(*) FROM streams), (SELECT count(*) FROM identities), (SELECT count(*) FROM payloads),
       (SELECT count(*) FROM destinations), (SELECT count(*) FROM deliveries), (SELECT count(*) FROM queue),
       (SELECT count(*) FROM settlements), (SELECT count(*) FROM audit_events)
"""
COUNTED = ("streams", "identities", "payloads", "destinations", "deliveries", "queue", "settlements", "audit_events")


async def count_rows(connection: Connection) -> dict[str, int]:
    """How many rows the tables have that grow, by name."""
    return dict(zip(COUNTED, await _row(connection, COUNT_ROWS), strict=True))


async def _row(connection: Connection, statement: LiteralString) -> TupleRow:
    row = await (await connection.execute(statement)).fetchone()
    assert row is not None  # noqa: S101 - each of them has one row
    return row


# Streams of both directions, by the number that their rows carry.
_PLACES: LiteralString = """
    SELECT tenant, stream, project, producer, NULL AS destination FROM streams
    UNION ALL
    SELECT tenant, stream, project, NULL, destination FROM destinations
"""

STREAM_IDS: LiteralString = """
WITH places AS ({places})
SELECT 'stream_id_shared', p.tenant, p.project, p.producer, p.destination, NULL::bigint,
       format('stream %s is another one''s too', p.stream)
FROM (SELECT *, count(*) OVER (PARTITION BY stream) AS number FROM places) AS p WHERE p.number > 1
""".replace("{places}", _PLACES)

# A generator that stands behind what it gave out would give it out again. They are no part of a snapshot, and never
# stand behind one that was taken before.
GENERATORS: LiteralString = """
SELECT 'numbers_behind', NULL, NULL, NULL, NULL, NULL::bigint,
       format('%s gives %s next, and there is %s', g.generator, g.upcoming, g.used)
FROM (
    SELECT 'stream_ids' AS generator, last_value + is_called::int AS upcoming, (
               SELECT max(stream) FROM ({places}) AS p
           ) AS used FROM stream_ids
    UNION ALL
    SELECT 'audit_events_id_seq', last_value + is_called::int, (SELECT max(id) FROM audit_events)
    FROM audit_events_id_seq
    UNION ALL
    SELECT 'platform_audit_events_id_seq', last_value + is_called::int, (SELECT max(id) FROM platform_audit_events)
    FROM platform_audit_events_id_seq
) AS g WHERE g.upcoming <= g.used
""".replace("{places}", _PLACES)

# What foreign keys do not hold: hot tables have none, and arrays cannot.
REFERENCES: LiteralString = """
SELECT 'reference_broken', s.tenant, s.project, s.producer, NULL, NULL::bigint,
       CASE WHEN p.project IS NULL THEN 'the tenant has no such project' ELSE 'the tenant has no such device' END
FROM streams s LEFT JOIN projects p USING (tenant, project)
LEFT JOIN devices d ON d.tenant = s.tenant AND d.device = s.producer
WHERE p.project IS NULL OR d.device IS NULL
UNION ALL
SELECT 'reference_broken', h.tenant, NULL, NULL, NULL, NULL,
       format('destination_health has stream %s, which is no destination of the tenant', h.stream)
FROM destination_health h LEFT JOIN destinations d USING (tenant, stream) WHERE d.stream IS NULL
UNION ALL
SELECT 'reference_broken', c.tenant, NULL, NULL, NULL, NULL,
       format('credential %s is of device %s, which the tenant does not have', c.credential_id, c.device)
FROM credentials c LEFT JOIN devices d USING (tenant, device) WHERE c.device IS NOT NULL AND d.device IS NULL
UNION ALL
SELECT 'reference_broken', n.tenant, n.project, NULL, NULL, NULL,
       format('%s names this project, which the tenant does not have', n.what)
FROM (
    SELECT tenant, unnest(projects) AS project, format('credential %s', credential_id) AS what FROM credentials
    UNION ALL
    SELECT tenant, unnest(projects || reach), format('an invitation of device %s', device) FROM invitations
    UNION ALL
    SELECT tenant, unnest(projects), format('login %s', login) FROM enqueue_logins
) AS n LEFT JOIN projects p USING (tenant, project) WHERE p.project IS NULL
UNION ALL
SELECT 'reference_broken', a.tenant, a.project, NULL, NULL, NULL,
       format('%s audit events are of this, which there is not', a.number)
FROM (SELECT tenant, project, count(*) AS number FROM audit_events GROUP BY tenant, project) AS a
LEFT JOIN tenants t USING (tenant) LEFT JOIN projects p USING (tenant, project)
WHERE t.tenant IS NULL OR (a.project IS NOT NULL AND p.project IS NULL)
"""

# The thumbprint as envelope/ed25519.py makes it.
KEY_IDS: LiteralString = """
SELECT 'key_misnamed', k.tenant, NULL, k.device, NULL, NULL::bigint,
       format('key %s is not the thumbprint of its public key', k.keyid)
FROM (
    SELECT tenant, device, keyid, public_key FROM keys
    UNION ALL
    SELECT tenant, NULL, keyid, public_key FROM signing_keys
) AS k
WHERE k.keyid <> rtrim(translate(encode(sha256(convert_to(format(
    '{"crv":"Ed25519","kty":"OKP","x":"%s"}', rtrim(translate(encode(k.public_key, 'base64'), '+/', '-_'), '=')
), 'UTF8')), 'base64'), '+/', '-_'), '=')
"""

PAYLOADS: LiteralString = """
WITH places AS ({places})
SELECT 'payload_orphaned', o.tenant, p.project, p.producer, p.destination, o.sequence,
       CASE WHEN p.destination IS NOT NULL THEN 'a payload without a delivery'
            WHEN p.producer IS NOT NULL THEN 'a payload without an identity'
            ELSE format('a payload of stream %s, which the tenant does not have', o.stream) END
FROM (
    SELECT p.tenant, p.stream, p.sequence FROM payloads p
    LEFT JOIN identities i USING (tenant, stream, sequence)
    LEFT JOIN deliveries v USING (tenant, stream, sequence)
    WHERE i.sequence IS NULL AND v.sequence IS NULL
) AS o LEFT JOIN places p USING (tenant, stream)
""".replace("{places}", _PLACES)

GENERAL = (
    Proof("streams are told apart", STREAM_IDS),
    Proof("numbers are not given out again", GENERATORS),
    Proof("nothing names what its tenant does not have", REFERENCES),
    Proof("keys bear their own names", KEY_IDS),
    Proof("payloads have their identities", PAYLOADS),
)

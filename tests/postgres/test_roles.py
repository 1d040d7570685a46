"""Each part's role can do its own work and nothing else, tried as that role and read from the catalogues."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors
from snapshots import require_same

from fleet import as_owner, enrol
from postseal.postgres import grants
from postseal.postgres.access import Access
from postseal.postgres.database import Part, connect
from postseal.postgres.grants import listed_grants, read_grants
from postseal.postgres.transaction import in_transaction

DENIED = errors.InsufficientPrivilege


def as_part(access: Access, part: Part) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection of one part's role."""
    return psycopg.connect(access.of(part), autocommit=True, options="-c search_path=postseal")


def test_snapshot_of_all_grants(access: Access):
    """Who may do what to which table, column, sequence, function and schema: the whole list, as it is shipped."""

    async def read() -> list[str]:
        connection = await connect(access.owner, prepare=False)
        async with connection:
            return await in_transaction(connection, read_grants)

    require_same(Path(grants.__file__).with_name("grants.txt"), asyncio.run(read()))


def test_nothing_is_granted_to_everybody(access: Access):
    """PUBLIC stands nowhere in the list, and none of it may be passed on."""
    lines = listed_grants()
    assert lines
    assert not [line for line in lines if "PUBLIC" in line or "grant option" in line]


def test_everything_belongs_to_the_owner(access: Access):
    """No table is owned by a role that can log in."""
    with as_owner(access) as owner:
        owners = owner.execute(
            "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'postseal'::regnamespace"
        ).fetchall()
    assert owners == [("postseal_owner",)]


def test_roles_inherit_nothing_and_bypass_nothing(access: Access):
    """The owner cannot log in, the parts can; none of them is special, and none is a member of another."""
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT rolname, rolcanlogin, rolsuper, rolcreaterole, rolcreatedb, rolinherit, rolreplication, "
            "rolbypassrls FROM pg_roles WHERE rolname LIKE 'postseal\\_%' ORDER BY rolname"
        ).fetchall()
        memberships = owner.execute(
            "SELECT member::regrole::text FROM pg_auth_members WHERE member::regrole::text LIKE 'postseal\\_%'"
        ).fetchall()
    ours = {f"postseal_{part}" for part in Part}
    assert {name: login for name, login, *_ in rows} == dict.fromkeys(ours, True) | {"postseal_owner": False}
    assert all(not any(special) for _, _, *special in rows)
    assert memberships == []


def test_each_part_connects_as_its_own_role(access: Access):
    """With its own password, and it cannot become another one."""
    for part in Part:
        with as_part(access, part) as connection:
            assert connection.execute("SELECT current_user").fetchone() == (f"postseal_{part}",)
            for other in [f"postseal_{each}" for each in Part if each != part] + ["postseal_owner", "postgres"]:
                with pytest.raises(DENIED):
                    connection.execute(f"SET ROLE {other}".encode())


TABLES = [
    "attempts",
    "audit_events",
    "credentials",
    "deliveries",
    "destination_health",
    "destination_secrets",
    "destinations",
    "devices",
    "enqueue_logins",
    "holds",
    "identities",
    "invitations",
    "key_challenges",
    "key_uses",
    "keys",
    "keysets",
    "payloads",
    "platform_audit_events",
    "projects",
    "queue",
    "settlements",
    "signing_keys",
    "streams",
    "tenants",
]
OTHERS = [table for table in [*TABLES, "intents", "schema_migrations"] if table != "payloads"]
CANNOT: dict[Part, list[str]] = {
    Part.INGEST: [
        "UPDATE audit_events SET outcome = ''",
        "DELETE FROM audit_events",
        "TRUNCATE audit_events",
        "SELECT FROM audit_events",
        "SELECT FROM platform_audit_events",
        "INSERT INTO platform_audit_events (action, correlation_id) VALUES ('x', gen_random_uuid())",
        "UPDATE identities SET sequence = 2",
        "DELETE FROM identities",
        "UPDATE payloads SET payload = ''",
        "DELETE FROM payloads",
        "UPDATE streams SET floor = 1",
        "UPDATE streams SET retired = true",
        "DELETE FROM streams",
        "INSERT INTO streams (tenant, project, producer) VALUES ('acme', 'apollo', 'x')",
        "UPDATE keys SET state = 'active'",
        "INSERT INTO keys (tenant, keyid, device, public_key) VALUES ('acme', '', '', '')",
        "UPDATE credentials SET revoked_at = NULL",
        "DELETE FROM credentials",
        "SELECT FROM invitations",
        "SELECT nextval('stream_ids')",
    ],
    Part.ADMIN: [
        "UPDATE audit_events SET outcome = ''",
        "DELETE FROM audit_events",
        "TRUNCATE audit_events",
        "UPDATE platform_audit_events SET action = ''",
        "DELETE FROM platform_audit_events",
        "SELECT secret_hash FROM credentials",
        "UPDATE credentials SET projects = '{}'",
        "SELECT FROM identities",
        "INSERT INTO identities VALUES ('acme', 1, 1, gen_random_uuid(), gen_random_uuid(), '', '', now())",
        "UPDATE identities SET sequence = 2",
        "DELETE FROM identities",
        "INSERT INTO payloads VALUES ('acme', 1, 1, NULL, '', '')",
        "UPDATE payloads SET payload = ''",
        "DELETE FROM payloads",
        "DELETE FROM streams",
        "DELETE FROM keys",
        "UPDATE keys SET public_key = ''",
        "DELETE FROM devices",
        "SELECT payload FROM payloads",
        "SELECT encrypted FROM destination_secrets",
        "UPDATE destination_secrets SET encrypted = ''",
        "UPDATE destinations SET highest = 1",
        "UPDATE destinations SET mode = 'pull'",
        "DELETE FROM destinations",
        "UPDATE destination_health SET failing_since = NULL",
        "INSERT INTO deliveries (tenant) VALUES ('acme')",
        "UPDATE deliveries SET content_hash = ''",
        "DELETE FROM deliveries",
        "UPDATE queue SET attempt = 0",
        "UPDATE queue SET token = NULL",
        "UPDATE settlements SET state = 'delivered'",
        "UPDATE holds SET reason = ''",
        "INSERT INTO attempts (tenant) VALUES ('acme')",
        "DELETE FROM attempts",
        "SELECT data FROM intents",
        "SELECT * FROM intents",
        "INSERT INTO intents (tenant) VALUES ('acme')",
        "UPDATE intents SET due_at = now()",
        "UPDATE signing_keys SET public_key = ''",
        "DELETE FROM signing_keys",
        "UPDATE enqueue_logins SET login = ''",
        "SELECT may_enqueue('acme', 'apollo')",
    ],
    Part.DELIVERY: [
        "SELECT FROM audit_events",
        "UPDATE audit_events SET outcome = ''",
        "DELETE FROM audit_events",
        "TRUNCATE audit_events",
        "INSERT INTO platform_audit_events (action, correlation_id) VALUES ('x', gen_random_uuid())",
        "SELECT FROM credentials",
        "SELECT FROM devices",
        "SELECT FROM keys",
        "SELECT FROM streams",
        "SELECT FROM identities",
        "INSERT INTO destinations (tenant) VALUES ('acme')",
        "UPDATE destinations SET url = ''",
        "UPDATE destinations SET max_pending = 1",
        "DELETE FROM destinations",
        "INSERT INTO destination_secrets (tenant) VALUES ('acme')",
        "UPDATE destination_secrets SET sign_until = NULL",
        "DELETE FROM destination_secrets",
        "INSERT INTO destination_health (tenant) VALUES ('acme')",
        "DELETE FROM destination_health",
        "INSERT INTO signing_keys (tenant) VALUES ('acme')",
        "UPDATE signing_keys SET state = 'active'",
        "UPDATE deliveries SET content_hash = ''",
        "DELETE FROM deliveries",
        "UPDATE payloads SET payload = ''",
        "DELETE FROM payloads",
        "UPDATE queue SET sequence = 1",
        "UPDATE queue SET expires_at = NULL",
        "UPDATE attempts SET code = ''",
        "DELETE FROM attempts",
        "UPDATE settlements SET state = 'delivered'",
        "DELETE FROM settlements",
        "INSERT INTO intents (tenant) VALUES ('acme')",
        "UPDATE intents SET data = '{}'",
        "SELECT FROM enqueue_logins",
        "SELECT may_enqueue('acme', 'apollo')",
        "SELECT nextval('stream_ids')",
    ],
    Part.SWEEP: [
        "SELECT payload FROM payloads",
        "SELECT signature FROM payloads",
        "SELECT * FROM payloads",
        "UPDATE payloads SET expires_at = now()",
        "SELECT FROM payloads FOR UPDATE",
        "TRUNCATE payloads",
        "INSERT INTO payloads VALUES ('acme', 1, 1, NULL, '', '')",
        "SELECT FROM identities",
        "DELETE FROM identities",
        "SELECT FROM streams",
        "SELECT FROM audit_events",
        "DELETE FROM audit_events",
        "SELECT FROM credentials",
        "SELECT FROM deliveries",
        "SELECT FROM queue",
        "SELECT FROM destination_secrets",
        "SELECT FROM intents",
        "SELECT created_at FROM tenants",
        "SELECT payload_retention FROM tenants",
        "SELECT FROM projects",
        "SELECT reason FROM holds",
        *(
            statement.format(table)
            for table in OTHERS
            for statement in ("DELETE FROM {}", "INSERT INTO {} DEFAULT VALUES", "TRUNCATE {}")
        ),
    ],
}
# What an application can do with intents, the only other table, is in test_waiting_intents.py.
NOTHING_ELSE = [
    statement.format(table)
    for table in TABLES
    for statement in ("SELECT FROM {}", "DELETE FROM {}", "INSERT INTO {} DEFAULT VALUES", "TRUNCATE {}")
]
EVERY_PART_CANNOT = [
    "CREATE TABLE mine ()",
    "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "ALTER TABLE audit_events ADD COLUMN mine int",
    "DROP TABLE audit_events",
    "INSERT INTO schema_migrations (version, name) VALUES (9999, 'x')",
    "DELETE FROM schema_migrations",
    "CREATE ROLE mine",
    "SELECT pg_read_file('/etc/passwd')",
    "COPY tenants FROM PROGRAM 'true'",
]


@pytest.mark.parametrize("part", list(Part))
def test_what_a_part_cannot_do(access: Access, part: Part):
    """Each statement is refused for want of a privilege, whatever the tables hold."""
    enrol(access)
    statements = CANNOT.get(part, NOTHING_ELSE) + EVERY_PART_CANNOT
    with as_part(access, part) as connection:
        for statement in statements:
            with pytest.raises(DENIED):  # the statement stands among the locals of a failure
                connection.execute(statement.encode())


def test_the_sweep_deletes_what_has_expired_and_no_more_than_payloads(access: Access):
    """It finds them by their keys and expiry, which is all that it can read."""
    device = enrol(access)
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO payloads SELECT 'acme', %s, n, now() + (n - 3) * interval '1 hour', '', '' "
            "FROM generate_series(1, 5) AS n",
            [device.stream],
        )
        with as_part(access, Part.SWEEP) as sweep:
            deleted = sweep.execute(
                "DELETE FROM payloads WHERE (tenant, stream, sequence) IN "
                "(SELECT tenant, stream, sequence FROM payloads WHERE expires_at <= now() LIMIT 1000)"
            )
        assert deleted.rowcount == 3
        assert owner.execute("SELECT count(*) FROM payloads").fetchone() == (2,)

"""The schema as the migrations leave it: a snapshot, and the rules that every table keeps."""

from pathlib import Path

from snapshots import require_same

from fleet import as_owner
from postseal.postgres.access import Access

COLUMNS = """
SELECT format('%s.%s %s%s%s%s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
              CASE WHEN a.attcollation <> t.typcollation THEN ' collate ' || l.collname END,
              CASE WHEN a.attnotnull THEN ' not null' END,
              CASE WHEN a.attidentity <> '' THEN ' identity ' || a.attidentity::text
                   ELSE ' default ' || pg_get_expr(d.adbin, d.adrelid) END)
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p')
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_collation l ON l.oid = a.attcollation
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE c.relnamespace = 'postseal'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY c.relname, a.attnum
"""
# PostgreSQL 18 lists NOT NULL among the constraints, older ones do not; the columns tell it.
CONSTRAINTS = """
SELECT format('%s: %s %s', conrelid::regclass, conname, pg_get_constraintdef(oid))
FROM pg_constraint WHERE connamespace = 'postseal'::regnamespace AND contype <> 'n' ORDER BY 1
"""
INDEXES = """
SELECT indexdef FROM pg_indexes WHERE schemaname = 'postseal' ORDER BY indexname
"""
OTHERS = """
SELECT format('%s %s%s', CASE relkind WHEN 'r' THEN 'table' WHEN 'S' THEN 'sequence' ELSE relkind::text END,
              relname, ' with ' || array_to_string(reloptions, ', '))
FROM pg_class WHERE relnamespace = 'postseal'::regnamespace AND relkind NOT IN ('i', 'I', 't') ORDER BY 1
"""
ROUTINES = """
SELECT format('function %s', oid::regprocedure) FROM pg_proc WHERE pronamespace = 'postseal'::regnamespace
UNION ALL
SELECT format('trigger %s on %s', tgname, tgrelid::regclass) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = 'postseal'::regnamespace AND NOT tgisinternal
ORDER BY 1
"""

WITHOUT_TENANT_FIRST = {
    "credentials_pkey": "a credential is found before its tenant is known",
    "invitations_pkey": "so is a code",
    "platform_audit_events_pkey": "acts on the platform belong to no tenant",
    "schema_migrations_pkey": "nor do migrations",
}


def test_snapshot_of_the_schema(access: Access):
    """Columns, constraints, indexes, storage options and routines are those that are checked in."""
    with as_owner(access) as owner:
        lines = [
            line
            for query in (OTHERS, COLUMNS, CONSTRAINTS, INDEXES, ROUTINES)
            for (line,) in owner.execute(query.encode()).fetchall()
        ]
    require_same(Path(__file__).with_name("schema.txt"), lines)


def test_the_tenant_stands_first_in_every_key(access: Access):
    """So that no key can tie two tenants together, and the tables can be sharded by tenant."""
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT i.indexrelid::regclass::text, a.attname FROM pg_index i "
            "JOIN pg_class c ON c.oid = i.indrelid "
            "LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            "WHERE c.relnamespace = 'postseal'::regnamespace AND i.indisunique"
        ).fetchall()
    assert {index for index, first in rows if first != "tenant"} == WITHOUT_TENANT_FIRST.keys()


def test_hot_tables_have_no_foreign_keys(access: Access):
    """Each would lock the row that it points at, in every transaction of every device."""
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT DISTINCT conrelid::regclass::text FROM pg_constraint "
            "WHERE contype = 'f' AND connamespace = 'postseal'::regnamespace"
        ).fetchall()
    hot = {"streams", "identities", "payloads", "audit_events", "deliveries", "queue", "attempts", "settlements"}
    hot |= {"key_uses"}
    assert not {name for (name,) in rows} & (hot | {"destination_health", "intents"})


def test_no_index_holds_what_changes_in_a_stream(access: Access):
    """An index on what changes with each envelope would end heap-only updates, of streams and of destinations."""
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT i.indrelid::regclass::text, array_agg(DISTINCT a.attname::text) "
            "FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indexrelid "
            "WHERE i.indrelid IN ('streams'::regclass, 'destinations'::regclass, 'destination_health'::regclass) "
            "GROUP BY 1"
        ).fetchall()
    assert {table: set(columns) for table, columns in rows} == {
        "streams": {"tenant", "stream", "project", "producer"},
        "destinations": {"tenant", "stream", "project", "destination", "disabled_at"},
        "destination_health": {"tenant", "stream"},
    }


def test_only_intents_have_row_level_security(access: Access):
    """Applications write there under logins of their own; every other role names the tenant in each statement."""
    with as_owner(access) as owner:
        rows = owner.execute(
            "SELECT relname, relforcerowsecurity, array_agg(p.policyname::text ORDER BY p.policyname) FROM pg_class c "
            "LEFT JOIN pg_policies p ON p.schemaname = 'postseal' AND p.tablename = c.relname "
            "WHERE c.relnamespace = 'postseal'::regnamespace AND c.relrowsecurity GROUP BY 1, 2"
        ).fetchall()
    policies = ["intents_of_a_login", "intents_to_cancel", "intents_to_seal", "intents_to_see"]
    assert rows == [("intents", False, policies)]

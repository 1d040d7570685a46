"""Who may do what: the list of this release (`grants.txt`), and what a database's catalogues say.

The list is made by a test from a database that was migrated, and read in review. Roles stand in it under the prefix
`postseal`, whatever theirs is: it is told by the name of the role that owns the schema.
"""

from importlib import resources
from typing import LiteralString

from postseal.postgres.transaction import Connection

LISTED_PREFIX = "postseal_"

OWNER: LiteralString = """
SELECT r.rolname FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner WHERE n.nspname = 'postseal'
"""

# The information schema leaves column grants out.
GRANTED: LiteralString = """
SELECT g.thing, coalesce(r.rolname, 'PUBLIC'), a.privilege_type || CASE WHEN a.is_grantable THEN ' with grant option'
                                                                      ELSE '' END
FROM (
    SELECT 'table ' || c.relname AS thing, c.relacl AS acl
    FROM pg_class c WHERE c.relnamespace = 'postseal'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
    UNION ALL
    SELECT 'column ' || c.relname || '.' || a.attname, a.attacl
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE c.relnamespace = 'postseal'::regnamespace AND a.attacl IS NOT NULL
    UNION ALL
    SELECT 'function ' || p.oid::regprocedure, coalesce(p.proacl, acldefault('f', p.proowner))
    FROM pg_proc p WHERE p.pronamespace = 'postseal'::regnamespace
    UNION ALL
    SELECT 'schema ' || n.nspname, n.nspacl FROM pg_namespace n WHERE n.nspname = 'postseal'
) AS g, aclexplode(g.acl) AS a LEFT JOIN pg_roles r ON r.oid = a.grantee
UNION ALL
SELECT 'policy ' || c.relname || '.' || p.policyname, role, p.cmd || CASE WHEN c.relrowsecurity THEN '' ELSE ' off' END
FROM pg_policies p JOIN pg_class c ON c.relname = p.tablename AND c.relnamespace = 'postseal'::regnamespace,
     unnest(p.roles) AS role
WHERE p.schemaname = 'postseal'
UNION ALL
SELECT 'table ' || c.relname, r.rolname, 'OWNS'
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles r ON r.oid = c.relowner
WHERE n.nspname = 'postseal' AND c.relkind IN ('r', 'p', 'v', 'm', 'S') AND c.relowner <> n.nspowner
"""

# A role that is more than a login with grants needs none of them.
SPECIAL: LiteralString = """
SELECT r.rolname FROM pg_roles r
WHERE r.rolname = ANY (%(roles)s::text[])
  AND (r.rolsuper OR r.rolcreaterole OR r.rolcreatedb OR r.rolinherit OR r.rolreplication OR r.rolbypassrls
       OR EXISTS (SELECT FROM pg_auth_members m WHERE m.member = r.oid))
ORDER BY r.rolname
"""


def listed_grants() -> list[str]:
    """The grants of this release, one a line, in order."""
    return resources.files("postseal.postgres").joinpath("grants.txt").read_text("utf-8").splitlines()


async def read_grants(connection: Connection) -> list[str]:
    """The grants of a database, in the same form and order; the schema must be there, and be in the search path."""
    owner = await _owner(connection)
    prefix = owner.removesuffix("owner")
    cursor = await connection.execute(GRANTED)
    return sorted(
        f"{thing}: {f'{LISTED_PREFIX}{role.removeprefix(prefix)}' if role.startswith(prefix) else role} {privilege}"
        for thing, role, privilege in await cursor.fetchall()
        if role != owner
    )


async def read_special_roles(connection: Connection) -> list[str]:
    """Those of the service's roles that are more than logins with grants: superusers, members of others and the like.

    By their names in this cluster.
    """
    prefix = (await _owner(connection)).removesuffix("owner")
    listed = {line.partition(": ")[2].partition(" ")[0] for line in listed_grants()} | {f"{LISTED_PREFIX}owner"}
    roles = [f"{prefix}{role.removeprefix(LISTED_PREFIX)}" for role in listed]
    cursor = await connection.execute(SPECIAL, {"roles": roles})
    return [role for (role,) in await cursor.fetchall()]


async def _owner(connection: Connection) -> str:
    row = await (await connection.execute(OWNER)).fetchone()
    assert row is not None  # noqa: S101 - the schema is there
    return row[0]

"""Which streams a device pulls: the destinations of its own name (role delivery)."""

from collections.abc import Collection
from typing import LiteralString

from postseal.postgres.transaction import Connection

PULLED: LiteralString = """
SELECT project, stream FROM destinations
WHERE tenant = %(tenant)s AND project = ANY (%(projects)s) AND destination = %(device)s AND mode = 'pull'
ORDER BY project
"""


async def read_pulled(connection: Connection, *, tenant: str, device: str, projects: Collection[str]) -> dict[str, int]:
    """The stream of each of `projects` in which the device has a destination to pull from."""
    parameters = {"tenant": tenant, "device": device, "projects": list(projects)}
    cursor = await connection.execute(PULLED, parameters)
    return dict(await cursor.fetchall())

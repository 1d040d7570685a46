"""An acknowledgement means that a power cut does not undo it; a server that is set otherwise is refused."""

import psycopg
from psycopg.rows import tuple_row

from postseal.errors import StartupError

REQUIRED = ("fsync", "full_page_writes", "synchronous_commit")


def check_durability(conn: psycopg.Connection) -> None:
    """Raise StartupError naming each setting that is off in this session, by whatever level it was set."""
    with conn.transaction(), conn.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(
            "SELECT name FROM pg_settings WHERE name = ANY(%s) AND setting = 'off' ORDER BY name",
            [list(REQUIRED)],
        )
        off = [str(name) for (name,) in cursor]
    if off:
        raise StartupError(f"PostgreSQL runs with {', '.join(off)} off, so commits can be lost: turn it on")

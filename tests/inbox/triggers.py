"""Faults that a real PostgreSQL has: triggers of the owner's that fail, sleep or warn, on the tables of a group."""

from collections.abc import Generator
from contextlib import contextmanager

from psycopg import sql

from fleet import as_owner
from postseal.postgres.access import Access

WRITES = {"identities": "INSERT", "payloads": "INSERT", "audit_events": "INSERT", "streams": "UPDATE"}
"""What a group writes, in the order of its statement."""


@contextmanager
def trigger(access: Access, table: str, body: str, *, at_commit: bool = False) -> Generator[None]:
    """Run the PL/pgSQL `body` before each row that a group writes to `table`, or `at_commit`, until the block ends."""
    kind = "CONSTRAINT TRIGGER fault AFTER" if at_commit else "TRIGGER fault BEFORE"
    when = "DEFERRABLE INITIALLY DEFERRED" if at_commit else ""
    with as_owner(access) as owner:
        owner.execute(
            "CREATE OR REPLACE FUNCTION fault() RETURNS trigger SECURITY DEFINER SET search_path = postseal "
            f"LANGUAGE plpgsql AS $$ BEGIN {body} RETURN new; END $$".encode()
        )
        owner.execute(f"CREATE {kind} {WRITES[table]} ON {table} {when} FOR EACH ROW EXECUTE FUNCTION fault()".encode())
        try:
            yield
        finally:
            owner.execute(sql.SQL("DROP TRIGGER fault ON {}").format(sql.Identifier(table)))


def raising(sqlstate: str, *, only_event: str | None = None) -> str:
    """A body that fails with `sqlstate`; for the identities of one event alone if that is named."""
    fail = f"RAISE EXCEPTION 'a fault' USING ERRCODE = '{sqlstate}';"
    return f"IF new.event_id = '{only_event}' THEN {fail} END IF;" if only_event else fail


def raising_first(times: int, sqlstate: str) -> str:
    """A body that fails so often and then no more; the sequence `tries` counts, since nothing rolls it back."""
    return f"IF nextval('tries') <= {times} THEN {raising(sqlstate)} END IF;"

"""An application with a database login of its own, which may leave intents and nothing else."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet import as_owner
from outgoing import DESTINATION, PROJECT, TENANT, decision
from postseal.intents import Intent, intent
from postseal.postgres.access import Access


@dataclass(frozen=True, slots=True)
class Application:
    """A login that is allowed nothing yet."""

    access: Access = field(repr=False)
    login: str
    password: str = field(repr=False)

    @property
    def conninfo(self) -> str:
        """How it connects."""
        return make_conninfo(self.access.owner, user=self.login, password=self.password, passfile="")

    @property
    def parts(self) -> dict[str, Any]:
        """The same in parts, for other drivers."""
        return conninfo_to_dict(self.conninfo)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection in whose block everything is one transaction."""
        return psycopg.connect(self.conninfo)

    def allow(self, *projects: str, tenant: str = TENANT) -> None:
        """Let it leave intents for these projects, apollo where none are named."""
        with as_owner(self.access) as owner:
            owner.execute(
                "INSERT INTO enqueue_logins (login, tenant, projects) VALUES (%s, %s, %s)",
                [self.login, tenant, list(projects or [PROJECT])],
            )

    def leave(self, *intents: Intent) -> None:
        """Leave them, in one transaction."""
        with self.connect() as connection:
            for each in intents:
                connection.execute(*each.psycopg())


@contextmanager
def new_application(access: Access) -> Iterator[Application]:
    """Make a login in the cluster, a member of the role for intents; it is gone at the end."""
    application = Application(access, f"application-{uuid4()}", secrets.token_urlsafe(16))
    role = sql.Identifier(application.login)
    with as_owner(access) as owner:
        owner.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} IN ROLE postseal_enqueue").format(role, application.password)
        )
    try:
        yield application
    finally:
        with as_owner(access) as owner:
            owner.execute(sql.SQL("DROP ROLE {}").format(role))


def wanted(destination: str = DESTINATION, **members: Any) -> Intent:
    """An intent of a decision under a fresh key; `members` replaces what it has."""
    given: dict[str, Any] = {
        "tenant": TENANT,
        "project": PROJECT,
        "destination": destination,
        "data": decision(),
        "idempotency_key": f"key:{uuid4()}",
    }
    return intent(**(given | members))

"""What an application writes in its own transaction to have something sent (protocol section 7, "Outbox").

An intent is one row: it locks no stream, needs no key and is nothing if its transaction rolls back. The service seals
it within a second or so after the commit; the delivery then has the intent's id.

    with connection.transaction():                                       # psycopg
        cursor.execute("UPDATE orders SET state = 'accepted' WHERE id = %s", [order])
        cursor.execute(*intent("acme", "apollo", "orders", data, f"order:{order}").psycopg())

    await connection.execute(*intent(…).asyncpg())                       # asyncpg
    statement, parameters = intent(…).named()                            # SQLAlchemy
    session.execute(text(statement), parameters)

The statement is all there is to it; any language can run it. Nothing of the service is imported here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, LiteralString
from uuid import UUID, uuid4

_INSERT: Final[LiteralString] = (
    "INSERT INTO postseal.intents"
    " (tenant, delivery, project, destination, idempotency_key, data, attempt_limit, expires_at) VALUES "
)
INSERT_INTENT: Final[LiteralString] = _INSERT + "(%s, %s, %s, %s, %s, %s, %s, %s)"
"""The statement, in the form of psycopg. `data` is JSON text with its member `kind`; NULL leaves the last two open."""
INSERT_INTENT_NUMBERED: Final[LiteralString] = _INSERT + "($1, $2, $3, $4, $5, $6, $7, $8)"
"""The same in PostgreSQL's own form, as asyncpg takes it."""
INSERT_INTENT_NAMED: Final[LiteralString] = (
    _INSERT + "(:tenant, :delivery, :project, :destination, :idempotency_key, :data, :attempt_limit, :expires_at)"
)
"""The same with names, as SQLAlchemy's `text` takes it."""


@dataclass(frozen=True, slots=True)
class Intent:
    """One intent, ready to be written; its statements raise ValueError where `data` has no form in JSON.

    `delivery` is the id under which the delivery is found later, unless the idempotency key came before: then the first
    one's delivery stands for this one too, and nothing is found under its id.
    """

    tenant: str
    project: str
    destination: str
    data: Mapping[str, Any] = field(repr=False)
    idempotency_key: str
    attempt_limit: int | None
    expires_at: datetime | None
    delivery: UUID

    def psycopg(self) -> tuple[LiteralString, tuple[Any, ...]]:
        """Statement and parameters for `cursor.execute(*…)`."""
        return INSERT_INTENT, self._parameters()

    def asyncpg(self) -> tuple[Any, ...]:
        """Statement and parameters for `await connection.execute(*…)`."""
        return INSERT_INTENT_NUMBERED, *self._parameters()

    def named(self) -> tuple[LiteralString, dict[str, Any]]:
        """Statement and parameters for SQLAlchemy's `session.execute(text(…), …)`."""
        names = "tenant delivery project destination idempotency_key data attempt_limit expires_at"
        return INSERT_INTENT_NAMED, dict(zip(names.split(), self._parameters(), strict=True))

    def _parameters(self) -> tuple[Any, ...]:
        # Texts, which every driver passes: the columns say what they are.
        return (
            self.tenant,
            str(self.delivery),
            self.project,
            self.destination,
            self.idempotency_key,
            _json(self.data),
            self.attempt_limit,
            self.expires_at,
        )


def _json(data: Mapping[str, Any]) -> str:
    # Escapes would triple what is not ASCII, and the database takes 8,192 bytes.
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text in the data has half a surrogate pair, which has no form in JSON") from None
    return text


def intent(
    tenant: str,
    project: str,
    destination: str,
    data: Mapping[str, Any],
    idempotency_key: str,
    attempt_limit: int | None = None,
    expires_at: datetime | None = None,
) -> Intent:
    """An intent with a new delivery id. `data` is one of the payload's kinds, its member `kind` included.

    `idempotency_key` is what makes it one: written again with the same content it sends nothing new. ValueError for an
    `expires_at` without a time zone, which the database would read in a zone of its own.
    """
    if expires_at is not None and expires_at.tzinfo is None:
        raise ValueError("expires_at needs a time zone")
    return Intent(tenant, project, destination, data, idempotency_key, attempt_limit, expires_at, uuid4())

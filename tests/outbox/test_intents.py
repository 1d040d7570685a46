"""An application leaves intents in its own transactions and can do nothing else; each driver runs the statement."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
import sqlalchemy
from applications import Application, new_application, wanted
from psycopg import errors

from fleet import as_owner
from outgoing import Destination, decision, new_destination, new_tenant
from postseal.intents import Intent, intent
from postseal.postgres.access import Access

EXPIRES_AT = datetime(2090, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


@pytest.fixture(scope="module")
def its_destination(shared_access: Access) -> Destination:
    """A destination of project apollo; zeus and another tenant are there too."""
    new_tenant(shared_access, "acme", "zeus")
    new_tenant(shared_access, "beta")
    return new_destination(shared_access)


@pytest.fixture(scope="module")
def its_login(shared_access: Access, its_destination: Destination) -> Iterator[Application]:
    """A login that may leave intents for project apollo."""
    with new_application(shared_access) as application:
        application.allow()
        yield application


@pytest.fixture
def application(its_login: Application) -> Iterator[Application]:
    """The same, and nothing that an earlier test left."""
    yield its_login
    with as_owner(its_login.access) as owner:
        owner.execute("DELETE FROM intents")


LEFT = """
SELECT tenant, project, destination, idempotency_key, data, attempt_limit, expires_at, delivery, login, tries, code
FROM intents
"""


def left(application: Application) -> list[tuple[Any, ...]]:
    """The intents that wait."""
    with as_owner(application.access) as owner:
        return owner.execute(LEFT).fetchall()


def row_of(left: Intent, login: str) -> tuple[Any, ...]:
    """What an intent must be in the database."""
    return (
        left.tenant,
        left.project,
        left.destination,
        left.idempotency_key,
        left.data,
        left.attempt_limit,
        left.expires_at,
        left.delivery,
        login,
        0,
        None,
    )


HIDDEN = [
    "psycopg",
    "psycopg_pool",
    "starlette",
    "structlog",
    "aiohttp",
    "prometheus_client",
    "nacl",
    "msgspec",
    "typer",
]
FULL = {"attempt_limit": 3, "expires_at": EXPIRES_AT, "data": decision() | {"text": 'ünïcode \\ " % $1 :name'}}


@pytest.mark.parametrize("members", [{}, FULL], ids=["least", "most"])
def test_psycopg_leaves_it(application: Application, members: dict[str, Any]) -> None:
    """All that was given is in the row, and the login that left it."""
    one = wanted(**members)
    application.leave(one)
    assert left(application) == [row_of(one, application.login)]


@pytest.mark.parametrize("members", [{}, FULL], ids=["least", "most"])
def test_asyncpg_leaves_it(application: Application, members: dict[str, Any]) -> None:
    """The same through asyncpg."""
    one, parts = wanted(**members), application.parts

    async def leave() -> None:
        connection = await asyncpg.connect(
            host=parts["host"],
            port=int(parts["port"]),
            user=parts["user"],
            password=parts["password"],
            database=parts["dbname"],
        )
        try:
            async with connection.transaction():
                await connection.execute(*one.asyncpg())
        finally:
            await connection.close()

    asyncio.run(leave())
    assert left(application) == [row_of(one, application.login)]


@pytest.mark.parametrize("members", [{}, FULL], ids=["least", "most"])
def test_sqlalchemy_leaves_it(application: Application, members: dict[str, Any]) -> None:
    """The same through SQLAlchemy's `text`."""
    one = wanted(**members)
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=application.connect, poolclass=sqlalchemy.NullPool
    )
    statement, parameters = one.named()
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(statement), parameters)
    assert left(application) == [row_of(one, application.login)]


def test_a_transaction_that_rolls_back_leaves_nothing(application: Application) -> None:
    """Neither the application's own doing nor the intent."""
    with application.connect() as connection:
        connection.execute(*wanted().psycopg())
        connection.rollback()
    assert left(application) == []


@pytest.mark.parametrize(
    "members",
    [{"project": "zeus"}, {"tenant": "beta"}, {"tenant": "nobody"}, {"project": "nowhere"}],
    ids=["project", "tenant", "no tenant", "no project"],
)
def test_only_for_what_its_login_is_allowed(application: Application, members: dict[str, Any]) -> None:
    """Row level security refuses any other tenant and project, whatever they are."""
    with application.connect() as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute(*wanted(**members).psycopg())
    assert left(application) == []


def test_a_login_without_leave_leaves_nothing(application: Application) -> None:
    """Being a member of the role is not enough, nor is what another login may."""
    with (
        new_application(application.access) as stranger,
        stranger.connect() as connection,
        pytest.raises(errors.InsufficientPrivilege),
    ):
        connection.execute(*wanted().psycopg())


INSERT = "INSERT INTO postseal.intents (tenant, project, destination, idempotency_key, data, {}) VALUES {}"
MINE = "('acme', 'apollo', 'orders', 'key:00000001', '{}', %s)"
DENIED = [
    "SELECT FROM postseal.intents",
    "UPDATE postseal.intents SET data = '{}'",
    "DELETE FROM postseal.intents",
    "TRUNCATE postseal.intents",
    INSERT.format("login", MINE) % "'somebody-else'",
    INSERT.format("due_at", MINE) % "'-infinity'",
    "SELECT FROM postseal.enqueue_logins",
    "SELECT FROM postseal.destinations",
    "SELECT FROM postseal.deliveries",
    "SELECT FROM postseal.payloads",
    "SELECT FROM postseal.signing_keys",
    "SET ROLE postseal_delivery",
]


@pytest.mark.parametrize("statement", DENIED)
def test_an_application_can_do_nothing_else(application: Application, statement: str) -> None:
    """Not even look at what it left, or say that somebody else has left it."""
    application.leave(wanted())
    with application.connect() as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute(statement.encode())


UNFIT = {
    "an expiry that is no time": {"expires_at": "infinity"},
    "an expiry before all times": {"expires_at": "-infinity"},
    "an expiry behind all times": {"expires_at": "2100-01-02Z"},
    "too many attempts": {"attempt_limit": 101},
    "no attempt": {"attempt_limit": 0},
    "a short key": {"idempotency_key": "short"},
    "too much data": {"data": {"kind": "x" * 8192}},
    "a destination that is no name": {"destination": "No Such\n"},
    "a destination without end": {"destination": "x" * 64},
}


@pytest.mark.parametrize("members", UNFIT.values(), ids=UNFIT)
def test_the_application_hears_of_it(application: Application, members: dict[str, Any]) -> None:
    """What no delivery can have is refused in the application's own transaction."""
    unfit = replace(wanted(), **members)
    with application.connect() as connection, pytest.raises(errors.CheckViolation):
        connection.execute(*unfit.psycopg())
    assert left(application) == []


def test_it_locks_nothing(application: Application, its_destination: Destination) -> None:
    """A destination that is locked, as sealing locks it, keeps no application waiting."""
    with as_owner(application.access) as owner, owner.transaction():
        owner.execute("SELECT FROM destinations WHERE stream = %s FOR UPDATE", [its_destination.stream])
        application.leave(wanted())
    assert len(left(application)) == 1


def test_a_time_needs_a_zone() -> None:
    """The database would read it in a zone of its own."""
    with pytest.raises(ValueError, match="zone"):
        intent("acme", "apollo", "orders", decision(), "key:00000001", expires_at=datetime(2030, 1, 1))  # noqa: DTZ001


def test_a_text_in_any_script_has_room(application: Application) -> None:
    """Whatever fits into an envelope fits into an intent: no letter takes more bytes than it has."""
    one = wanted(data={"kind": "x", "text": "ж" * 2000, "more": "漢" * 1000})
    application.leave(one)
    assert left(application) == [row_of(one, application.login)]


@pytest.mark.parametrize("value", [float("nan"), "half \ud800"], ids=["NaN", "half a surrogate pair"])
def test_what_is_no_json_is_refused_at_once(value: object) -> None:
    """Before it comes to the database, where it would end the application's transaction."""
    with pytest.raises(ValueError, match="JSON"):
        wanted(data={"kind": "x", "revision": value}).psycopg()


def test_the_data_is_in_no_repr() -> None:
    """An intent can be logged."""
    assert "proposalId" not in repr(wanted())


def test_it_needs_nothing_of_the_service() -> None:
    """The module is imported by an application that has neither the server's half nor any driver."""
    program = (
        f"import sys; sys.modules |= dict.fromkeys({HIDDEN!r}); import postseal.intents;"
        "print(sorted(name for name in sys.modules if name.startswith('postseal')))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "['postseal', 'postseal.intents']\n"), ran.stderr

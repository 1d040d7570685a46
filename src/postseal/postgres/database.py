"""Connections: one login role a part of the service, a small pool for everything that is not a group commit."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool
from structlog.typing import FilteringBoundLogger

from postseal.errors import StartupError, Unavailable
from postseal.postgres import arrays
from postseal.postgres.shares import Shares
from postseal.postgres.transaction import (
    DATABASE_DEADLINE_S,
    Connection,
    in_transaction,
    is_discarded,
    within_deadline,
)

T = TypeVar("T")

_log: FilteringBoundLogger = structlog.get_logger("postseal.database")

POOL_WAIT_S = 5.0
"""How long a request waits for a connection before it is `unavailable`."""
POOL_SIZE = 8
TENANT_SHARES = 2
"""No tenant that is named has more than one part in so many of a pool."""
READ_POOL_SIZE = 4
"""Of the pool in which consumers read, so that they cannot take connections from envelopes."""
CONNECT_TIMEOUT_S = 5
MAX_IDLE_S = 300.0

KEEPALIVE = {
    # A frozen or cut-off server is noticed within seconds and not after the two hours that TCP allows.
    "connect_timeout": str(CONNECT_TIMEOUT_S),
    "tcp_user_timeout": "3000",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "target_session_attrs": "read-write",
}


@dataclass(frozen=True, slots=True)
class PoolStats:
    """How a pool stands; `timeouts` counts the requests that got no connection since it was opened."""

    connections: int
    idle: int
    waiting: int
    timeouts: int


class Part(StrEnum):
    """The parts of the service that connect, each as a role that may do only that part's work."""

    INGEST = "ingest"
    ADMIN = "admin"
    SWEEP = "sweep"
    DELIVERY = "delivery"
    ENQUEUE = "enqueue"


def conninfo_for(base: str, *, user: str | None = None, passfile: str | None = None) -> str:
    """`base` with our time-outs where it sets none, and as another user if one is given."""
    try:
        parameters = {name: str(value) for name, value in conninfo_to_dict(base).items() if value is not None}
    except psycopg.Error:
        # libpq's message repeats the string, and with it the password.
        raise StartupError("the database URL cannot be read; write postgresql://user@host/name") from None
    if user is not None:
        # Empty: left out, it would be PGPASSWORD's, which libpq prefers to a passfile.
        parameters |= {"user": user, "password": ""}
    if passfile is not None:
        parameters["passfile"] = passfile
    return make_conninfo("", **{"application_name": "postseal", **KEEPALIVE, **parameters})


async def connect(conninfo: str, *, prepare: bool) -> Connection:
    """One connection in autocommit mode, where each BEGIN and COMMIT is written out.

    `prepare` keeps statements prepared on the server; behind PgBouncer in transaction mode it must be off.
    Raises psycopg.OperationalError.
    """
    connection = await psycopg.AsyncConnection.connect(
        conninfo, autocommit=True, prepare_threshold=0 if prepare else None
    )
    arrays.register(connection)
    return connection


class Database:
    """One part's pool. Enter it to open the pool; every call is one transaction with a deadline."""

    def __init__(self, conninfo: str, *, prepare: bool, size: int = POOL_SIZE) -> None:
        self._shares = Shares(max(1, size // TENANT_SHARES), wait_s=POOL_WAIT_S)
        self._conninfo = conninfo
        self.keeps_sessions = prepare
        """Whether a connection is one session of the server's, which it is not behind PgBouncer in transaction mode."""
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]] = AsyncConnectionPool(
            conninfo,
            min_size=1,
            max_size=size,
            max_idle=MAX_IDLE_S,
            timeout=POOL_WAIT_S,
            # psycopg's own back-off doubles without a request; after it gave up, each request connects anew, so that
            # a database that comes back after an hour is in use at once.
            reconnect_timeout=POOL_WAIT_S,
            open=False,
            configure=_configure,
            reset=_require_whole,
            kwargs={"autocommit": True, "prepare_threshold": 1 if prepare else None},
        )

    async def __aenter__(self) -> Self:
        await self._pool.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pool.close()

    async def connect_apart(self) -> Connection:
        """A connection beside the pool, for whoever keeps a session. Raises psycopg.OperationalError."""
        return await connect(self._conninfo, prepare=self.keeps_sessions)

    def stats(self) -> PoolStats:
        """How the pool stands now."""
        stats = self._pool.get_stats()
        return PoolStats(
            connections=stats["pool_size"],
            idle=stats["pool_available"],
            waiting=stats["requests_waiting"],
            timeouts=stats.get("requests_errors", 0),
        )

    async def transact(self, work: Callable[[Connection], Awaitable[T]], *, tenant: str | None = None) -> T:
        """The result of `work`, once it has committed for certain.

        A `tenant` that is named waits for its share of the pool first; what may wait for locks of one names it.
        Raises Unavailable when the database cannot be reached, does not answer in time, or the commit is not
        certain; any other database error is a fault in our SQL and passes through.
        """

        async def in_its_own(connection: Connection) -> T:
            return await in_transaction(connection, work)

        async with self._shares.place(tenant):
            return await self.exchange(in_its_own)

    async def exchange(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, which begins and commits by itself on the connection that it is given.

        Raises what `transact` raises.
        """
        try:
            async with self._pool.connection() as connection:
                return await within_deadline(connection, work(connection), DATABASE_DEADLINE_S)
        except psycopg.OperationalError as error:
            # The cause is for the operator; whoever calls learns no more than that it may be tried again.
            _log.warning("database_failed", error=type(error).__name__, sqlstate=error.sqlstate)
            raise Unavailable("the database cannot be used at the moment") from None


async def _require_whole(connection: Connection) -> None:
    """Keep what was cut out of the pool: it may have been cut between two statements, and look idle."""
    if is_discarded(connection):
        raise psycopg.OperationalError("the connection was cut")


async def _configure(connection: Connection) -> None:
    arrays.register(connection)

"""One round trip: statements that are sent together and answered together, in libpq's pipeline mode.

What a group of one envelope costs is this module's work. psycopg's cursors make each statement anew, look at the type
of each parameter and keep a queue of what is prepared; here a statement is made once, its parameters are packed
already (`arrays.py`), and what one connection has prepared is a set of names.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, LiteralString
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors
from psycopg.adapt import Transformer
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult

from postseal.postgres.transaction import BEGIN, SET_BOUNDS_AND_PLANS, CommitWitness, Connection, discard

_DONE: Final = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
_ANSWERS: Final = (*_DONE, ExecStatus.FATAL_ERROR, ExecStatus.PIPELINE_ABORTED)
_PLACE: Final = re.compile(r"%\((\w+)\)s")


class Statement:
    """A statement whose parameters have names and casts in its text, as in `%(tenants)s::text[]`."""

    def __init__(self, text: LiteralString) -> None:
        names: dict[str, int] = {}
        sql = _PLACE.sub(lambda place: f"${names.setdefault(place[1], len(names) + 1)}", text)
        self.sql = sql.encode()
        self.parameters = tuple(names)
        self.name = b"ps_" + sha256(self.sql).hexdigest()[:16].encode()
        """What it is called where it is prepared."""

    def __call__(self, **parameters: bytes) -> "Call":
        """Say what to run it with: one packed value for each of its parameters."""
        return Call(self, parameters)


@dataclass(frozen=True, slots=True)
class Call:
    """A statement and its parameters, in PostgreSQL's binary form."""

    statement: Statement
    parameters: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one call. `tag` is the command tag, as in `UPDATE 3`."""

    rows: list[tuple[Any, ...]]
    tag: str


_BEGIN = Statement(BEGIN)()
_SET_BOUNDS_AND_PLANS = Statement(SET_BOUNDS_AND_PLANS)()
_COMMIT = Statement("COMMIT")()


async def in_one_exchange(connection: Connection, calls: Sequence[Call]) -> list[Answer]:
    """The answers to `calls`, once they have committed for certain: a transaction in one round trip.

    What is raised is as in `transaction.in_transaction`; after anything that is raised the connection is closed.
    """
    with CommitWitness(connection) as witness:
        try:
            _, _, *answers, committed = await exchange(connection, [_BEGIN, _SET_BOUNDS_AND_PLANS, *calls, _COMMIT])
            witness.require_commit(committed.tag)
        except BaseException:
            # Whatever failed, what was to be prepared behind it is not, and nobody knows what is.
            discard(connection)
            await connection.close()
            raise
    return answers


_prepared: WeakKeyDictionary[Connection, set[bytes]] = WeakKeyDictionary()


async def exchange(connection: Connection, calls: Sequence[Call]) -> list[Answer]:
    """The answers to `calls`, in order.

    Raises psycopg.Error: the first one that a call met, after which the others did nothing, or OperationalError where
    the connection was lost. After either, and where this is cancelled, the connection is good for nothing but to be
    thrown away.
    """
    pgconn = connection.pgconn
    prepared = None if connection.prepare_threshold is None else _prepared.setdefault(connection, set())
    pgconn.enter_pipeline_mode()
    prepares = [_send(pgconn, call, prepared) for call in calls]
    pgconn.pipeline_sync()
    results = await _results(pgconn)
    pgconn.exit_pipeline_mode()
    answers: list[Answer] = []
    remaining = iter(results)
    for prepare in prepares:
        if prepare:
            _require_done(next(remaining))
        result = next(remaining)
        _require_done(result)
        answers.append(Answer(_rows(connection, result), (result.command_status or b"").decode()))
    return answers


def _send(pgconn: PGconn, call: Call, prepared: set[bytes] | None) -> bool:
    """Send one call; whether its statement had to be prepared, which is answered first."""
    statement = call.statement
    values = [call.parameters[name] for name in statement.parameters]
    formats = [Format.BINARY] * len(values)
    if prepared is None:
        pgconn.send_query_params(statement.sql, values, None, formats, Format.BINARY)
        return False
    prepare = statement.name not in prepared
    if prepare:
        prepared.add(statement.name)  # at once: the same exchange may call it again
        pgconn.send_prepare(statement.name, statement.sql)
    pgconn.send_query_prepared(statement.name, values, formats, Format.BINARY)
    return prepare


async def _results(pgconn: PGconn) -> list[PGresult]:
    """All results up to the end of the pipeline, while the loop goes on."""
    while pgconn.flush():  # more than the socket takes: the server may wait until we read
        await _until_ready(pgconn.socket, writable=True)
        pgconn.consume_input()
    results: list[PGresult] = []
    ended = False
    while True:
        while pgconn.is_busy():
            await _read_more(pgconn)
        result = pgconn.get_result()
        if result is None:  # the end of one call's results
            if pgconn.status != ConnStatus.OK:
                raise psycopg.OperationalError("the connection was lost")
            if ended:  # of none that has begun
                await _read_more(pgconn)
            ended = True
        elif result.status == ExecStatus.PIPELINE_SYNC:
            return results
        elif result.status in _ANSWERS:
            ended = False
            results.append(result)
        else:  # such as COPY's, which comes again and again until somebody copies
            raise psycopg.OperationalError(f"the database answered with {ExecStatus(result.status).name}")


async def _read_more(pgconn: PGconn) -> None:
    await _until_ready(pgconn.socket, writable=False)
    pgconn.consume_input()


async def _until_ready(descriptor: int, *, writable: bool) -> None:
    """Return once the socket can be read, or written where that is asked for as well."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, tell)
    if writable:
        loop.add_writer(descriptor, tell)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
        if writable:
            loop.remove_writer(descriptor)


def _require_done(result: PGresult) -> None:
    """Nothing comes here that was not done but what failed first: what follows it is never looked at."""
    if result.status not in _DONE:
        raise errors.error_from_result(result)


def _rows(connection: Connection, result: PGresult) -> list[tuple[Any, ...]]:
    if not result.ntuples:
        return []
    transformer = Transformer(connection)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)

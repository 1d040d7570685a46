"""One round trip: statements that are sent together and answered together, on either event loop, prepared or not."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg import errors

from fleet import as_owner
from postseal.postgres import arrays
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database, Part, connect
from postseal.postgres.exchange import Call, Statement, exchange, in_one_exchange
from until import until_async

pytestmark = pytest.mark.anyio

DEADLINE_S = 20.0
LARGE_BYTES = 20 << 20
"""Many times what the buffers of both sockets hold, so that each side must read while it writes."""

COUNT_UP = Statement("SELECT n, n * 2 FROM generate_series(1, (%(n)s::bigint[])[1]) AS n")
DIVIDE = Statement("SELECT 1 / unnest(%(n)s::bigint[])")
NOTE = Statement("INSERT INTO noted SELECT unnest(%(n)s::bigint[])")
SLEEP = Statement("SELECT pg_sleep(unnest(%(n)s::bigint[]))")
ECHO = Statement("SELECT unnest(%(values)s::bytea[])")
BEGIN, COMMIT = Statement("BEGIN"), Statement("COMMIT")


def on(statement: Statement, *numbers: int) -> Call:
    """A call whose parameter is an array of integers."""
    return statement(n=arrays.int8s(numbers))


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Python's own event loop, and that of the service."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture(params=[True, False], ids=["prepared", "unprepared"])
async def connection(shared_access: Access, request: pytest.FixtureRequest) -> AsyncIterator[Connection]:
    """A connection as a lane has it; unprepared is how it is behind PgBouncer in transaction mode."""
    with as_owner(shared_access) as owner:
        owner.execute("CREATE TABLE IF NOT EXISTS noted (number bigint)")
        owner.execute("TRUNCATE noted")
        owner.execute("GRANT INSERT ON noted TO postseal_ingest")
    connection = await connect(shared_access.of(Part.INGEST), prepare=request.param)
    try:
        await connection.execute("SET search_path = postseal")
        yield connection
    finally:
        await connection.close()


def noted(access: Access) -> list[int]:
    """What was written for certain."""
    with as_owner(access) as owner:
        return [number for (number,) in owner.execute("SELECT number FROM noted ORDER BY number").fetchall()]


async def test_answers_come_in_order(shared_access: Access, connection: Connection) -> None:
    """Each with its rows and its command tag, in the first exchange and in later ones, prepared or not."""
    for round_ in range(1, 4):
        calls = [BEGIN(), on(COUNT_UP, 3), on(NOTE, round_, round_), on(COUNT_UP, 0), COMMIT()]
        answers = await exchange(connection, calls)
        assert [answer.tag for answer in answers] == ["BEGIN", "SELECT 3", "INSERT 0 2", "SELECT 0", "COMMIT"]
        assert [answer.rows for answer in answers] == [[], [(1, 2), (2, 4), (3, 6)], [], [], []]
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    assert noted(shared_access) == [1, 1, 2, 2, 3, 3]


async def test_a_statement_is_prepared_once_a_connection(connection: Connection) -> None:
    """Also where one exchange calls it twice; and never where a connection may be another session's the next time."""
    for _ in range(3):
        await exchange(connection, [on(COUNT_UP, 1), BEGIN(), on(COUNT_UP, 2), COMMIT()])
    cursor = await connection.execute("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'ps\\_%'")
    assert await cursor.fetchone() == (0 if connection.prepare_threshold is None else 3,)


async def test_nothing_is_done_after_the_first_error(shared_access: Access, connection: Connection) -> None:
    """That error is raised, with its SQLSTATE; neither what stands before it nor what stands behind it is done."""
    calls = [BEGIN(), on(NOTE, 1), on(DIVIDE, 1, 0), on(NOTE, 2), ECHO(values=b"no array"), COMMIT()]
    with pytest.raises(errors.DivisionByZero):
        await exchange(connection, calls)
    await connection.close()
    assert noted(shared_access) == []


async def test_a_statement_that_cannot_be_prepared_is_the_first_error(connection: Connection) -> None:
    """Its own error is raised, and not that what follows was left out."""
    with pytest.raises(errors.UndefinedTable):
        await exchange(connection, [BEGIN(), Statement("SELECT FROM nowhere")(), COMMIT()])


async def test_large_parameters_and_answers_pass(connection: Connection) -> None:
    """20 MB up and down at once: neither side waits for the other to read first."""
    value = bytes(range(256)) * (LARGE_BYTES // 256)
    whole, parts = arrays.byteas([value]), arrays.byteas([value[: 1 << 20]] * 20)
    async with asyncio.timeout(DEADLINE_S):
        first, second = await exchange(connection, [ECHO(values=whole), ECHO(values=parts)])
    assert first.rows == [(value,)]
    assert second.rows == [(value[: 1 << 20],)] * 20


@pytest.mark.parametrize("copy", [Statement("COPY (SELECT 1) TO STDOUT"), Statement("COPY noted FROM STDIN")])
async def test_an_answer_of_another_kind_is_refused(connection: Connection, copy: Statement) -> None:
    """COPY's comes again and again until somebody copies: taken for results, it would stop the whole loop."""
    with pytest.raises(psycopg.OperationalError, match="answered with COPY_"):
        await exchange(connection, [copy()])


async def test_notices_and_notifications_do_not_stand_in_the_way(shared_access: Access, connection: Connection) -> None:
    """Notices come to the connection's handlers; what others send on a channel changes no answer."""
    heard: list[str] = []
    connection.add_notice_handler(lambda diagnostic: heard.append(diagnostic.message_primary or ""))
    await connection.execute("LISTEN talk")
    warn = Statement("DO $$ BEGIN RAISE WARNING 'by the way'; END $$")
    with as_owner(shared_access) as owner:
        for number in range(1, 6):
            owner.execute("SELECT pg_notify('talk', n || repeat('x', 7000)) FROM generate_series(1, 20) AS n")
            answers = await exchange(connection, [warn(), on(COUNT_UP, 1), warn()])
            assert [answer.tag for answer in answers] == ["DO", "SELECT 1", "DO"]
            assert heard == ["by the way"] * 2 * number


def sleeps(access: Access, pid: int) -> bool:
    """Whether a server process is in the middle of SLEEP."""
    with as_owner(access) as owner:
        found = owner.execute("SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'", [pid])
        return found.rowcount == 1


def terminate(access: Access, pid: int) -> None:
    """End a server process; returns when it has ended."""
    with as_owner(access) as owner:
        assert owner.execute("SELECT pg_terminate_backend(%s, 10000)", [pid]).fetchone() == (True,)


async def test_a_connection_that_is_ended_meanwhile_is_lost(shared_access: Access, connection: Connection) -> None:
    """pg_terminate_backend in the middle of a pipeline: OperationalError at once, and nothing was done."""
    pid = connection.info.backend_pid
    exchanging = asyncio.create_task(exchange(connection, [BEGIN(), on(NOTE, 1), on(SLEEP, 600), COMMIT()]))
    await until_async(lambda: sleeps(shared_access, pid))
    terminate(shared_access, pid)
    with pytest.raises(psycopg.OperationalError):
        await asyncio.wait_for(exchanging, DEADLINE_S)
    assert connection.closed
    assert noted(shared_access) == []


@pytest.mark.parametrize("size_bytes", [1, LARGE_BYTES])
async def test_a_connection_that_was_ended_before_is_lost(
    shared_access: Access, connection: Connection, size_bytes: int
) -> None:
    """The same for one that the server closed while nobody looked, and however much is to be sent; and ever after."""
    terminate(shared_access, connection.info.backend_pid)
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError):
            async with asyncio.timeout(DEADLINE_S):
                await exchange(connection, [ECHO(values=arrays.byteas([bytes(size_bytes)])), COMMIT()])


async def test_an_exchange_that_is_cancelled_leaves_the_loop_alone(
    shared_access: Access, connection: Connection
) -> None:
    """Nothing watches its socket any more, whose number the next connection may get."""
    pid, descriptor = connection.info.backend_pid, connection.fileno()
    exchanging = asyncio.create_task(exchange(connection, [on(SLEEP, 600)]))
    await until_async(lambda: sleeps(shared_access, pid))
    exchanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchanging
    loop = asyncio.get_running_loop()
    assert not loop.remove_reader(descriptor)
    assert not loop.remove_writer(descriptor)
    terminate(shared_access, pid)


async def test_a_pool_is_good_after_a_call_that_failed(shared_access: Access) -> None:
    """What the first exchange of a connection did not get to prepare is not taken for prepared by the next one."""
    async with Database(shared_access.of(Part.DELIVERY), prepare=True, size=1) as database:
        with pytest.raises(errors.DivisionByZero):
            await database.exchange(lambda connection: in_one_exchange(connection, [on(DIVIDE, 0)]))
        for _ in range(2):
            [answer] = await database.exchange(lambda connection: in_one_exchange(connection, [on(DIVIDE, 1)]))
            assert answer.rows == [(1,)]

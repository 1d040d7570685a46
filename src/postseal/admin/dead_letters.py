"""Dead letters: deliveries that were given up. Listed and counted by tenant and project, and sent again.

What a receiver said is not kept: a code says why.
"""

from uuid import UUID

from postseal.admin.actor import Actor
from postseal.admin.names import require_code, require_projects
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import dead_letters, mail
from postseal.postgres.database import Database
from postseal.postgres.dead_letters import MAX_PAGE_ROWS, MAX_REDRIVEN, DeadFilter, DeadLetter, Position
from postseal.postgres.transaction import Connection
from postseal.rules.delivery import Code
from postseal.settings import MAX_ATTEMPTS

MAX_COUNTED = 100_000
"""Dead letters are counted up to here."""


async def page(
    connection: Connection, tenant: str, project: str, wanted: DeadFilter, *, after: Position | None, rows: int
) -> list[DeadLetter]:
    """At most `rows` (100 at most) dead letters of a project, the earliest given up first.

    AdminError: no such tenant, project or code.
    """
    if not 1 <= rows <= MAX_PAGE_ROWS:
        raise AdminError(Reason.REQUEST_INVALID, f"a page has 1 to {MAX_PAGE_ROWS} dead letters")
    await _require(connection, tenant, project, wanted)
    return await dead_letters.page(connection, tenant, project, wanted, after=after, rows=rows)


async def count(connection: Connection, tenant: str, project: str, wanted: DeadFilter) -> int:
    """How many there are, counted up to MAX_COUNTED. AdminError: no such tenant, project or code."""
    await _require(connection, tenant, project, wanted)
    return await dead_letters.count(connection, tenant, project, wanted, at_most=MAX_COUNTED)


async def redrive(
    connection: Connection, actor: Actor, tenant: str, project: str, delivery: UUID, *, budget: int
) -> None:
    """Let one dead letter be tried `budget` times more, beside the attempts that it had.

    AdminError: no such tenant, project or dead letter, a budget that is not 1 to 100, or a payload that is deleted.
    """
    _require_budget(budget)
    await require_projects(connection, tenant, [project])
    if not await dead_letters.redrive_one(connection, tenant, project, delivery, budget=budget):
        found = await mail.show(connection, tenant, delivery)
        state = found.state if found is not None and found.project == project else None
        if state == "dead":
            raise AdminError(Reason.CONFLICT, "its payload has expired and is deleted: there is nothing left to send")
        stands = f": the delivery is {state}" if state else ""
        raise AdminError(Reason.NOT_FOUND, f"project {project!r} has no such dead letter{stands}")
    await actor.acted(
        connection, "dead-letter.redrive", tenant=tenant, project=project, delivery=str(delivery), budget=budget
    )


async def redrive_all(
    database: Database, actor: Actor, tenant: str, project: str, wanted: DeadFilter, *, budget: int
) -> int:
    """Redrive what `wanted` names, in transactions of at most 1,000 with an audit event each; returns how many.

    No more than are dead at the start (100,000 at most), the earliest given up first: what dies again meanwhile is left
    alone, and so is what has no payload any more. AdminError: no such tenant, project or code, or a budget that is not
    1 to 100. Unavailable: some may be redriven.
    """
    _require_budget(budget)
    total = await database.transact(lambda connection: count(connection, tenant, project, wanted))
    left = total
    while left:
        limit = min(left, MAX_REDRIVEN)
        moved = await database.transact(
            lambda connection, limit=limit: _redrive_some(
                connection, actor, tenant, project, wanted, budget=budget, limit=limit
            )
        )
        left -= moved
        if not moved:
            break
    return total - left


async def _redrive_some(
    connection: Connection,
    actor: Actor,
    tenant: str,
    project: str,
    wanted: DeadFilter,
    *,
    budget: int,
    limit: int,
) -> int:
    moved = await dead_letters.redrive_some(connection, tenant, project, wanted, budget=budget, limit=limit)
    if moved:
        await actor.acted(
            connection,
            "dead-letter.redrive",
            tenant=tenant,
            project=project,
            destination=wanted.destination,
            code=wanted.code,
            since=None if wanted.since is None else wanted.since.isoformat(),
            until=None if wanted.until is None else wanted.until.isoformat(),
            budget=budget,
            redriven=moved,
        )
    return moved


async def _require(connection: Connection, tenant: str, project: str, wanted: DeadFilter) -> None:
    await require_projects(connection, tenant, [project])
    require_code(wanted.code, Code)


def _require_budget(budget: int) -> None:
    if not 1 <= budget <= MAX_ATTEMPTS:
        raise AdminError(Reason.REQUEST_INVALID, f"a dead letter gets 1 to {MAX_ATTEMPTS} further attempts")

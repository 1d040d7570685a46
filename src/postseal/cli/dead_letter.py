"""`postseal dead-letter`: list, redrive."""

import sys
from typing import Annotated
from uuid import UUID

from typer import Argument, BadParameter, Option, Typer, echo

from postseal.admin import dead_letters
from postseal.admin.dead_letters import MAX_COUNTED
from postseal.cli.arguments import ProjectName, Since, TenantName, Until
from postseal.cli.command import Session, command
from postseal.cli.failures import fail
from postseal.cli.output import print_json, print_table, record
from postseal.postgres.database import Part
from postseal.postgres.dead_letters import MAX_PAGE_ROWS, DeadFilter, Position
from postseal.settings import MAX_ATTEMPTS

OfDestination = Annotated[str | None, Option("--destination", metavar="DESTINATION", help="Only of this destination.")]
WithCode = Annotated[str | None, Option("--code", metavar="CODE", help="Only with this code.")]
COLUMNS = ("delivery", "destination", "sequence", "code", "attempt", "sealedAtMs", "settledAtMs")

app = Typer()


def parse_position(text: str) -> Position:
    """What a page told as `next`."""
    try:
        return Position.read(text)
    except ValueError as error:
        raise BadParameter(str(error)) from None


@command(app, "list")
def list_page(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    *,
    destination: OfDestination = None,
    code: WithCode = None,
    since: Since = None,
    until: Until = None,
    after: Annotated[
        Position | None,
        Option(metavar="NEXT", parser=parse_position, help="Where the page before ended.", show_default=False),
    ] = None,
    limit: Annotated[int, Option(min=1, max=MAX_PAGE_ROWS, help="How many at most.")] = MAX_PAGE_ROWS,
) -> None:
    """Show a project's dead letters. The earliest given up comes first."""
    wanted = DeadFilter(destination, code, since, until)
    found = session.transact(
        lambda connection: dead_letters.page(connection, tenant, project, wanted, after=after, rows=limit)
    )
    count = session.transact(lambda connection: dead_letters.count(connection, tenant, project, wanted))
    following = str(found[-1].position) if len(found) == limit else None
    rows = [record(row) | {"eventIdentity": row.event_identity.hex()} for row in found]
    for row in rows:
        del row["position"]
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "count": count, "deadLetters": rows, "next": following})
    else:
        print_table(rows, COLUMNS)
        if following is not None and count > len(rows):
            echo(f"{count}{' or more' if count == MAX_COUNTED else ''} in all; go on with --after {following}")


@command(app, "redrive")
def redrive(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    delivery: Annotated[UUID | None, Argument(metavar="DELIVERY", help="One of them.", show_default=False)] = None,
    *,
    everything: Annotated[
        bool, Option("--all", help="All of them, or all that a list with the same filter shows.")
    ] = False,
    destination: OfDestination = None,
    code: WithCode = None,
    since: Since = None,
    until: Until = None,
    budget: Annotated[
        int | None,
        Option(
            min=1, max=MAX_ATTEMPTS, help="Further attempts; by default as many as a new delivery.", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Send one dead letter again, or all of a filter."""
    attempts = budget or session.settings.attempt_limit
    wanted = DeadFilter(destination, code, since, until)
    if delivery is not None:
        if everything or wanted != DeadFilter():
            raise BadParameter("name a delivery, or say --all, not both")
        session.transact(
            lambda connection: dead_letters.redrive(
                connection, session.actor, tenant, project, delivery, budget=attempts
            )
        )
        redriven = 1
    elif everything:
        redriven = _redrive_all(session, tenant, project, wanted, attempts, asks=not yes)
    else:
        raise BadParameter("name a delivery, or say --all")
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "redriven": redriven})
    else:
        echo(f"{redriven} redriven")


def _redrive_all(session: Session, tenant: str, project: str, wanted: DeadFilter, budget: int, *, asks: bool) -> int:
    count = session.transact(lambda connection: dead_letters.count(connection, tenant, project, wanted))
    if asks and count:
        echo(f"Redrive {count}{' or more' if count == MAX_COUNTED else ''} dead letters? [y/N] ", err=True, nl=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            fail("nothing was redriven: it was not confirmed, by an answer or --yes")
    return session.run(
        Part.ADMIN,
        lambda database: dead_letters.redrive_all(database, session.actor, tenant, project, wanted, budget=budget),
    )

"""`postseal delivery`: enqueue, show, cancel."""

import json
from typing import Annotated, Any, cast
from uuid import UUID, uuid4

from typer import Argument, BadParameter, Option, Typer, echo

from postseal.admin import deliveries
from postseal.admin.deliveries import Why
from postseal.admin.names import require_projects
from postseal.cli.arguments import ProjectName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.failures import fail
from postseal.cli.output import print_json, print_record, print_table, record
from postseal.outbound.wishes import Sealed, Unsealed, Wish
from postseal.postgres.database import Database, Part
from postseal.postgres.mail import ShownDelivery, ShownIntent
from postseal.settings import MAX_ATTEMPTS
from postseal.worker_service import outbox_of

DeliveryId = Annotated[UUID, Argument(metavar="DELIVERY", help="The delivery's id.", show_default=False)]

app = Typer()


@command(app, "enqueue")
def enqueue(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    destination: Annotated[str, Argument(metavar="DESTINATION", help="Where it goes.", show_default=False)],
    *,
    data: Annotated[str, Option(metavar="JSON", help="What it says, its kind included.", show_default=False)],
    idempotency_key: Annotated[
        str | None, Option(metavar="KEY", help="What makes it one; by default a new one.", show_default=False)
    ] = None,
    attempt_limit: Annotated[
        int | None, Option(min=1, max=MAX_ATTEMPTS, help="After how many attempts it is dead.", show_default=False)
    ] = None,
) -> None:
    """Seal a delivery with the signing key here. A worker sends it."""
    wish = Wish(
        destination=destination,
        data=_object(data),
        idempotency_key=idempotency_key or str(uuid4()),
        attempt_limit=attempt_limit,
    )

    async def flow(database: Database) -> Sealed | Unsealed:
        outbox = outbox_of(session.settings, database)
        [result] = await outbox.enqueue(tenant, project, [wish], session.actor.account)
        return result

    session.transact(lambda connection: require_projects(connection, tenant, [project]))
    result = session.run(Part.DELIVERY, flow)
    if isinstance(result, Unsealed):
        fail(f"{result.code}: {result.detail}")
    document = {
        "delivery": result.delivery,
        "destination": destination,
        "idempotencyKey": wish.idempotency_key,
        "sequence": result.sequence,
        "eventIdentity": result.event_identity.hex(),
        "state": str(result.state),
        "new": result.new,
    }
    if session.as_json:
        print_json(document)
    else:
        print_record(document)


@command(app, "show")
def show(session: Session, tenant: TenantName, delivery: DeliveryId) -> None:
    """Show how a delivery stands. It tells its attempts, and why it was not sent yet."""
    found = session.transact(lambda connection: deliveries.show(connection, tenant, delivery))
    document, why = _document(found), deliveries.why(found)
    if session.as_json:
        print_json(document | {"why": None if why is None else _told(why)})
        return
    attempts = document.pop("attempts", [])
    print_record(document | {"why": None if why is None else why.sentence})
    if attempts:
        echo()
        print_table(attempts, ("attempt", "endedAtMs", "code"))


@command(app, "cancel")
def cancel(session: Session, tenant: TenantName, project: ProjectName, delivery: DeliveryId) -> None:
    """Never send a delivery that waits (any more)."""
    ended = session.transact(lambda connection: deliveries.cancel(connection, session.actor, tenant, project, delivery))
    if session.as_json:
        print_json({"tenant": tenant, "project": project, "delivery": delivery, "ended": str(ended)})
    else:
        echo(f"delivery {delivery} will not be sent")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadParameter('--data is one JSON object, such as {"kind":"acknowledgement",…}')
    return cast("dict[str, Any]", value)


def _document(found: ShownDelivery | ShownIntent) -> dict[str, Any]:
    if isinstance(found, ShownIntent):
        return record(found) | {"state": "unsealed"}
    shown = record(found) | {
        "state": str(found.state),
        "eventIdentity": found.event_identity.hex(),
        "attempts": [record(attempt) for attempt in found.attempts],
    }
    del shown["stream"]
    return shown


def _told(why: Why) -> dict[str, str]:
    return {"code": str(why.code), "sentence": why.sentence}

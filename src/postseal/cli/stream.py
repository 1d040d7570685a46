"""`postseal stream`: list, show, raise-floor."""

from typing import Annotated, Any

import msgspec
from typer import Argument, Option, Typer

from postseal.admin import streams
from postseal.cli.arguments import ProjectName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import print_json, print_record, print_table
from postseal.postgres.streams import Stream
from postseal.web.documents import of_stream

ProducerName = Annotated[str, Argument(metavar="PRODUCER", help="The producer: a device's id.", show_default=False)]

app = Typer()


@command(app, "list")
def list_all(
    session: Session,
    tenant: TenantName,
    *,
    project: Annotated[str | None, Option(metavar="PROJECT", help="Only the streams of this project.")] = None,
) -> None:
    """Show where each stream of a tenant stands."""
    found = session.transact(lambda connection: streams.list_of_tenant(connection, tenant, project))
    rows = [_standing(stream) for stream in found]
    if session.as_json:
        print_json({"tenant": tenant, "streams": rows})
    else:
        columns = ("project", "producer", "contiguousThrough", "highest", "replayFloor", "missing", "retired")
        print_table([row | {"missing": ranges(row["missing"])} for row in rows], columns)


@command(app, "show")
def show(session: Session, tenant: TenantName, project: ProjectName, producer: ProducerName) -> None:
    """Show where one stream stands, and what is missing in it."""
    _print(session, session.transact(lambda connection: streams.show(connection, tenant, project, producer)))


@command(app, "raise-floor")
def raise_floor(
    session: Session,
    tenant: TenantName,
    project: ProjectName,
    producer: ProducerName,
    floor: Annotated[int, Argument(metavar="SEQUENCE", min=1, help="The new floor.", show_default=False)],
    *,
    reason: Annotated[str, Option(metavar="TEXT", help="Why, for the audit trail.", show_default=False)],
    force: Annotated[bool, Option("--force", help="Allow a floor above the highest sequence.")] = False,
) -> None:
    """Close for ever what is missing in a stream up to a sequence."""
    raised = session.transact(
        lambda connection: streams.raise_floor(
            connection, session.actor, tenant, project, producer, floor=floor, reason=reason, force=force
        )
    )
    _print(session, raised)


def _standing(stream: Stream) -> dict[str, Any]:
    """What the HTTP surface says of it."""
    return msgspec.to_builtins(of_stream(stream))


def _print(session: Session, stream: Stream) -> None:
    standing: dict[str, Any] = {"tenant": stream.key.tenant, **_standing(stream)}
    if session.as_json:
        print_json(standing)
    else:
        print_record(standing | {"missing": ranges(standing["missing"])})


def ranges(missing: list[dict[str, int]]) -> list[str]:
    """Missing ranges as people read them."""
    return [str(hole["from"]) if hole["from"] == hole["to"] else f"{hole['from']}-{hole['to']}" for hole in missing]

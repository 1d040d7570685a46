"""Arguments that several commands take."""

from datetime import UTC, datetime
from typing import Annotated

from typer import Argument, BadParameter, Option

TenantName = Annotated[str, Argument(metavar="TENANT", help="The tenant.", show_default=False)]
ProjectName = Annotated[str, Argument(metavar="PROJECT", help="The project.", show_default=False)]
DeviceName = Annotated[str, Argument(metavar="DEVICE", help="The device.", show_default=False)]
ProjectNames = Annotated[
    list[str], Option("--project", metavar="PROJECT", help="A project; may be given again.", show_default=False)
]


def parse_time(text: str) -> datetime:
    """A time in ISO 8601; one without an offset is in UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadParameter("write a time like 2026-12-31T23:59:59Z") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


Since = Annotated[
    datetime | None,
    Option("--since", metavar="TIME", parser=parse_time, help="Only from this time on (ISO 8601).", show_default=False),
]
Until = Annotated[
    datetime | None,
    Option("--until", metavar="TIME", parser=parse_time, help="Only before this time.", show_default=False),
]

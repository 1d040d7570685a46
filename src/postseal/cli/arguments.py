"""Arguments that several commands take."""

from typing import Annotated

from typer import Argument, Option

TenantName = Annotated[str, Argument(metavar="TENANT", help="The tenant.", show_default=False)]
ProjectName = Annotated[str, Argument(metavar="PROJECT", help="The project.", show_default=False)]
DeviceName = Annotated[str, Argument(metavar="DEVICE", help="The device.", show_default=False)]
ProjectNames = Annotated[
    list[str], Option("--project", metavar="PROJECT", help="A project; may be given again.", show_default=False)
]

"""`postseal demo`: the service, and devices that send to it."""

from typing import Annotated

import msgspec
from typer import Option, Typer

from postseal import demo as postseal_demo
from postseal.cli.command import Session, command
from postseal.settings import MAX_PORT

app = Typer()


@command(app, "demo")
def demo(
    session: Session,
    *,
    once: Annotated[bool, Option("--once", help="End when it has been shown.")] = False,
    port: Annotated[
        int | None, Option(min=0, max=MAX_PORT, help="Port to listen on; a free one if it is taken.")
    ] = None,
) -> None:
    """Start everything and send real signed envelopes."""
    settings = session.settings
    postseal_demo.run(
        settings if port is None else msgspec.structs.replace(settings, port=port), once=once, as_json=session.as_json
    )

"""`postseal echo`: receive deliveries, check both signatures, and say what came."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option, Typer, echo

from postseal.cli.failures import fail, one_line_errors
from postseal.cli.output import print_json
from postseal.echo import Answer, Echo
from postseal.envelope.kinds import NO_KINDS
from postseal.key_set import EnvelopeKeys, KeysUnreadable, keys_at, keys_in_file
from postseal.kinds_folder import load_kinds
from postseal.senders.webhook import Verifier
from postseal.settings import MAX_PORT

SECRET_VARIABLE = "ECHO_SECRET"  # noqa: S105 - a name
AUTHORIZATION_VARIABLE = "ECHO_AUTHORIZATION"
MAX_FAIL_FIRST = 100

app = Typer()


@app.command("echo")
@one_line_errors()
def receive(
    *,
    keys: Annotated[
        str,
        Option(
            metavar="FILE|URL",
            help=f"The tenant's signing keys, as /v1/keys serves them. {AUTHORIZATION_VARIABLE} is sent to a URL.",
            show_default=False,
        ),
    ],
    secret: Annotated[
        Path | None,
        Option(metavar="FILE", help=f"Holds the destination's whsec_ secret; else {SECRET_VARIABLE} may."),
    ] = None,
    public_key: Annotated[str | None, Option(metavar="whpk_…", help="The destination's public key.")] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=MAX_PORT, help="Port to listen on; 0 takes a free one.")] = 0,
    audience: Annotated[str | None, Option(metavar="DESTINATION", help="Take only what is for it.")] = None,
    kinds: Annotated[Path | None, Option(metavar="FOLDER", help="The deployment's own kinds of payload.")] = None,
    fail_first: Annotated[
        int, Option(min=0, max=MAX_FAIL_FIRST, help="Fail so many attempts at each delivery on purpose.")
    ] = 0,
    as_json: Annotated[bool, Option("--json", help="Print JSON on stdout, one line each.")] = False,
) -> None:
    """Receive deliveries and check their signatures, until interrupted."""
    receiver = Echo(
        _verifier(secret, public_key),
        key_source := _keys(keys),
        audience=audience,
        kinds=NO_KINDS if kinds is None else load_kinds(kinds),
        fail_first=fail_first,
        told=_print_json if as_json else _print,
    )
    try:
        asyncio.run(_run(receiver, key_source, host, port, as_json=as_json))
    except KeysUnreadable as error:
        fail(str(error))


async def _run(receiver: Echo, keys: EnvelopeKeys, host: str, port: int, *, as_json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await keys.load()  # so that a slip is told at once
    async with receiver.listening(host, port) as url:
        if as_json:
            print_json({"url": url})
        else:
            echo(f"echo listens on {url}")
        await stop.wait()


def _verifier(secret: Path | None, public_key: str | None) -> Verifier:
    shared = os.environ.get(SECRET_VARIABLE) if secret is None else secret.read_text("ascii", "replace")
    texts = [text.strip() for text in (shared, public_key) if text]
    if not texts:
        raise BadParameter(f"give --public-key, --secret or {SECRET_VARIABLE}: whatever the destination signs with")
    try:
        return Verifier(texts)
    except ValueError as error:
        fail(str(error))


def _keys(where: str) -> EnvelopeKeys:
    if where.startswith(("http://", "https://")):
        return keys_at(where, os.environ.get(AUTHORIZATION_VARIABLE))
    return keys_in_file(Path(where))


def _print(answer: Answer) -> None:
    if answer.received is None:
        echo(f"{answer.status}  {answer.delivery or '-'}  {answer.why}")
        return
    came = answer.received
    stream = f"{came.tenant}/{came.project}/{came.audience}"
    found = "both signatures hold" + (", a duplicate" if came.duplicate else "")
    echo(f"{answer.status}  {came.delivery}  {stream}  {came.sequence}  {came.kind}  {found}")


def _print_json(answer: Answer) -> None:
    line = {"status": answer.status, "delivery": answer.delivery, "why": answer.why}
    if (came := answer.received) is not None:
        line |= {
            "tenant": came.tenant,
            "project": came.project,
            "audience": came.audience,
            "sequence": came.sequence,
            "kind": came.kind,
            "keyid": came.keyid,
            "eventIdentity": came.event_identity.hex(),
            "duplicate": came.duplicate,
        }
    print_json(line)

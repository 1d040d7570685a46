"""The command line: `postseal <noun> <verb>` (protocol section 11), one module a noun.

Exit codes: 0 done, 1 refused or failed with one line on stderr that says why, 2 wrong usage, 130 interrupted, 143
terminated.
"""

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Annotated

from typer import Exit, Option, Typer

VERBS = {
    "serve": "Run the service until it is stopped.",
    "worker": "Seal and deliver until it is stopped.",
    "sweep": "Delete expired payloads until it is stopped.",
    "migrate": "Bring the database up to date.",
    "backup": "Write an archive of the database.",
    "restore": "Make a database of an archive.",
    "verify": "Prove the database's invariants.",
    "recover": "After a crash or a restore: what waits, what is missing.",
    "demo": "Start everything and send real signed envelopes.",
    "echo": "Receive deliveries and check their signatures.",
}
NOUNS = {
    "tenant": "Tenants, which nothing crosses.",
    "project": "The projects of a tenant.",
    "device": "Devices: invite, enroll, list, retire.",
    "credential": "Credentials of consumers, senders and operators.",
    "key": "The keys with which devices, and the control plane, sign.",
    "retention": "How long payloads are kept.",
    "hold": "Keep a tenant's payloads until released.",
    "stream": "Where each device's stream stands.",
    "audit": "What was accepted, refused and done.",
    "inbox": "What devices have sent.",
    "destination": "Where deliveries go, and how it fares.",
    "delivery": "What is sent: enqueue, show, cancel.",
    "intent": "What applications left and is not sealed.",
    "dead-letter": "Deliveries that were given up.",
    "login": "Database logins of applications that leave intents.",
    "envelope": "Seal one by hand, or look into one.",
}


def main() -> None:
    """The program `postseal`."""
    program(sys.argv[1:])()


def program(arguments: Sequence[str]) -> Typer:
    """The program, of which only the command that `arguments` name is imported: `--help` stays quick."""
    named = next((word for word in arguments if not word.startswith("-")), None)
    app = Typer(
        name="postseal",
        help="Durable signed mail between devices and a hosted control plane, on PostgreSQL.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        # Its tracebacks would show the values of variables, secrets among them.
        pretty_exceptions_enable=False,
    )
    app.callback()(_program_options)
    for name, text in VERBS.items():
        if name == named:
            app.add_typer(_commands(name))
        else:
            app.command(name, help=text)(_only_listed)
    for name, text in NOUNS.items():
        commands = _commands(name) if name == named else Typer()
        app.add_typer(commands, name=name, help=text, no_args_is_help=True)
    return app


def _commands(name: str) -> Typer:
    try:
        return import_module(f"postseal.cli.{name.replace('-', '_')}").app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("postseal"):
            raise
        print(f"postseal: {name} needs the server's half: pip install 'postseal[server]'", file=sys.stderr)
        sys.exit(1)


def _only_listed() -> None:
    """Stand in the list of commands for one that was not named."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("postseal"))
        raise Exit


def _program_options(
    *,
    _version: Annotated[
        bool, Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Take what stands before the noun."""

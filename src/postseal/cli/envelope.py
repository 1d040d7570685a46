"""`postseal envelope`: seal one by hand, and open one to look at it. Needs nothing of the server's half."""

import json
import secrets
import sys
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer, echo

from postseal.cli.arguments import DeviceName, ProjectName, TenantName
from postseal.cli.failures import one_line_errors
from postseal.cli.output import print_json, print_record
from postseal.envelope import canonical, dsse, ed25519, v1
from postseal.errors import AdminError
from postseal.outcomes import Reason

app = Typer()


@app.command()
@one_line_errors()
def seal(
    tenant: TenantName,
    project: ProjectName,
    device: DeviceName,
    sequence: Annotated[int, Argument(min=1, metavar="SEQUENCE", help="One more than the stream's highest.")],
    *,
    key: Annotated[Path, Option(metavar="FILE", help="The device's private key, PKCS#8 PEM.", show_default=False)],
    data: Annotated[str | None, Option(metavar="JSON", help="The event's data; by default a heartbeat.")] = None,
    event_id: Annotated[str | None, Option(metavar="UUID", help="By default a new one.")] = None,
    idempotency_key: Annotated[str | None, Option(metavar="KEY", help="By default a new one.")] = None,
) -> None:
    """Sign an event and print its envelope, ready to be posted."""
    seed = _seed(key)
    payload = {
        "protocol": "controlplane/v1",
        "schemaVersion": 1,
        "route": {"tenant": tenant, "project": project, "producer": device},
        "eventId": event_id or str(uuid.uuid4()),
        "idempotencyKey": idempotency_key or secrets.token_hex(16),
        "sequence": sequence,
        "issuedAtMs": time.time_ns() // 1_000_000,
        "data": _heartbeat() if data is None else _parsed(data),
    }
    try:
        envelope = dsse.seal(canonical.encode(payload), seed)
    except ValueError as error:
        raise AdminError(Reason.REQUEST_INVALID, f"this cannot be sealed: {error}") from None
    echo(dsse.wrap(envelope.payload, envelope.keyid, envelope.signature))


@app.command("open")
@one_line_errors()
def open_envelope(
    file: Annotated[Path | None, Argument(metavar="[FILE]", help="By default standard input.")] = None,
    *,
    as_json: Annotated[bool, Option("--json", help="Print JSON on stdout, for programs.")] = False,
) -> None:
    """Show what an envelope says. Its signature is not checked: that needs the sender's key."""
    body = (sys.stdin.buffer.read() if file is None else file.read_bytes()).rstrip(b"\n")
    envelope = dsse.unwrap(body)
    shown = {
        "eventIdentity": envelope.identity.hex(),
        "keyid": envelope.keyid,
        "payload": v1.read_claims(envelope.payload).members,
    }
    if as_json:
        print_json(shown)
    else:
        print_record(shown)


def _seed(key: Path) -> bytes:
    try:
        return ed25519.seed_from_pem(key.read_bytes())
    except ValueError:
        raise AdminError(Reason.REQUEST_INVALID, f"{key} is no Ed25519 private key in PKCS#8 PEM") from None


def _parsed(data: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise AdminError(Reason.REQUEST_INVALID, "--data must be one JSON object")
    return parsed  # pyright: ignore[reportUnknownVariableType] - any JSON object; sealing checks it


def _heartbeat() -> dict[str, Any]:
    uptime_ms = time.monotonic_ns() // 1_000_000
    return {"kind": "heartbeat", "bootId": str(uuid.uuid4()), "uptimeMs": uptime_ms, "queueDepth": 0}

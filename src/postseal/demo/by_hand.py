"""How to do by hand what the demo has shown, both ways."""

import json
import sys
import uuid
from pathlib import Path

from postseal.demo.cast import PROJECT, TENANT, Cast
from postseal.demo.worker import LOOPBACK
from postseal.envelope import dsse
from postseal.settings import Settings

ECHO_PORT = 8081


def commands(settings: Settings, address: str, cast: Cast, *, once: bool) -> str:
    """The commands, to be typed in that order while a service and its worker run."""
    program = sys.argv[0]
    if Path(program).is_relative_to(Path.cwd()):
        program = str(Path(program).relative_to(Path.cwd()))
    where = f" --data-dir {settings.data_dir}" if settings.data_dir else ""
    here = "POSTSEAL_ALLOW_HTTP=true"
    serve = f"{here} POSTSEAL_ALLOWED_CIDRS={LOOPBACK} {program} serve{where}"
    when = f"after `{serve}`" if once else "in a second terminal while this one stays up"
    device, receiver = f"my-device-{cast.run_id}", f"my-receiver-{cast.run_id}"
    decision = {"kind": "proposal-decision", "proposalId": str(uuid.uuid4()), "revision": 1, "decision": "accepted"}
    data = json.dumps(decision, separators=(",", ":"))
    return f"""
{address}

The same by hand, {when}:

  {program} device enroll {TENANT} {device} --project {PROJECT} --generate --key-out {device}.pem{where}
  {program} envelope seal --key {device}.pem {TENANT} {PROJECT} {device} 1 | curl -sS {address}/v1/envelopes \\
    -H 'Authorization: Bearer <the credential>' -H 'Content-Type: {dsse.ENVELOPE_MEDIA_TYPE}' --data-binary @-
  {program} inbox tail {TENANT} {PROJECT}{where}

And the way back, the last one in a further terminal, so that you see it arrive at the one before:

  {here} {program} destination create {TENANT} {PROJECT} {receiver} --mode push --scheme v1a \\
    --url http://127.0.0.1:{ECHO_PORT}/{where}
  ECHO_AUTHORIZATION='Bearer <the credential>' {program} echo --keys {address}/v1/keys --port {ECHO_PORT} \\
    --public-key '<the whpk_ key>'
  {program} delivery enqueue {TENANT} {PROJECT} {receiver} --data '{data}'{where}"""

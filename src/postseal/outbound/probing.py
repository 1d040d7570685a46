"""Tests of destinations: one signed request under the rules of every delivery, which is none.

Its body is `{"probe":true}`, so that no receiver takes it for an envelope; it takes no number and is not tried again.
"""

from postseal.errors import AdminError
from postseal.outbound.wishes import new_id
from postseal.outcomes import Reason
from postseal.postgres.database import Database
from postseal.postgres.destinations import read_targets
from postseal.rules.delivery import Attempted, Code
from postseal.senders import PROBE, Mail, Sender
from postseal.senders.secrets import DeploymentKey, SecretUnusable


async def probe(database: Database, sender: Sender, key: DeploymentKey, tenant: str, stream: int) -> Attempted:
    """How one request to a push destination went, disabled ones included. `database` is the part that delivers.

    Raises AdminError if there is no such destination, and Unavailable.
    """
    targets = await database.transact(lambda connection: read_targets(connection, tenant, [stream]))
    target = targets.get(stream)
    if target is None or target.url is None:
        raise AdminError(Reason.NOT_FOUND, "there is no such destination to push to")
    try:
        secrets = key.open_all(tenant, stream, [(each.scheme, each.encrypted) for each in target.secrets])
    except SecretUnusable:
        return Attempted(Code.SECRET_UNUSABLE)
    mail = Mail(new_id(), tenant, target.project, target.destination, target.url, PROBE, secrets, 1)
    return await sender.send(mail)

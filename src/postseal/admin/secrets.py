"""What signs the requests to a destination: made with it, and replaced while the older ones go on signing for a time.

A secret is shown at the moment at which it is made, and never again: of a shared one (`v1`) the whole, of a key pair
(`v1a`) the public half, which is all that a receiver needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID, uuid4

from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import destinations
from postseal.postgres.transaction import Connection
from postseal.senders import Scheme
from postseal.senders.secrets import DeploymentKey
from postseal.senders.webhook import for_receiver, make_secret

MAX_OVERLAP_S = 30 * 86_400
"""How long an older secret may go on signing beside a new one."""
MAX_SECRETS = 8
"""Of one destination that sign at once. Each makes a signature of every request, and receivers look at 32."""

Schemes = Literal["v1", "v1a", "both"]
"""How operators name schemes."""


@dataclass(frozen=True, slots=True)
class ShownSecret:
    """What a receiver has to know, at the only moment at which it is shown; `repr` does not show it."""

    secret: UUID
    scheme: Scheme
    receiver: str = field(repr=False)


def schemes_of(wanted: Schemes | None) -> list[Scheme]:
    """The schemes that were named; none where none was."""
    if wanted is None:
        return []
    return [Scheme.V1, Scheme.V1A] if wanted == "both" else [Scheme(wanted)]


def told(secrets: Sequence[ShownSecret]) -> list[dict[str, str]]:
    """What an audit event says of new secrets."""
    return [{"secret": str(secret.secret), "scheme": str(secret.scheme)} for secret in secrets]


async def add_secret(
    connection: Connection, tenant: str, stream: int, scheme: Scheme, key: DeploymentKey
) -> ShownSecret:
    """Make a secret of a destination, which signs from now on."""
    secret, made = uuid4(), make_secret(scheme)
    encrypted = key.encrypt(tenant, stream, made)
    await destinations.insert_secret(
        connection, tenant, stream, secret=secret, scheme=scheme.value, encrypted=encrypted
    )
    return ShownSecret(secret, scheme, for_receiver(made))


async def replace_secrets(
    connection: Connection,
    tenant: str,
    stream: int,
    *,
    schemes: Sequence[Scheme],
    overlap_s: int,
    key: DeploymentKey,
) -> list[ShownSecret]:
    """Make a new secret of each scheme; where none is given, of each that the destination has.

    The older ones sign for `overlap_s` more; those whose time is over are deleted. The caller has the destination's
    lock: of two at once the second has to see what the first made. AdminError: more than MAX_SECRETS would sign.
    """
    if not schemes:
        has = await destinations.list_secrets(connection, tenant, stream)
        schemes = sorted({Scheme(secret.scheme) for secret in has})
    shown: list[ShownSecret] = []
    for scheme in schemes:
        made = await add_secret(connection, tenant, stream, scheme, key)
        await destinations.let_older_sign_until(connection, tenant, stream, newest=made.secret, for_s=overlap_s)
        shown.append(made)
    await destinations.delete_ended_secrets(connection, tenant, stream)
    sign = len(await destinations.list_secrets(connection, tenant, stream))
    if sign > MAX_SECRETS:
        raise AdminError(
            Reason.CONFLICT,
            f"{sign} secrets would sign at once, and at most {MAX_SECRETS} may: wait until older ones end, or let them "
            "end now, with an overlap of 0",
        )
    return shown

"""Devices: invited, listed, retired. How an invitation becomes a device is `postseal.enrolment`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from postseal.admin.actor import Actor
from postseal.admin.names import require_id, require_projects, require_tenant
from postseal.errors import AdminError
from postseal.identity.codes import code_hash, new_code
from postseal.outcomes import Reason
from postseal.postgres import destinations, devices, invitations, streams
from postseal.postgres.devices import ListedDevice
from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection

RESERVED_DEVICE = "controlplane"
"""The producer of what the service itself sends (protocol section 1)."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A one-time code at the only moment at which it is known; `repr` does not show it."""

    tenant: str
    device: str
    projects: list[str]
    code: str = field(repr=False)
    expires_at: datetime


async def invite(
    connection: Connection,
    actor: Actor,
    tenant: str,
    device: str,
    *,
    projects: Sequence[str],
    lifetime_s: int,
    account: str | None = None,
    adds_key: bool = False,
) -> Invitation:
    """Make a code that enrols a new device in `projects`; with `adds_key`, one that brings a key to an old one.

    The account of a new device is `account`, or its own id. AdminError: no such tenant or project, not an id, a
    device that exists already (or, with `adds_key`, does not), or is retired.
    """
    require_id("a device", device)
    if device == RESERVED_DEVICE:
        raise AdminError(Reason.REQUEST_INVALID, f"{device!r} is the service's own name: choose another")
    wanted = await require_projects(connection, tenant, projects)
    account_of = _account_of_old if adds_key else _account_of_new
    owner = await account_of(connection, tenant, device, account)
    code = new_code()
    hash_of_code = code_hash(code)
    assert hash_of_code is not None  # noqa: S101 - a new code has the form of a code
    expires_at = await invitations.insert(
        connection,
        code_hash=hash_of_code,
        tenant=tenant,
        device=device,
        account=owner,
        projects=wanted,
        adds_key=adds_key,
        reach=sorted({*wanted, *await streams.projects_of_device(connection, tenant, device)}),
        lifetime_s=lifetime_s,
    )
    await actor.acted(
        connection,
        "device.invite",
        tenant=tenant,
        device=device,
        account=owner,
        projects=wanted,
        addsKey=adds_key,
    )
    return Invitation(tenant, device, wanted, code, expires_at)


async def _account_of_new(connection: Connection, tenant: str, device: str, account: str | None) -> str:
    owner = account or device
    require_id("an account", owner)
    if await devices.find(connection, tenant, device) is not None:
        raise AdminError(
            Reason.CONFLICT,
            f"device {device!r} exists or existed already, and ids are never used again: choose another, "
            "or add a further key to it (--add-key, addsKey over HTTP)",
        )
    return owner


async def _account_of_old(connection: Connection, tenant: str, device: str, account: str | None) -> str:
    found = await devices.find(connection, tenant, device)
    if found is None:
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no device {device!r} to add a key to")
    if found.retired:
        raise AdminError(Reason.CONFLICT, f"device {device!r} is retired: enrol a new one")
    if account not in (None, found.account):
        raise AdminError(Reason.CONFLICT, f"device {device!r} has the account {found.account!r} for good")
    return found.account


async def list_of_tenant(connection: Connection, tenant: str, part: ListPart = WHOLE) -> list[ListedDevice]:
    """A tenant's devices by id, retired ones included. AdminError: no such tenant."""
    await require_tenant(connection, tenant)
    return await devices.list_of_tenant(connection, tenant, part)


async def retire(connection: Connection, actor: Actor, tenant: str, device: str) -> list[int]:
    """Retire a device: nothing new is taken from it, its duplicates are still answered, and it pulls no more.

    Its streams are retired and its pull destinations disabled, for ever. Their streams are returned: afterwards the
    caller calls `holding.move_mail` for each. Its credential stays valid until it expires; its id is never used
    again. AdminError: no such device, or it is retired.
    """
    found = await lock_quiet(connection, tenant, device)
    if found.retired:
        raise AdminError(Reason.CONFLICT, f"device {device!r} is retired already")
    await streams.retire_of_device(connection, tenant, device)
    await devices.retire(connection, tenant, device)
    await actor.acted(connection, "device.retire", tenant=tenant, device=device)
    pulled = await destinations.retire_of_device(connection, tenant, device)
    for project in sorted(pulled):
        await actor.acted(
            connection, "destination.disable", tenant=tenant, project=project, destination=device, reason="retired"
        )
    return list(pulled.values())


async def lock_quiet(connection: Connection, tenant: str, device: str) -> devices.Device:
    """The device, with nothing of it being taken in until the transaction ends.

    The device is locked first, so that no stream is made meanwhile, then all its streams in id order (protocol
    section 8). AdminError: no such tenant or device.
    """
    await require_tenant(connection, tenant)
    found = await devices.lock(connection, tenant, device)
    if found is None:
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no device {device!r}")
    await streams.lock_of_device(connection, tenant, device)
    return found

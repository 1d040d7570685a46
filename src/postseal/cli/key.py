"""`postseal key`: the keys of devices, and those with which the control plane signs for a tenant.

create, and rotate without a device, are about the tenant's signing key. retire, revoke and remove find the key by its
id, whichever it is.
"""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option, Typer, echo

from postseal.admin import keys, signing_keys
from postseal.admin.actor import Actor
from postseal.admin.removal import sentence
from postseal.cli.arguments import DeviceName, TenantName
from postseal.cli.command import Session, command
from postseal.cli.output import age, print_json, print_record, print_table, record, text
from postseal.envelope import base64url, ed25519
from postseal.errors import AdminError, Unavailable
from postseal.postgres.database import Connection
from postseal.rules.keys import KeyState, Obstacle, free_at
from postseal.settings import SECONDS_AN_HOUR
from postseal.signing.pem_folder import folder_of, write_key

KeyId = Annotated[str, Argument(metavar="KEYID", help="The key's id.", show_default=False)]
OptionalDevice = Annotated[
    str | None, Argument(metavar="[DEVICE]", help="The device; without one, the tenant's signing key.")
]
PublicKey = Annotated[str, Option(metavar="KEY", help="The new public key: 32 bytes in base64url.", show_default=False)]
OverlapHours = Annotated[
    int | None,
    Option(min=0, max=8760, help="For how long the key before it is taken too.", show_default="rotation_overlap_hours"),
]
COLUMNS = ("keyid", "device", "state", "age", "lastAcceptedAtMs", "removable", "obstacles", "registeredAtMs")
OF_DEVICES = ("device", "lastAcceptedAtMs")

app = Typer()


@command(app, "create")
def create(session: Session, tenant: TenantName) -> None:
    """Make a tenant's signing key, on this machine. The control plane signs with it."""
    session.transact(lambda connection: signing_keys.require_none(connection, tenant))
    with _new_signing_key(session, tenant) as (public_key, file):
        keyid = session.transact(lambda connection: signing_keys.create(connection, session.actor, tenant, public_key))
    _show(session, {"tenant": tenant, "keyid": keyid, "keyFile": str(file)})


@command(app, "register")
def register(session: Session, tenant: TenantName, device: DeviceName, *, public_key: PublicKey) -> None:
    """Give a device one more active key. You speak for it, since no proof is asked for."""
    raw = _public_key(public_key)
    keyid = session.transact(lambda connection: keys.register(connection, session.actor, tenant, device, raw))
    _show(session, {"tenant": tenant, "device": device, "keyid": keyid})


@command(app, "rotate")
def rotate(
    session: Session,
    tenant: TenantName,
    device: OptionalDevice = None,
    *,
    public_key: Annotated[
        str | None, Option(metavar="KEY", help="A device's new public key: 32 bytes in base64url.", show_default=False)
    ] = None,
    overlap_hours: OverlapHours = None,
) -> None:
    """Replace a tenant's signing key, or a device's keys. The former is made on this machine."""
    if (device is None) != (public_key is None):
        raise BadParameter("a device and its --public-key are given together; the tenant's signing key needs neither")
    overlap_s = session.settings.rotation_overlap_s if overlap_hours is None else overlap_hours * SECONDS_AN_HOUR
    if device is not None and public_key is not None:
        raw = _public_key(public_key)
        rotated = session.transact(
            lambda connection: keys.rotate(connection, session.actor, tenant, device, raw, overlap_s=overlap_s)
        )
        _show(session, {"tenant": tenant, "device": device} | record(rotated))
        return
    session.transact(lambda connection: signing_keys.require_active(connection, tenant))
    with _new_signing_key(session, tenant) as (new, file):
        replaced = session.transact(
            lambda connection: signing_keys.rotate(connection, session.actor, tenant, new, overlap_s=overlap_s)
        )
    _show(session, {"tenant": tenant} | record(replaced) | {"keyFile": str(file)})


@command(app, "list")
def list_all(
    session: Session,
    tenant: TenantName,
    *,
    device: Annotated[str | None, Option(metavar="DEVICE", help="Only the keys of this device.")] = None,
    signing: Annotated[bool, Option("--signing", help="The tenant's signing keys, in place of its devices'.")] = False,
) -> None:
    """Show keys with their state, age and last use. What holds them from being removed is shown too."""
    if signing and device is not None:
        raise BadParameter("signing keys are the tenant's and no device's")
    window_s = session.settings.key_window_s

    async def act(connection: Connection) -> Sequence[keys.ListedKey | signing_keys.ListedSigningKey]:
        if signing:
            return await signing_keys.list_of_tenant(connection, tenant, window_s=window_s)
        return await keys.list_of_tenant(connection, tenant, device, window_s=window_s)

    found = session.transact(act)
    if session.as_json:
        print_json({"tenant": tenant, "keys": [record(row) for row in found]})
    else:
        columns = [name for name in COLUMNS if not (signing and name in OF_DEVICES)]
        rows = [record(row) | {"age": age(row.age_s), "removable": _removable(row)} for row in found]
        print_table(rows, columns)


@command(app, "retire", takes_keyid=True)
def retire(session: Session, tenant: TenantName, keyid: KeyId) -> None:
    """Let a key bring nothing new; what it signed still verifies."""
    _act(session, tenant, keyid, keys.retire, signing_keys.retire)
    _tell(session, tenant, keyid, KeyState.VERIFY_ONLY)


@command(app, "revoke", takes_keyid=True)
def revoke(session: Session, tenant: TenantName, keyid: KeyId) -> None:
    """Revoke a key that may be in wrong hands. From now on it brings nothing new."""
    _act(session, tenant, keyid, keys.revoke, signing_keys.revoke)
    _tell(session, tenant, keyid, KeyState.REVOKED)


@command(app, "remove", takes_keyid=True)
def remove(
    session: Session,
    tenant: TenantName,
    keyid: KeyId,
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what holds it, and when it may go.")] = False,
) -> None:
    """Remove a key that nothing holds any more. It is not known from then on; its public half is kept."""
    window_s = session.settings.key_window_s
    if dry_run:
        _tell_holds(session, tenant, keyid, window_s)
        return
    of_device = partial(keys.remove, window_s=window_s)
    _act(session, tenant, keyid, of_device, partial(signing_keys.remove, window_s=window_s))
    _tell(session, tenant, keyid, KeyState.REMOVED)


def _act(
    session: Session,
    tenant: str,
    keyid: str,
    of_device: Callable[[Connection, Actor, str, str], Awaitable[None]],
    of_tenant: Callable[[Connection, Actor, str, str], Awaitable[None]],
) -> None:
    async def act(connection: Connection) -> None:
        signs = await signing_keys.is_one(connection, tenant, keyid)
        await (of_tenant if signs else of_device)(connection, session.actor, tenant, keyid)

    session.transact(act)


def _tell(session: Session, tenant: str, keyid: str, state: KeyState) -> None:
    if session.as_json:
        print_json({"tenant": tenant, "keyid": keyid, "state": state})
    else:
        echo(f"key {keyid} is {state}")


def _tell_holds(session: Session, tenant: str, keyid: str, window_s: int) -> None:
    async def act(connection: Connection) -> list[Obstacle]:
        signs = await signing_keys.is_one(connection, tenant, keyid)
        obstacles = signing_keys.obstacles if signs else keys.obstacles
        return await obstacles(connection, tenant, keyid, window_s=window_s)

    found = session.transact(act)
    at = free_at(found)
    if session.as_json:
        obstacles = [{"kind": obstacle.kind, "place": obstacle.place, "untilMs": obstacle.until} for obstacle in found]
        print_json({"tenant": tenant, "keyid": keyid, "freeAtMs": at, "obstacles": obstacles})
    elif not found:
        echo(f"nothing holds key {keyid}: it can be removed now")
    else:
        echo(f"key {keyid} is held, " + ("as things stand for good:" if at is None else f"until {text(at)}:"))
        for obstacle in found:
            echo(f"  {sentence(obstacle)}")


def _removable(row: keys.ListedKey | signing_keys.ListedSigningKey) -> Any:
    if row.state is KeyState.REMOVED:
        return None
    return row.free_at if row.obstacles else "now"


def _show(session: Session, document: dict[str, Any]) -> None:
    if session.as_json:
        print_json(document)
    else:
        print_record(document)


def _public_key(given: str) -> bytes:
    try:
        return base64url.decode(given)
    except ValueError:
        raise BadParameter("--public-key is 32 bytes in base64url without padding") from None


@contextmanager
def _new_signing_key(session: Session, tenant: str) -> Generator[tuple[bytes, Path]]:
    """A new public key, and the file in which its private half is before anything is done with it.

    A key that is registered can be signed with, whatever is interrupted. Refused for certain, its file goes again.
    """
    seed = ed25519.generate()
    file = write_key(folder_of(session.settings), tenant, seed)
    try:
        yield ed25519.public_key(seed), file
    except AdminError:
        file.unlink()
        raise
    except Unavailable as error:
        raise Unavailable(f"{error}; {file} is kept, since its key may be registered") from None

"""Devices' keys: registered, rotated, retired, revoked, removed, listed (protocol section 8).

A change first waits until nothing signed by the device is being taken in, then changes the state: what was
acknowledged before it stays, and what is judged after it is judged by it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from postseal.admin.actor import Actor
from postseal.admin.devices import lock_quiet
from postseal.admin.names import require_tenant
from postseal.admin.removal import require_no_obstacles
from postseal.envelope import ed25519
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import devices, key_uses, keys, retention, signing_keys
from postseal.postgres.keys import RegisteredKey
from postseal.postgres.page import WHOLE, ListPart
from postseal.postgres.transaction import Connection
from postseal.rules.keys import MAX_KEYS, KeyState, Obstacle, Use, free_at, may_become, obstacles_of_device_key


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as administrators see it; `age_s` is the whole seconds since it was registered.

    `last_accepted_at` is as it was noted, which is done once a minute. `obstacles` says what keeps it from being
    removed (`rules.keys.ObstacleKind`), and `free_at` when all of that ends, as things stand; None if that cannot be
    told.
    """

    keyid: str
    device: str
    state: KeyState
    age_s: int
    accept_until: datetime | None
    registered_at: datetime
    changed_at: datetime
    last_accepted_at: datetime | None
    free_at: datetime | None
    obstacles: list[str]


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotation did: the key that is active now, and until when the ones before it (`retiring`) are taken."""

    keyid: str
    retiring: list[str]
    accept_until: datetime | None


async def list_of_tenant(
    connection: Connection, tenant: str, device: str | None = None, part: ListPart = WHOLE, *, window_s: int
) -> list[ListedKey]:
    """A tenant's keys, or those of one of its devices, oldest first. AdminError: no such tenant or device.

    `window_s` is how long after its last envelope a key is kept at least; so it is below.
    """
    await require_tenant(connection, tenant)
    if device is not None and await devices.find(connection, tenant, device) is None:
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no device {device!r}")
    found = await keys.list_of_tenant(connection, tenant, device, part)
    uses = await key_uses.read(connection, tenant, [key.keyid for key in found])
    on_hold = await retention.is_on_hold(connection, tenant)
    return [_listed(key, uses[key.keyid], window_s, on_hold=on_hold) for key in found]


async def register(connection: Connection, actor: Actor, tenant: str, device: str, public_key: bytes) -> str:
    """Give a device one more active key, and return its id; the others stay as they are.

    AdminError: no such device, or it is retired; no good public key, or one that the tenant had before; too many keys.
    """
    keyid = await _add(connection, tenant, device, public_key)
    await actor.acted(connection, "key.register", tenant=tenant, device=device, keyid=keyid)
    return keyid


async def rotate(
    connection: Connection, actor: Actor, tenant: str, device: str, public_key: bytes, *, overlap_s: int
) -> Rotation:
    """Give a device a new active key, and let those that were active accept for `overlap_s` seconds more.

    With 0 they bring nothing new from now on. AdminError as for `register`.
    """
    # First the streams: the new key is not to be retired with the others, and nothing is judged in between.
    await lock_quiet(connection, tenant, device)
    retiring = await keys.let_retire(connection, tenant, device, overlap_s=overlap_s)
    keyid = await _add(connection, tenant, device, public_key)
    rotation = Rotation(keyid, sorted(retiring), max(retiring.values(), default=None))
    await actor.acted(
        connection,
        "key.rotate",
        tenant=tenant,
        device=device,
        keyid=keyid,
        retiring=rotation.retiring,
        overlapS=overlap_s,
    )
    return rotation


async def retire(connection: Connection, actor: Actor, tenant: str, keyid: str) -> None:
    """Let a key verify what it signed and bring nothing new.

    AdminError: no such key, or it brings nothing new as it is.
    """
    await _fall(connection, actor, tenant, keyid, "key.retire", KeyState.VERIFY_ONLY)


async def revoke(connection: Connection, actor: Actor, tenant: str, keyid: str) -> None:
    """Revoke a key, at once. AdminError: no such key, revoked already, or removed."""
    await _fall(connection, actor, tenant, keyid, "key.revoke", KeyState.REVOKED)


async def obstacles(connection: Connection, tenant: str, keyid: str, *, window_s: int) -> list[Obstacle]:
    """All that keeps a key from being removed. AdminError: no such key, or it is removed."""
    return await _obstacles(connection, tenant, await _require_key(connection, tenant, keyid), window_s)


async def remove(connection: Connection, actor: Actor, tenant: str, keyid: str, *, window_s: int) -> None:
    """Remove a key: nothing that it signed is taken any more, not even again. Its public half stays, for ever.

    AdminError: no such key, it is removed, or something holds it; the message names all that does.
    """
    await lock_quiet(connection, tenant, (await _require_key(connection, tenant, keyid)).device)
    key = await _require_key(connection, tenant, keyid)
    require_no_obstacles(await _obstacles(connection, tenant, key, window_s))
    await _set(connection, actor, tenant, key, "key.remove", KeyState.REMOVED)


async def _add(connection: Connection, tenant: str, device: str, public_key: bytes) -> str:
    try:
        ed25519.check_public_key(public_key)
    except ValueError as error:
        raise AdminError(Reason.REQUEST_INVALID, str(error)) from None
    if (await lock_quiet(connection, tenant, device)).retired:
        raise AdminError(Reason.CONFLICT, f"device {device!r} is retired: enrol a new one")
    if await keys.count(connection, tenant, device) >= MAX_KEYS:
        raise AdminError(Reason.CONFLICT, f"device {device!r} has {MAX_KEYS} keys: remove those that are not needed")
    keyid = ed25519.thumbprint(public_key)
    signs = await signing_keys.find(connection, tenant, keyid) is not None
    if signs or not await keys.insert_if_new(
        connection, tenant=tenant, keyid=keyid, device=device, public_key=public_key
    ):
        raise AdminError(Reason.CONFLICT, f"tenant {tenant!r} has or had this key: make a new one")
    return keyid


async def _fall(connection: Connection, actor: Actor, tenant: str, keyid: str, action: str, to: KeyState) -> None:
    await lock_quiet(connection, tenant, (await _require_key(connection, tenant, keyid)).device)
    key = await _require_key(connection, tenant, keyid)
    if not may_become(key.state, to):
        raise AdminError(Reason.CONFLICT, f"the key is {key.state} already")
    await _set(connection, actor, tenant, key, action, to)


async def _set(
    connection: Connection, actor: Actor, tenant: str, key: RegisteredKey, action: str, to: KeyState
) -> None:
    await keys.set_state(connection, tenant, key.keyid, to)
    names = {"device": key.device, "keyid": key.keyid}
    await actor.acted(connection, action, tenant=tenant, **names, **{"from": key.state, "to": to})


async def _obstacles(connection: Connection, tenant: str, key: RegisteredKey, window_s: int) -> list[Obstacle]:
    if key.state is KeyState.REMOVED:
        raise AdminError(Reason.CONFLICT, "the key is removed already")
    uses = await key_uses.read(connection, tenant, [key.keyid])
    return _obstacles_of(key, uses[key.keyid], window_s, on_hold=await retention.is_on_hold(connection, tenant))


def _obstacles_of(key: RegisteredKey, uses: list[Use], window_s: int, *, on_hold: bool) -> list[Obstacle]:
    if key.state is KeyState.REMOVED:
        return []
    window = timedelta(seconds=window_s)
    return obstacles_of_device_key(key.state, key.accept_until, uses, on_hold=on_hold, window=window, now=key.read_at)


def _listed(key: RegisteredKey, uses: list[Use], window_s: int, *, on_hold: bool) -> ListedKey:
    found = _obstacles_of(key, uses, window_s, on_hold=on_hold)
    return ListedKey(
        key.keyid,
        key.device,
        key.state,
        key.age_s,
        key.accept_until,
        key.registered_at,
        key.changed_at,
        max((use.last_at for use in uses), default=None),
        free_at(found),
        sorted({str(obstacle.kind) for obstacle in found}),
    )


async def _require_key(connection: Connection, tenant: str, keyid: str) -> RegisteredKey:
    await require_tenant(connection, tenant)
    key = await keys.find(connection, tenant, keyid)
    if key is None:
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no such key: see `postseal key list`")
    return key

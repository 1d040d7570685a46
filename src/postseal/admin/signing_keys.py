"""The keys with which the control plane signs for a tenant: their public halves are registered and changed here.

The private half is where the deployment's SigningKeys looks (`postseal.signing`), and is there before this is done:
what is registered can be signed with. Each act makes a new version of the tenant's set of keys.

One that is active signs. After a rotation the one before it retires: nothing is signed with it here any more, and what
was signed with it elsewhere is taken until its time is over.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from postseal.admin.actor import Actor
from postseal.admin.names import require_tenant
from postseal.admin.removal import require_no_obstacles
from postseal.envelope import ed25519
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import keysets, retention, signing_keys
from postseal.postgres.signing_keys import RegisteredSigningKey
from postseal.postgres.transaction import Connection
from postseal.rules.keys import (
    MAX_KEYS,
    KeyState,
    Obstacle,
    ObstacleKind,
    free_at,
    may_become,
    obstacles_of_signing_key,
)


@dataclass(frozen=True, slots=True)
class ListedSigningKey:
    """A signing key as administrators see it; the members are as those of `admin.keys.ListedKey`."""

    keyid: str
    state: KeyState
    age_s: int
    accept_until: datetime | None
    registered_at: datetime
    changed_at: datetime
    free_at: datetime | None
    obstacles: list[str]


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotation did: the key that signs now, and until when what the one before it signed is taken."""

    keyid: str
    retiring: str
    accept_until: datetime


async def require_none(connection: Connection, tenant: str) -> None:
    """AdminError unless there is such a tenant and it has no active signing key."""
    await require_tenant(connection, tenant)
    if await signing_keys.find_active(connection, tenant) is not None:
        raise _has_one(tenant)


async def require_active(connection: Connection, tenant: str) -> None:
    """AdminError unless there is such a tenant and it has an active signing key."""
    await require_tenant(connection, tenant)
    if await signing_keys.find_active(connection, tenant) is None:
        raise _has_none(tenant)


async def create(connection: Connection, actor: Actor, tenant: str, public_key: bytes) -> str:
    """Register a tenant's active signing key, and return its id.

    AdminError: no such tenant, no good public key, or the tenant has an active one.
    """
    keyid = await _begin(connection, tenant, public_key)
    if not await signing_keys.insert_if_none_active(connection, tenant=tenant, keyid=keyid, public_key=public_key):
        raise _has_one(tenant)
    await actor.acted(connection, "signing-key.create", tenant=tenant, keyid=keyid)
    return keyid


async def rotate(connection: Connection, actor: Actor, tenant: str, public_key: bytes, *, overlap_s: int) -> Rotation:
    """Let a new key sign for a tenant, and take what the one before it signed elsewhere for `overlap_s` seconds more.

    AdminError: no such tenant, no good public key, one that the tenant had before, no active one, or too many keys.
    """
    keyid = await _begin(connection, tenant, public_key)
    retired = await signing_keys.let_active_retire(connection, tenant, overlap_s=overlap_s)
    if retired is None:
        raise _has_none(tenant)
    if not await signing_keys.insert_if_none_active(connection, tenant=tenant, keyid=keyid, public_key=public_key):
        raise AdminError(Reason.CONFLICT, f"tenant {tenant!r} has or had this key: make a new one")
    before, accept_until = retired
    await actor.acted(connection, "signing-key.rotate", tenant=tenant, keyid=keyid, retiring=before, overlapS=overlap_s)
    return Rotation(keyid, before, accept_until)


async def retire(connection: Connection, actor: Actor, tenant: str, keyid: str) -> None:
    """Let a key that retires verify what it signed, and end its time now.

    AdminError: no such key, it is active (rotate first), or it brings nothing new as it is.
    """
    key = await _begin_change(connection, tenant, keyid)
    if key.state is KeyState.ACTIVE:
        raise AdminError(Reason.CONFLICT, "the key signs for the tenant: rotate it first")
    await _fall(connection, actor, tenant, key, "signing-key.retire", KeyState.VERIFY_ONLY)


async def revoke(connection: Connection, actor: Actor, tenant: str, keyid: str) -> None:
    """Revoke a signing key: nothing that it signed is to be believed. If it is active nothing is sealed any more.

    AdminError: no such key, revoked already, or removed.
    """
    key = await _begin_change(connection, tenant, keyid)
    await _fall(connection, actor, tenant, key, "signing-key.revoke", KeyState.REVOKED)


async def obstacles(connection: Connection, tenant: str, keyid: str, *, window_s: int) -> list[Obstacle]:
    """All that keeps a signing key from being removed. AdminError: no such key, or it is removed.

    `window_s` is how long after it ended to sign a key is kept at least; so it is below.
    """
    return await _obstacles(connection, tenant, await _require_key(connection, tenant, keyid), window_s)


async def remove(connection: Connection, actor: Actor, tenant: str, keyid: str, *, window_s: int) -> None:
    """Remove a signing key: it is served no more. Its public half stays in the database, for ever.

    AdminError: no such key, it is removed, or something holds it; the message names all that does.
    """
    key = await _begin_change(connection, tenant, keyid)
    require_no_obstacles(await _obstacles(connection, tenant, key, window_s))
    await _fall(connection, actor, tenant, key, "signing-key.remove", KeyState.REMOVED)


async def list_of_tenant(connection: Connection, tenant: str, *, window_s: int) -> list[ListedSigningKey]:
    """All signing keys that a tenant ever had, oldest first. AdminError: no such tenant."""
    await require_tenant(connection, tenant)
    found = await signing_keys.list_of_tenant(connection, tenant)
    on_hold = await retention.is_on_hold(connection, tenant)
    return [await _listed(connection, tenant, key, window_s, on_hold=on_hold) for key in found]


async def is_one(connection: Connection, tenant: str, keyid: str) -> bool:
    """Whether the tenant ever had a signing key of that id, which no device's key has."""
    return await signing_keys.find(connection, tenant, keyid) is not None


async def _begin(connection: Connection, tenant: str, public_key: bytes) -> str:
    """What comes first where a key is new; its id."""
    await require_tenant(connection, tenant)
    try:
        ed25519.check_public_key(public_key)
    except ValueError as error:
        raise AdminError(Reason.REQUEST_INVALID, str(error)) from None
    await keysets.bump(connection, tenant)
    there = [key for key in await signing_keys.list_of_tenant(connection, tenant) if key.state is not KeyState.REMOVED]
    if len(there) >= MAX_KEYS:
        raise AdminError(
            Reason.CONFLICT, f"tenant {tenant!r} has {MAX_KEYS} signing keys: remove those that are not needed"
        )
    return ed25519.thumbprint(public_key)


async def _begin_change(connection: Connection, tenant: str, keyid: str) -> RegisteredSigningKey:
    """The key, which nobody else changes until this transaction ends."""
    await require_tenant(connection, tenant)
    await keysets.bump(connection, tenant)
    return await _require_key(connection, tenant, keyid)


async def _fall(
    connection: Connection, actor: Actor, tenant: str, key: RegisteredSigningKey, action: str, to: KeyState
) -> None:
    if not may_become(key.state, to):
        raise AdminError(Reason.CONFLICT, f"the key is {key.state} already")
    await signing_keys.set_state(connection, tenant, key.keyid, to)
    await actor.acted(connection, action, tenant=tenant, keyid=key.keyid, **{"from": key.state, "to": to})


async def _obstacles(connection: Connection, tenant: str, key: RegisteredSigningKey, window_s: int) -> list[Obstacle]:
    if key.state is KeyState.REMOVED:
        raise AdminError(Reason.CONFLICT, "the key is removed already")
    others = _other_obstacles(key, window_s, on_hold=await retention.is_on_hold(connection, tenant))
    return others + await _kept(connection, tenant, key)


def _other_obstacles(key: RegisteredSigningKey, window_s: int, *, on_hold: bool) -> list[Obstacle]:
    """All but kept envelopes, which have to be looked for."""
    return obstacles_of_signing_key(
        key.state, key.accept_until, key.ended_at, on_hold=on_hold, window=timedelta(seconds=window_s), now=key.read_at
    )


async def _kept(connection: Connection, tenant: str, key: RegisteredSigningKey) -> list[Obstacle]:
    """None of a key that signs: more of them come anyhow."""
    kept_for = [] if key.ended_at is None else await signing_keys.kept_for(connection, tenant, key)
    return [Obstacle(ObstacleKind.ENVELOPE, place) for place in kept_for]


async def _listed(
    connection: Connection, tenant: str, key: RegisteredSigningKey, window_s: int, *, on_hold: bool
) -> ListedSigningKey:
    found: list[Obstacle] = []
    if key.state is not KeyState.REMOVED:
        # A list looks for kept envelopes of those keys alone that nothing else keeps.
        found = _other_obstacles(key, window_s, on_hold=on_hold) or await _kept(connection, tenant, key)
    return ListedSigningKey(
        key.keyid,
        key.state,
        key.age_s,
        key.accept_until,
        key.registered_at,
        key.changed_at,
        free_at(found),
        sorted({str(obstacle.kind) for obstacle in found}),
    )


async def _require_key(connection: Connection, tenant: str, keyid: str) -> RegisteredSigningKey:
    await require_tenant(connection, tenant)
    key = await signing_keys.find(connection, tenant, keyid)
    if key is None:
        raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no such key: see `postseal key list --signing`")
    return key


def _has_one(tenant: str) -> AdminError:
    return AdminError(Reason.CONFLICT, f"tenant {tenant!r} has an active signing key already")


def _has_none(tenant: str) -> AdminError:
    return AdminError(
        Reason.CONFLICT, f"tenant {tenant!r} has no active signing key: make one with `postseal key create`"
    )

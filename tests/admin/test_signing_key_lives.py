"""A tenant's signing key from its creation to its tombstone, and the version that each act leaves."""

import asyncio
from typing import Any

import pytest
from acts import do, scalar, trail

from fleet import as_owner
from outgoing import new_destination
from postseal.admin import signing_keys
from postseal.admin.actor import Actor
from postseal.envelope import ed25519
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import keysets
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.postgres.signing_keys import find_active, list_signing, list_verifying
from postseal.rules.keys import MAX_KEYS, ObstacleKind

pytestmark = pytest.mark.anyio

ADA = Actor("os:ada")
HOUR_S, DAY_S = 3_600, 86_400
WINDOW = {"window_s": DAY_S}


def public_key() -> bytes:
    """A new one."""
    return ed25519.public_key(ed25519.generate())


@pytest.fixture
def access(access: Access) -> Access:
    """With tenant acme, which has the destination orders in project apollo."""
    new_destination(access)
    return access


async def rotated(database: Database, overlap_s: int = HOUR_S) -> tuple[str, str]:
    """A tenant whose first key (the former) was rotated to another."""
    first = await do(database, signing_keys.create, ADA, "acme", public_key())
    return first, (await do(database, signing_keys.rotate, ADA, "acme", public_key(), overlap_s=overlap_s)).keyid


async def states(database: Database) -> dict[str, str]:
    """The states of the tenant's signing keys, by id."""
    return {key.keyid: key.state for key in await do(database, signing_keys.list_of_tenant, "acme", **WINDOW)}


async def kinds(database: Database, keyid: str) -> list[ObstacleKind]:
    """What holds a key."""
    return [obstacle.kind for obstacle in await do(database, signing_keys.obstacles, "acme", keyid, **WINDOW)]


async def version(database: Database) -> int:
    """Of the tenant's set."""
    return (await do(database, keysets.read, "acme"))[0]


def age(access: Access, keyid: str, by: str = "2 days") -> None:
    """Let a key have ended to sign so long ago."""
    with as_owner(access) as owner:
        owner.execute(
            "UPDATE signing_keys SET changed_at = changed_at - %s::interval,"
            " accept_until = clock_timestamp() - %s::interval WHERE keyid = %s AND state = 'retiring'",
            [by, by, keyid],
        )
        owner.execute("UPDATE signing_keys SET changed_at = changed_at - %s::interval WHERE keyid = %s", [by, keyid])


def seal(access: Access, keyid: str, sequence: int, *, sealed: str, expires: str | None) -> None:
    """Let an envelope for orders be kept that a key signed; the times are from now on."""
    with as_owner(access) as owner:
        place = {"stream": scalar(owner, "SELECT stream FROM destinations"), "sequence": sequence}
        owner.execute(
            "INSERT INTO deliveries VALUES ('acme', %(stream)s, %(sequence)s, gen_random_uuid(), gen_random_uuid(),"
            " 'key:' || %(sequence)s, sha256(''), sha256(''), %(keyid)s, clock_timestamp() + %(sealed)s::interval)",
            place | {"keyid": keyid, "sealed": sealed},
        )
        owner.execute(
            "INSERT INTO payloads VALUES ('acme', %(stream)s, %(sequence)s,"
            " clock_timestamp() + %(expires)s::interval, '', '')",
            place | {"expires": expires},
        )


async def test_a_rotation_leaves_one_active_key(database: Database, access: Access) -> None:
    """The new one signs; what the old one signed elsewhere is taken until its time is over, and verifies after it."""
    first, second = await rotated(database)
    assert await states(database) == {first: "retiring", second: "active"}
    assert (await do(database, find_active, "acme")).keyid == second
    assert {key.keyid for key in await do(database, list_signing, "acme")} == {first, second}
    age(access, first, "1 second")
    assert await states(database) == {first: "verify-only", second: "active"}
    assert [key.keyid for key in await do(database, list_signing, "acme")] == [second]
    assert [(key.keyid, key.state) for key in await do(database, list_verifying, "acme")] == [
        (first, "verify-only"),
        (second, "active"),
    ]
    assert [action for _, action, _ in trail(access, "acme")] == ["signing-key.create", "signing-key.rotate"]


async def test_every_act_makes_a_newer_version(database: Database, access: Access) -> None:
    """Also after the database went back to an earlier moment: then it is as great as the time."""
    seen = [await version(database)]
    first = await do(database, signing_keys.create, ADA, "acme", public_key())
    seen.append(await version(database))
    second = (await do(database, signing_keys.rotate, ADA, "acme", public_key(), overlap_s=HOUR_S)).keyid
    seen.append(await version(database))
    await do(database, signing_keys.retire, ADA, "acme", first)
    seen.append(await version(database))
    await do(database, signing_keys.revoke, ADA, "acme", second)
    seen.append(await version(database))
    age(access, first)
    await do(database, signing_keys.remove, ADA, "acme", first, **WINDOW)
    seen.append(await version(database))
    assert seen[0] == 0
    assert seen == sorted(set(seen))
    with as_owner(access) as owner:
        owner.execute("UPDATE keysets SET version = 1")
    await do(database, signing_keys.create, ADA, "acme", public_key())
    assert await version(database) > seen[-1]


async def test_a_refused_act_changes_no_version(database: Database, access: Access) -> None:
    """What cannot be done is told, and leaves everything as it was."""
    nothing_to_rotate = (signing_keys.rotate, [public_key()], {"overlap_s": 0}, "has no active signing key")
    with pytest.raises(AdminError, match=nothing_to_rotate[3]):
        await do(database, nothing_to_rotate[0], ADA, "acme", *nothing_to_rotate[1], **nothing_to_rotate[2])
    first, second = await rotated(database)
    await do(database, signing_keys.retire, ADA, "acme", first)
    before, stood = await version(database), await states(database)
    cases: list[tuple[Any, list[Any], dict[str, Any], str]] = [
        (signing_keys.create, [public_key()], {}, "has an active signing key already"),
        (signing_keys.rotate, [bytes(32)], {"overlap_s": 0}, "canonical"),
        (signing_keys.retire, [second], {}, "signs for the tenant: rotate it first"),
        (signing_keys.retire, [first], {}, "the key is verify-only already"),
        (signing_keys.revoke, ["A" * 43], {}, "has no such key"),
        (signing_keys.remove, [first], WINDOW, "its last envelope is too recent until"),
        (signing_keys.remove, [second], WINDOW, "it is active"),
    ]
    for act, arguments, options, line in cases:
        with pytest.raises(AdminError, match=line):
            await do(database, act, ADA, "acme", *arguments, **options)
    assert (await version(database), await states(database)) == (before, stood)


async def test_rotations_that_come_at_once(database: Database, access: Access) -> None:
    """One after the other: each replaces the one before it, and one key is active in the end."""
    await do(database, signing_keys.create, ADA, "acme", public_key())
    rotations = await asyncio.gather(
        *(do(database, signing_keys.rotate, ADA, "acme", public_key(), overlap_s=HOUR_S) for _ in range(4))
    )
    stood = await states(database)
    assert sorted(stood.values()) == ["active"] + ["retiring"] * 4
    assert len({rotation.retiring for rotation in rotations}) == 4
    assert stood.keys() == {rotation.retiring for rotation in rotations} | {rotation.keyid for rotation in rotations}


async def test_each_condition_of_a_removal(database: Database, access: Access) -> None:
    """It signs, it retires, it ended too lately, envelopes of it are kept: each holds alone; then it goes."""
    first = await do(database, signing_keys.create, ADA, "acme", public_key())
    assert await kinds(database, first) == [ObstacleKind.ACTIVE]
    await do(database, signing_keys.rotate, ADA, "acme", public_key(), overlap_s=HOUR_S)
    assert await kinds(database, first) == [ObstacleKind.RETIRING]
    age(access, first, "1 second")
    assert await kinds(database, first) == [ObstacleKind.WINDOW]
    age(access, first)
    assert await kinds(database, first) == []

    seal(access, "k" * 43, 1, sealed="-5 days", expires=None)
    seal(access, first, 2, sealed="-4 days", expires="-1 minute")
    assert await kinds(database, first) == []
    seal(access, first, 3, sealed="-3 days", expires=None)
    seal(access, "k" * 43, 4, sealed="-1 hour", expires=None)
    [obstacle] = await do(database, signing_keys.obstacles, "acme", first, **WINDOW)
    assert (obstacle.kind, obstacle.place) == (ObstacleKind.ENVELOPE, "apollo/orders")
    with pytest.raises(AdminError, match="envelopes for apollo/orders that it signed are kept"):
        await do(database, signing_keys.remove, ADA, "acme", first, **WINDOW)
    with as_owner(access) as owner:
        owner.execute("UPDATE payloads SET expires_at = clock_timestamp() + interval '1 hour' WHERE sequence = 3")
    assert await kinds(database, first) == [ObstacleKind.ENVELOPE]
    with as_owner(access) as owner:
        owner.execute("DELETE FROM payloads WHERE sequence = 3")
    await do(database, signing_keys.remove, ADA, "acme", first, **WINDOW)
    assert (await states(database))[first] == "removed"
    assert first not in {key.keyid for key in await do(database, list_verifying, "acme")}
    assert trail(access, "acme")[-1][1:] == (
        "signing-key.remove",
        {"keyid": first, "from": "verify-only", "to": "removed"},
    )


async def test_a_removed_key_never_comes_back(database: Database, access: Access) -> None:
    """Neither by a rotation nor by being made anew."""
    key = public_key()
    first = await do(database, signing_keys.create, ADA, "acme", key)
    await do(database, signing_keys.rotate, ADA, "acme", public_key(), overlap_s=0)
    age(access, first)
    await do(database, signing_keys.remove, ADA, "acme", first, **WINDOW)
    with pytest.raises(AdminError, match="has or had this key"):
        await do(database, signing_keys.rotate, ADA, "acme", key, overlap_s=0)


async def test_a_tenant_has_a_bounded_number_of_signing_keys(database: Database, access: Access) -> None:
    """A set of keys is served whole, so one beyond the bound is a conflict."""
    await do(database, signing_keys.create, ADA, "acme", public_key())
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO signing_keys (tenant, keyid, public_key, state)"
            " SELECT 'acme', lpad(n::text, 43, 'k'), sha256(n::text::bytea), 'revoked'"
            " FROM generate_series(2, %s) AS n",
            [MAX_KEYS],
        )
    with pytest.raises(AdminError, match=f"has {MAX_KEYS} signing keys") as refused:
        await do(database, signing_keys.rotate, ADA, "acme", public_key(), overlap_s=0)
    assert refused.value.reason is Reason.CONFLICT

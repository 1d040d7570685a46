"""A device's key from its registration to its tombstone: what an operator does, and what holds a key."""

import asyncio
from typing import Any

import pytest
from acts import do, scalar, trail

from fleet import Device, as_owner, enrol, payload_of
from postseal.admin import devices, holds, keys
from postseal.admin.actor import Actor
from postseal.admin.removal import sentence
from postseal.envelope import ed25519
from postseal.errors import AdminError
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from postseal.postgres.reading import list_keys
from postseal.rules.keys import MAX_KEYS, ObstacleKind
from postseal.service import running_service
from postseal.settings import Settings

pytestmark = pytest.mark.anyio

ADA = Actor("os:ada")
HOUR_S, DAY_S = 3_600, 86_400
WINDOW = {"window_s": DAY_S}


@pytest.fixture
def device(access: Access) -> Device:
    """A device with one active key."""
    return enrol(access, "d1")


def new_key() -> tuple[bytes, bytes]:
    """A seed and its public key."""
    seed = ed25519.generate()
    return seed, ed25519.public_key(seed)


async def states(database: Database) -> dict[str, str]:
    """The states of all keys of tenant acme, by id."""
    return {key.keyid: key.state for key in await do(database, keys.list_of_tenant, "acme", **WINDOW)}


async def kinds(database: Database, keyid: str) -> list[ObstacleKind]:
    """What holds a key."""
    return [obstacle.kind for obstacle in await do(database, keys.obstacles, "acme", keyid, **WINDOW)]


def used(access: Access, device: Device, keyid: str, *, last: str = "-2 days", kept: str = "-1 hour") -> None:
    """Let a key have been used in the device's stream; the times are from now on."""
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO key_uses VALUES (%s, %s, %s, clock_timestamp() + %s::interval,"
            " clock_timestamp() + %s::interval)",
            [device.tenant, keyid, device.stream, last, kept],
        )


def with_hole(access: Access, device: Device, above: bytes) -> None:
    """Let the device's stream have this bitmap above its cursor."""
    with as_owner(access) as owner:
        owner.execute("UPDATE streams SET highest = 10, above = %s WHERE stream = %s", [above, device.stream])


async def test_a_registered_key_signs_beside_the_others(database: Database, access: Access, device: Device) -> None:
    """Both bring something new, and the trail tells who spoke for it."""
    seed, public_key = new_key()
    keyid = await do(database, keys.register, ADA, "acme", "d1", public_key)
    assert await states(database) == {device.keyid: "active", keyid: "active"}
    async with running_service(Settings(), access) as service:
        for sequence, signer in ((1, seed), (2, device.seed)):
            verdict = await service.inbox.receive(device.inbound(device.envelope(sequence, seed=signer)))
            assert verdict.outcome is Outcome.ACCEPTED
    assert trail(access, "acme") == [("os:ada", "key.register", {"device": "d1", "keyid": keyid})]


async def test_a_rotation_overlaps(database: Database, access: Access, device: Device) -> None:
    """The old key is taken until its time is over, then `key_retired`; its duplicates are always answered."""
    seed, public_key = new_key()
    before, late = device.envelope(1), device.envelope(3)
    async with running_service(Settings(), access) as service:

        async def send(body: bytes) -> Any:
            verdict = await service.inbox.receive(device.inbound(body))
            return getattr(verdict, "outcome", None) or getattr(verdict, "reason", None)

        assert await send(before) is Outcome.ACCEPTED
        rotated = await do(database, keys.rotate, ADA, "acme", "d1", public_key, overlap_s=HOUR_S)
        assert await states(database) == {device.keyid: "retiring", rotated.keyid: "active"}
        assert await send(device.envelope(4, seed=seed)) is Outcome.GAP
        assert await send(device.envelope(2)) is Outcome.REORDERED
        with as_owner(access) as owner:
            owner.execute("UPDATE keys SET accept_until = clock_timestamp() WHERE state = 'retiring'")
        assert await states(database) == {device.keyid: "verify-only", rotated.keyid: "active"}
        assert await send(late) is Reason.KEY_RETIRED
        assert await send(before) is Outcome.DUPLICATE
        assert await send(device.envelope(3, seed=seed)) is Outcome.REORDERED
    [(_, action, detail)] = trail(access, "acme")
    assert action == "key.rotate"
    assert detail == {"device": "d1", "keyid": rotated.keyid, "retiring": [device.keyid], "overlapS": HOUR_S}
    with pytest.raises(AdminError, match="the key is verify-only already"):
        await do(database, keys.retire, ADA, "acme", device.keyid)


async def test_a_rotation_without_overlap_ends_the_old_keys_now(database: Database, device: Device) -> None:
    """All that were active; those that retire already keep their time."""
    first = await do(database, keys.rotate, ADA, "acme", "d1", new_key()[1], overlap_s=HOUR_S)
    second = await do(database, keys.rotate, ADA, "acme", "d1", new_key()[1], overlap_s=0)
    assert second.retiring == [first.keyid]
    assert await states(database) == {device.keyid: "retiring", first.keyid: "verify-only", second.keyid: "active"}


async def test_what_cannot_be_a_key(database: Database, access: Access, device: Device) -> None:
    """A point that is none, a key that the tenant had, also as its signing key, and of a device that is retired."""
    await do(database, keys.register, ADA, "acme", "d1", new_key()[1])
    signing = new_key()[1]
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO signing_keys (tenant, keyid, public_key) VALUES ('acme', %s, %s)",
            [ed25519.thumbprint(signing), signing],
        )
    enrol(access, "gone")
    await do(database, devices.retire, ADA, "acme", "gone")
    fresh = new_key()[1]
    for name, public_key, reason in [
        ("d1", bytes(32), Reason.REQUEST_INVALID),
        ("d1", b"short", Reason.REQUEST_INVALID),
        ("d1", ed25519.public_key(device.seed), Reason.CONFLICT),
        ("d1", signing, Reason.CONFLICT),
        ("gone", fresh, Reason.CONFLICT),
        ("nobody", fresh, Reason.NOT_FOUND),
    ]:
        for act, options in ((keys.register, {}), (keys.rotate, {"overlap_s": 0})):
            with pytest.raises(AdminError) as refused:
                await do(database, act, ADA, "acme", name, public_key, **options)
            assert refused.value.reason is reason
    assert (await states(database))[device.keyid] == "active"


async def test_a_device_has_a_bounded_number_of_keys(database: Database, access: Access, device: Device) -> None:
    """The one beyond is a conflict, until one is removed."""
    with as_owner(access) as owner:
        owner.execute(
            "INSERT INTO keys (tenant, keyid, device, public_key, state)"
            " SELECT 'acme', lpad(n::text, 43, 'k'), 'd1', sha256(n::text::bytea), 'verify-only'"
            " FROM generate_series(2, %s) AS n",
            [MAX_KEYS],
        )
    with pytest.raises(AdminError, match=f"has {MAX_KEYS} keys"):
        await do(database, keys.register, ADA, "acme", "d1", new_key()[1])
    await do(database, keys.remove, ADA, "acme", "k" * 42 + "2", **WINDOW)
    await do(database, keys.register, ADA, "acme", "d1", new_key()[1])


async def test_each_condition_of_a_removal(database: Database, access: Access, device: Device) -> None:
    """One after the other holds alone, is named in the refusal, and ends; then the key goes."""
    keyid = device.keyid
    assert await kinds(database, keyid) == [ObstacleKind.ACTIVE]
    await do(database, keys.rotate, ADA, "acme", "d1", new_key()[1], overlap_s=HOUR_S)
    assert await kinds(database, keyid) == [ObstacleKind.RETIRING]
    await do(database, keys.retire, ADA, "acme", keyid)
    assert await kinds(database, keyid) == []

    used(access, device, keyid, last="-23 hours")
    assert await kinds(database, keyid) == [ObstacleKind.WINDOW]
    with as_owner(access) as owner:
        owner.execute("UPDATE key_uses SET last_at = last_at - interval '2 hours', kept_until = now() + interval '1 h'")
    assert await kinds(database, keyid) == [ObstacleKind.PAYLOAD]
    with as_owner(access) as owner:
        owner.execute("UPDATE key_uses SET kept_until = clock_timestamp() - interval '3 minutes'")
    with_hole(access, device, b"\x02")
    assert await kinds(database, keyid) == [ObstacleKind.HOLES]

    with_hole(access, device, b"")
    await do(database, holds.place, ADA, "acme", "case-17", reason="a claim")
    assert await kinds(database, keyid) == [ObstacleKind.ON_HOLD]
    with pytest.raises(AdminError, match="on hold"):
        await do(database, keys.remove, ADA, "acme", keyid, **WINDOW)
    await do(database, holds.release, ADA, "acme", "case-17", reason="settled")
    await do(database, keys.remove, ADA, "acme", keyid, **WINDOW)
    assert (await states(database))[keyid] == "removed"
    [removal] = [detail for _, action, detail in trail(access, "acme") if action == "key.remove"]
    assert removal == {"device": "d1", "keyid": keyid, "from": "verify-only", "to": "removed"}


async def test_a_refusal_names_everything_that_holds(database: Database, access: Access, device: Device) -> None:
    """In one line, each with its place or end; and the dry run says the same."""
    used(access, device, device.keyid, last="-1 hour", kept="3 days")
    with_hole(access, device, b"\x02")
    obstacles = await do(database, keys.obstacles, "acme", device.keyid, **WINDOW)
    with pytest.raises(AdminError) as refused:
        await do(database, keys.remove, ADA, "acme", device.keyid, **WINDOW)
    assert refused.value.reason is Reason.CONFLICT
    assert [obstacle.kind for obstacle in obstacles] == [
        ObstacleKind.ACTIVE,
        ObstacleKind.WINDOW,
        ObstacleKind.PAYLOAD,
        ObstacleKind.HOLES,
    ]
    assert all(sentence(obstacle) in str(refused.value) for obstacle in obstacles)
    assert "\n" not in str(refused.value)
    assert await states(database) == {device.keyid: "active"}
    [listed] = await do(database, keys.list_of_tenant, "acme", **WINDOW)
    assert (listed.obstacles, listed.free_at) == (["active", "holes", "payload", "window"], None)
    assert listed.last_accepted_at is not None


async def test_a_removed_key_is_a_tombstone(database: Database, access: Access, device: Device) -> None:
    """A service that remembers it answers `key_unknown`, to duplicates too; its public half stays; it never returns."""
    seed, public_key = new_key()
    body = device.envelope(1)
    async with running_service(Settings(), access) as service:
        assert (await service.inbox.receive(device.inbound(body))).outcome is Outcome.ACCEPTED
        await do(database, keys.rotate, ADA, "acme", "d1", public_key, overlap_s=0)
        with as_owner(access) as owner:
            past = "last_at = last_at - interval '2 days', kept_until = last_at - interval '1 hour'"
            owner.execute(f"UPDATE key_uses SET {past}".encode())  # noqa: S608 - a constant
        await do(database, keys.remove, ADA, "acme", device.keyid, **WINDOW)
        for again in (body, device.envelope(2)):
            assert (await service.inbox.receive(device.inbound(again))).reason is Reason.KEY_UNKNOWN
        same = device.envelope(1, seed=seed, **device_names(body))
        assert (await service.inbox.receive(device.inbound(same))).outcome is Outcome.DUPLICATE
    for act, options in ((keys.register, {}), (keys.rotate, {"overlap_s": 0})):
        with pytest.raises(AdminError, match="has or had this key"):
            await do(database, act, ADA, "acme", "d1", ed25519.public_key(device.seed), **options)
    for act in (keys.retire, keys.revoke):
        with pytest.raises(AdminError, match="the key is removed already"):
            await do(database, act, ADA, "acme", device.keyid)
    with pytest.raises(AdminError, match="the key is removed already"):
        await do(database, keys.remove, ADA, "acme", device.keyid, **WINDOW)
    tombstone, _ = await do(database, list_keys, tenant="acme", device="d1")
    assert (tombstone.keyid, tombstone.public_key, tombstone.state) == (
        device.keyid,
        ed25519.public_key(device.seed),
        "removed",
    )


def device_names(body: bytes) -> dict[str, Any]:
    """The names that an envelope carries, to sign the same event again."""
    payload = payload_of(body)
    return {name: payload[name] for name in ("eventId", "idempotencyKey")}


@pytest.mark.parametrize("round_", range(2))
async def test_revoking_while_envelopes_come_in(
    database: Database, access: Access, device: Device, round_: int
) -> None:
    """Whatever was acknowledged is retained, nothing after the act is new, and there is nothing in between."""
    async with running_service(Settings(), access) as service:
        begun = asyncio.Event()

        async def send(sequence: int) -> Any:
            verdict = await service.inbox.receive(device.inbound(device.envelope(sequence)))
            begun.set()
            return verdict

        async def revoke() -> None:
            await begun.wait()
            await do(database, keys.revoke, ADA, "acme", device.keyid)

        revoking = asyncio.create_task(revoke())
        verdicts = [await asyncio.gather(*(send(20 * turn + n) for n in range(1, 21))) for turn in range(8)]
        await revoking
        last = await send(500)
    flat = [verdict for turn in verdicts for verdict in turn]
    taken = {v.sequence for v in flat if getattr(v, "outcome", None)}
    refused = {v.reason for v in flat if getattr(v, "reason", None)}
    assert refused <= {Reason.KEY_REVOKED}
    assert last.reason is Reason.KEY_REVOKED
    with as_owner(access) as owner:
        assert {row[0] for row in owner.execute("SELECT sequence FROM identities").fetchall()} == taken
        after = scalar(
            owner,
            "SELECT count(*) FROM audit_events WHERE outcome IN ('accepted', 'gap', 'reordered')"
            " AND id > (SELECT id FROM audit_events WHERE action = 'key.revoke')",
        )
    assert after == 0

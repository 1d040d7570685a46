"""When a key was last used: noted with the envelopes themselves, once a minute for each key and stream."""

from datetime import datetime
from typing import Any

import psycopg
import pytest

from fleet import Device, add_key, as_owner
from postseal.envelope import ed25519
from postseal.inbound.uses import NOTED_EVERY_S, NotedUses
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.postgres.ingest import LookupNames, RetainedRow, StreamKey
from postseal.postgres.key_uses import KeyUse
from postseal.service import Service

pytestmark = pytest.mark.anyio

DAY_S = 86_400


def uses(access: Access) -> dict[tuple[int, str], tuple[datetime, datetime]]:
    """When each key was last used in each stream, and until when payloads of it are kept."""
    with as_owner(access) as owner:
        rows = owner.execute("SELECT stream, keyid, last_at, kept_until FROM key_uses").fetchall()
    return {(stream, keyid): (last_at, kept_until) for stream, keyid, last_at, kept_until in rows}


async def send(service: Service, device: Device, *sequences: int, **options: Any) -> list[Outcome | Reason]:
    """Send each in a group of its own; outcomes and reasons."""
    verdicts = [await service.inbox.receive(device.inbound(device.envelope(n, **options))) for n in sequences]
    return [getattr(verdict, "outcome", None) or verdict.reason for verdict in verdicts]


def row(keyid: str, stream: int = 1, retention_s: int = DAY_S) -> RetainedRow:
    """A new envelope by a key."""
    names = LookupNames(StreamKey("acme", stream), keyid, b"e" * 16, b"h" * 16)
    return RetainedRow(names, 1, b"i" * 32, b"", b"", retention_s)


async def test_the_first_use_is_noted_at_once_and_the_next_is_not(
    access: Access, service: Service, device: Device
) -> None:
    """With the time and the expiry of the envelope that it came with; the usual group writes no note."""
    assert await send(service, device, 1) == [Outcome.ACCEPTED]
    [(place, (last_at, kept_until))] = uses(access).items()
    assert place == (device.stream, device.keyid)
    with as_owner(access) as owner:
        found = owner.execute("SELECT accepted_at, expires_at FROM identities JOIN payloads USING (stream, sequence)")
        accepted_at, expires_at = found.fetchone() or (None, None)
        assert abs((last_at - accepted_at).total_seconds()) < 1
        assert abs((kept_until - expires_at).total_seconds()) < 1
        before = owner.execute("SELECT xmin::text, ctid FROM key_uses").fetchall()
        assert await send(service, device, 2, 3) == [Outcome.ACCEPTED] * 2
        assert owner.execute("SELECT xmin::text, ctid FROM key_uses").fetchall() == before


async def test_each_key_is_noted_by_itself(access: Access, service: Service, device: Device) -> None:
    """A further key of the device's is another use; what brings nothing new is none."""
    other = ed25519.generate()
    keyid = add_key(access, device, other)
    body = device.envelope(1)
    for _ in range(2):
        await service.inbox.receive(device.inbound(body))
    assert await send(service, device, 1, seed=other) == [Reason.SEQUENCE_CONFLICT]
    assert set(uses(access)) == {(device.stream, device.keyid)}
    assert await send(service, device, 2, seed=other) == [Outcome.ACCEPTED]
    assert set(uses(access)) == {(device.stream, device.keyid), (device.stream, keyid)}


async def test_a_use_whose_commit_failed_is_noted_with_the_next(
    access: Access, service: Service, device: Device
) -> None:
    """Nothing counts as noted that was not committed for certain."""
    with as_owner(access) as owner:
        owner.execute("ALTER TABLE key_uses ADD CONSTRAINT broken CHECK (last_at IS NULL)")
        assert await send(service, device, 1) == [Reason.UNAVAILABLE]
        assert owner.execute("SELECT count(*) FROM identities").fetchone() == (0,)
        owner.execute("ALTER TABLE key_uses DROP CONSTRAINT broken")
    assert await send(service, device, 1) == [Outcome.ACCEPTED]
    assert set(uses(access)) == {(device.stream, device.keyid)}


async def test_payloads_that_are_kept_longer_are_noted_at_once(
    access: Access, service: Service, device: Device
) -> None:
    """A project whose retention rises within the minute holds the key as long; one whose falls holds it no less."""
    await send(service, device, 1)
    [(_, first)] = uses(access).values()
    with as_owner(access) as owner:
        owner.execute("UPDATE projects SET payload_retention = interval '400 days'")
    await send(service, device, 2)
    [(_, longer)] = uses(access).values()
    assert (longer - first).days in (309, 310)
    with as_owner(access) as owner:
        owner.execute("UPDATE projects SET payload_retention = interval '1 day'")
    await send(service, device, 3)
    [(_, after)] = uses(access).values()
    assert after == longer


def test_what_is_due_to_be_noted() -> None:
    """Each key and stream once, with the longest retention; again after a minute, or for a longer one."""
    now = [0.0]
    noted = NotedUses(lambda: now[0])
    rows = [row("a"), row("a", retention_s=5 * DAY_S), row("a"), row("b"), row("a", stream=2)]
    first = noted.due(rows)
    assert sorted((use.keyid, use.stream, use.retention_s) for use in first) == [
        ("a", 1, 5 * DAY_S),
        ("a", 2, DAY_S),
        ("b", 1, DAY_S),
    ]
    assert noted.due([row("a")]) == [KeyUse("acme", "a", 1, DAY_S)]  # nothing was committed yet
    noted.noted(first)
    assert noted.due([row("a"), row("b"), row("a", stream=2)]) == []
    assert [use.keyid for use in noted.due([row("a"), row("b", retention_s=2 * DAY_S)])] == ["b"]
    now[0] = NOTED_EVERY_S
    assert [use.keyid for use in noted.due([row("b")])] == ["b"]


async def test_a_note_never_goes_back(access: Access, service: Service, device: Device) -> None:
    """A clock that was set back, or a second process, leaves the later times."""
    with as_owner(access) as owner:
        later = "clock_timestamp() + interval '1000 days'"
        owner.execute(
            psycopg.sql.SQL("INSERT INTO key_uses VALUES ('acme', {}, {}, {later}, {later})").format(
                device.keyid, device.stream, later=psycopg.sql.SQL(later)
            )
        )
    before = uses(access)
    await send(service, device, 1)
    assert uses(access) == before

"""The trail is read a page at a time, the newest last."""

from datetime import UTC, datetime, timedelta

import pytest
from acts import do

from fleet import as_owner, enrol
from postseal.admin import audit
from postseal.postgres.access import Access
from postseal.postgres.audit import AuditFilter
from postseal.postgres.database import Database

pytestmark = pytest.mark.anyio

EVENTS = 7
BASE = datetime(2026, 1, 1, tzinfo=UTC)
IDENTITY = bytes(range(32))


@pytest.fixture
def ids(access: Access) -> list[int]:
    """Ids of a trail of seven events an hour apart, every other one a refusal in another project."""
    enrol(access, "d1")
    with as_owner(access) as owner:
        for number in range(EVENTS):
            refused = number % 2 == 1
            owner.execute(
                "INSERT INTO audit_events (tenant, project, account, device, action, outcome, reason, event_identity,"
                " at, correlation_id) VALUES ('acme', %s, 'ops', 'd1', 'envelope', %s, %s, %s, %s, gen_random_uuid())",
                [
                    "gemini" if refused else "apollo",
                    "refused" if refused else "accepted",
                    "key_unknown" if refused else None,
                    IDENTITY,
                    BASE + timedelta(hours=number),
                ],
            )
        rows = owner.execute("SELECT id FROM audit_events ORDER BY id").fetchall()
    return [number for (number,) in rows]


async def test_pages_follow_each_other(database: Database, ids: list[int]) -> None:
    """The newest page first; older ones before its first, newer ones behind its last; nothing twice."""

    async def page(**bounds: int) -> list[int]:
        return [event.id for event in await do(database, audit.page, "acme", AuditFilter(), rows=3, **bounds)]

    assert await page() == ids[4:]
    assert await page(before=ids[4]) == ids[1:4]
    assert await page(before=ids[1]) == ids[:1]
    assert await page(after=ids[0]) == ids[1:4]
    assert await page(after=ids[6]) == []
    assert await page(after=0) == ids[:3]


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        (AuditFilter(project="gemini"), [1, 3, 5]),
        (AuditFilter(reason="key_unknown"), [1, 3, 5]),
        (AuditFilter(outcome="accepted"), [0, 2, 4, 6]),
        (AuditFilter(since=BASE + timedelta(hours=5)), [5, 6]),
        (AuditFilter(project="apollo", since=BASE + timedelta(hours=3)), [4, 6]),
        (AuditFilter(project="apollo", reason="key_unknown"), []),
    ],
)
async def test_filters_hold_together(
    database: Database, ids: list[int], wanted: AuditFilter, places: list[int]
) -> None:
    """An event is shown where all filters let it pass, on pages in both directions."""
    for bounds in ({}, {"after": 0}):
        events = await do(database, audit.page, "acme", wanted, rows=100, **bounds)
        assert [event.id for event in events] == [ids[place] for place in places]


async def test_an_event_tells_who_what_and_when(database: Database, ids: list[int]) -> None:
    """With the envelope's identity in hexadecimal digits."""
    [event] = await do(database, audit.page, "acme", AuditFilter(), rows=1, before=ids[2])
    assert (event.account, event.device, event.action) == ("ops", "d1", "envelope")
    assert (event.outcome, event.reason, event.project) == ("refused", "key_unknown", "gemini")
    assert event.event_identity == IDENTITY.hex()
    assert event.at == BASE + timedelta(hours=1)


async def test_the_administrators_part_cannot_change_the_trail(database: Database, ids: list[int]) -> None:
    """Its role may add events and read them, and nothing else."""
    for statement in ("UPDATE audit_events SET reason = NULL", "DELETE FROM audit_events", "TRUNCATE audit_events"):
        with pytest.raises(Exception, match="permission denied"):
            await database.transact(lambda connection, statement=statement: connection.execute(statement))

"""Mail follows its destination, whoever switched it, and also where they were cut off."""

import pytest
from mailing import Box, at_once, fill, make_box, make_worker, stages

from fleet import as_owner
from postseal.outbound import worker
from postseal.outbound.holding import move_mail
from postseal.postgres.access import Access
from postseal.postgres.database import Database
from until import until_async

pytestmark = pytest.mark.anyio


def switch(access: Access, box: Box, *, disabled: bool) -> None:
    """Disable or enable a destination, and die before its mail is moved."""
    values = "clock_timestamp(), disabled_reason = 'operator'" if disabled else "NULL, disabled_reason = NULL"
    with as_owner(access) as owner:
        owner.execute(f"UPDATE destinations SET disabled_at = {values} WHERE stream = %s".encode(), [box.stream])  # noqa: S608 - constants


def lanes(access: Access, box: Box) -> list[tuple[str]]:
    """In which lanes the mail of a box is."""
    with as_owner(access) as owner:
        return owner.execute("SELECT DISTINCT lane FROM queue WHERE stream = %s ORDER BY 1", [box.stream]).fetchall()


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_mail_follows_its_destination(access: Access, database: Database, mode: str):
    """More of it than one step moves; nothing else moves."""
    box, other = make_box(access, mode=mode), make_box(access, "crm")
    fill(access, box, 2100)
    fill(access, other, 1)
    for disabled, lane in ((True, "held"), (False, mode)):
        switch(access, box, disabled=disabled)
        await move_mail(database, box.tenant, box.stream)
        assert lanes(access, box) == [(lane,)]
    assert lanes(access, other) == [("push",)]


async def test_a_worker_mends_both_ways(access: Access, database: Database, monkeypatch: pytest.MonkeyPatch):
    """Mail that stayed in the workers' index is held, mail that stayed held is sent."""
    monkeypatch.setattr(worker, "MEND_EVERY_S", 0.1)
    left, pulled, held = make_box(access), make_box(access, "device-01", mode="pull"), make_box(access, "crm")
    for box in (left, pulled, held):
        fill(access, box, 5)
    switch(access, held, disabled=True)
    await move_mail(database, held.tenant, held.stream)
    switch(access, held, disabled=False)
    for box in (left, pulled):
        switch(access, box, disabled=True)
    async with make_worker(database, at_once()):
        await until_async(lambda: lanes(access, left) == lanes(access, pulled) == [("held",)])
        await until_async(lambda: stages(access, held) == {"delivered": 5})

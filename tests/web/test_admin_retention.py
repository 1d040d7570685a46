"""`/v1/admin/retention` and `/v1/admin/holds`: an operator's projects, and the tenant's for an operator of all."""

from uuid import uuid4

import pytest
from served import Site
from test_admin import act, acts, operator_of, read, refusal
from wire import Answer

from fleet import enrol


@pytest.fixture
def tenant(site: Site) -> str:
    """A tenant of this test's own with the projects apollo and zeus."""
    name = f"tenant-{uuid4()}"
    enrol(site.access, "one", tenant=name)
    enrol(site.access, "two", tenant=name, project="zeus")
    return name


def days(answer: Answer) -> tuple[int | None, list[tuple[str, int | None]]]:
    """The tenant's, and each project's."""
    assert answer.status == 200
    assert answer.document["defaultDays"] == 90
    return answer.document["days"], [(row["project"], row["days"]) for row in answer.document["projects"]]


def test_a_projects_operator_sets_its_retention(site: Site, tenant: str) -> None:
    """Its own project's, audited under the operator's account; another's is not found, the tenant's is forbidden."""
    operator = operator_of(site, tenant, "apollo")
    assert days(read(site, operator, "/retention")) == (None, [("apollo", None)])
    assert days(act(site, operator, "/projects/apollo/retention", {"days": 7})) == (None, [("apollo", 7)])
    assert days(act(site, operator, "/projects/apollo/retention", {"days": None})) == (None, [("apollo", None)])
    assert refusal(act(site, operator, "/projects/zeus/retention", {"days": 7})) == (404, "not_found")
    assert refusal(act(site, operator, "/retention", {"days": 7})) == (403, "role_forbidden")
    assert acts(site, tenant) == [
        ("owner-1", "apollo", "retention.set", {"from": None, "to": 7}),
        ("owner-1", "apollo", "retention.set", {"from": 7, "to": None}),
    ]


def test_an_operator_of_all_projects_sets_the_tenants(site: Site, tenant: str) -> None:
    """And sees all of them; days are 1 to 36,500, and must be said."""
    operator = operator_of(site, tenant, "apollo", "zeus")
    assert days(act(site, operator, "/retention", {"days": 30})) == (30, [("apollo", None), ("zeus", None)])
    for wrong in ({}, {"days": 0}, {"days": 36_501}, {"days": "7"}, {"days": 7, "project": "apollo"}):
        assert refusal(act(site, operator, "/retention", wrong)) == (400, "request_invalid")
    assert days(read(site, operator, "/retention"))[0] == 30


def test_holds_are_for_operators_of_all_projects(site: Site, tenant: str) -> None:
    """Placed once, listed, released with a reason; each act is in the trail."""
    operator, of_one = operator_of(site, tenant, "apollo", "zeus"), operator_of(site, tenant, "apollo")
    wanted = {"hold": "case-17", "reason": "a claim"}
    placed = act(site, operator, "/holds", wanted)
    assert (placed.status, placed.document) == (201, {"hold": "case-17"})
    assert refusal(act(site, operator, "/holds", wanted)) == (409, "conflict")
    [item] = read(site, operator, "/holds").document["items"]
    assert (item["hold"], item["reason"], item["account"]) == ("case-17", "a claim", "owner-1")
    for answer in (
        read(site, of_one, "/holds"),
        act(site, of_one, "/holds", wanted),
        act(site, of_one, "/holds/case-17/release", {"reason": "x"}),
    ):
        assert refusal(answer) == (403, "role_forbidden")
    assert refusal(act(site, operator, "/holds/case-17/release", {})) == (400, "request_invalid")
    assert act(site, operator, "/holds/case-17/release", {"reason": "settled"}).status == 200
    assert refusal(act(site, operator, "/holds/case-17/release", {"reason": "settled"})) == (404, "not_found")
    assert read(site, operator, "/holds").document["items"] == []
    assert [(account, action, detail) for account, _, action, detail in acts(site, tenant)] == [
        ("owner-1", "hold.place", wanted),
        ("owner-1", "hold.release", {"hold": "case-17", "reason": "settled"}),
    ]

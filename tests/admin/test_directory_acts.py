"""Tenants, projects, devices and credentials: what each act does, refuses, and leaves in the trail."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from acts import counts, do, scalar, trail

from fleet import as_owner, enrol, issue
from postseal.admin import audit, credentials, devices, keys, streams, tenants
from postseal.admin.actor import Actor
from postseal.errors import AdminError
from postseal.identity.tokens import TokenVerifier
from postseal.identity.verified import Role
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.postgres.audit import AuditFilter
from postseal.postgres.database import Database, Part

pytestmark = pytest.mark.anyio

ADA = Actor("os:ada")
KEYID = "A" * 43
DAY_S = 86_400


async def test_tenants_and_projects_are_made_once(database: Database, access: Access) -> None:
    """A tenant stands in both trails, its project in its own; each is listed by name."""
    for tenant in ("beta", "acme"):
        await do(database, tenants.create, ADA, tenant)
    await do(database, tenants.create_project, ADA, "acme", "apollo")

    assert [row.tenant for row in await do(database, tenants.list_all)] == ["acme", "beta"]
    assert [row.project for row in await do(database, tenants.list_projects, "acme")] == ["apollo"]
    assert [act[:2] for act in trail(access, "acme")] == [
        ("os:ada", "tenant.create"),
        ("os:ada", "project.create"),
    ]
    with as_owner(access) as owner:
        query = "SELECT account, action, detail FROM platform_audit_events ORDER BY id"
        assert owner.execute(query).fetchall() == [
            ("os:ada", "tenant.create", {"tenant": "beta"}),
            ("os:ada", "tenant.create", {"tenant": "acme"}),
        ]


async def test_an_act_and_its_event_commit_together(
    database: Database, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An act whose event cannot be written leaves nothing."""
    with as_owner(access) as owner:
        owner.execute("ALTER TABLE audit_events ADD CHECK (action <> 'tenant.create')")
    before = counts(access)
    with pytest.raises(Exception, match="audit_events"):
        await do(database, tenants.create, ADA, "acme")
    assert counts(access) == before


async def test_an_invitation_tells_its_code_once(database: Database, access: Access) -> None:
    """The code is printable, is kept as a hash alone, and is in neither trail nor repr."""
    await do(database, tenants.create, ADA, "acme")
    await do(database, tenants.create_project, ADA, "acme", "apollo")
    invitation = await do(database, devices.invite, ADA, "acme", "d1", projects=["apollo", "apollo"], lifetime_s=60)

    assert re.fullmatch(r"[!-~]{32,64}", invitation.code)
    assert invitation.projects == ["apollo"]
    assert invitation.code not in repr(invitation)
    assert trail(access, "acme")[-1] == (
        "os:ada",
        "device.invite",
        {"device": "d1", "account": "d1", "projects": ["apollo"], "addsKey": False},
    )
    with as_owner(access) as owner:
        assert invitation.code not in scalar(owner, "SELECT string_agg(i::text, ' ') FROM invitations i")
        assert 0 < scalar(owner, "SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM invitations") <= 60


async def test_a_retired_device_is_listed_and_its_id_is_used_up(database: Database, access: Access) -> None:
    """Retiring retires all streams of the device and of no other; its credential stays as it was."""
    enrol(access, "d1")
    enrol(access, "d2")
    await do(database, devices.retire, ADA, "acme", "d1")

    listed = {row.device: row.retired_at is not None for row in await do(database, devices.list_of_tenant, "acme")}
    assert listed == {"d1": True, "d2": False}
    standing = {stream.producer: stream.retired for stream in await do(database, streams.list_of_tenant, "acme")}
    assert standing == listed
    assert [row.state for row in await do(database, credentials.list_of_tenant, "acme")] == ["valid", "valid"]
    assert trail(access, "acme") == [("os:ada", "device.retire", {"device": "d1"})]


async def test_a_credential_works_until_it_is_revoked(database: Database, access: Access) -> None:
    """It verifies as its role and projects, is listed without its secret, and is revoked by its id."""
    enrol(access)
    issued = await do(
        database,
        credentials.create,
        ADA,
        "acme",
        role=Role.CONSUMER,
        projects=["apollo"],
        lifetime_s=60,
        account="reader",
    )
    async with Database(access.of(Part.INGEST), prepare=True, size=1) as ingest:
        identity = await TokenVerifier(ingest).verify(issued.credential)
        assert identity is not None
        assert (identity.account, identity.role, identity.projects) == ("reader", Role.CONSUMER, {"apollo"})
        await do(database, credentials.revoke, ADA, "acme", str(issued.credential_id))
        assert await TokenVerifier(ingest).verify(issued.credential) is None
    listed = {row.credential_id: row for row in await do(database, credentials.list_of_tenant, "acme")}
    assert listed[issued.credential_id].state == "revoked"
    assert issued.credential not in repr(listed)
    assert issued.credential not in repr(issued)
    assert [action for _, action, _ in trail(access, "acme")] == ["credential.create", "credential.revoke"]
    assert issued.credential.rpartition("_")[2] not in repr(trail(access, "acme"))


async def test_a_credential_that_is_over_is_listed_as_expired(database: Database, access: Access) -> None:
    """By the database's clock."""
    token = issue(access, enrol(access).tenant, None, ["apollo"], "sender")
    with as_owner(access) as owner:
        owner.execute(
            "UPDATE credentials SET expires_at = clock_timestamp() WHERE credential_id = %s", [token.credential_id]
        )
    states = {row.role: row.state for row in await do(database, credentials.list_of_tenant, "acme")}
    assert states == {"device": "valid", "sender": "expired"}


async def test_streams_and_keys_are_listed_by_project_and_device(database: Database, access: Access) -> None:
    """What was asked for and no more; a key with its state and age."""
    first, second = enrol(access, "d1", project="apollo"), enrol(access, "d2", project="gemini")
    enrol(access, "d1", tenant="other")

    listed = await do(database, streams.list_of_tenant, "acme", "gemini")
    assert [(stream.project, stream.producer) for stream in listed] == [("gemini", "d2")]
    [key] = await do(database, keys.list_of_tenant, "acme", "d1", window_s=DAY_S)
    assert (key.keyid, key.state) == (first.keyid, "active")
    assert 0 <= key.age_s < 60
    listed = await do(database, keys.list_of_tenant, "acme", window_s=DAY_S)
    assert {key.keyid for key in listed} == {first.keyid, second.keyid}


INVITE = {"projects": ["apollo"], "lifetime_s": 60}
ISSUE = {"role": Role.SENDER, "projects": ["apollo"], "lifetime_s": 60}
RAISE = {"floor": 1, "reason": "lost"}
LONG = "a" * 64


@pytest.mark.parametrize(
    ("act", "arguments", "options", "reason", "line"),
    [
        (tenants.create, [ADA, "acme"], {}, Reason.CONFLICT, "tenant 'acme' exists already"),
        (tenants.create, [ADA, "Acme"], {}, Reason.REQUEST_INVALID, "'Acme' cannot be a tenant: ids match"),
        (tenants.create, [ADA, "a\n"], {}, Reason.REQUEST_INVALID, r"'a\\n' cannot be a tenant"),
        (tenants.create, [ADA, LONG], {}, Reason.REQUEST_INVALID, "cannot be a tenant"),
        (tenants.create, [ADA, ""], {}, Reason.REQUEST_INVALID, "cannot be a tenant"),
        (tenants.list_projects, ["nope"], {}, Reason.NOT_FOUND, "there is no tenant 'nope'"),
        (tenants.create_project, [ADA, "nope", "p"], {}, Reason.NOT_FOUND, "there is no tenant 'nope'"),
        (tenants.create_project, [ADA, "acme", "P"], {}, Reason.REQUEST_INVALID, "'P' cannot be a project"),
        (tenants.create_project, [ADA, "acme", "apollo"], {}, Reason.CONFLICT, "has a project 'apollo' already"),
        (devices.invite, [ADA, "nope", "d9"], INVITE, Reason.NOT_FOUND, "there is no tenant 'nope'"),
        (devices.invite, [ADA, "acme", "D9"], INVITE, Reason.REQUEST_INVALID, "'D9' cannot be a device"),
        (devices.invite, [ADA, "acme", "controlplane"], INVITE, Reason.REQUEST_INVALID, "the service's own name"),
        (devices.invite, [ADA, "acme", "d1"], INVITE, Reason.CONFLICT, "ids are never used again"),
        (devices.invite, [ADA, "acme", "d0"], INVITE, Reason.CONFLICT, "ids are never used again"),
        (
            devices.invite,
            [ADA, "acme", "d9"],
            INVITE | {"account": "A"},
            Reason.REQUEST_INVALID,
            "'A' cannot be an account",
        ),
        (
            devices.invite,
            [ADA, "acme", "d9"],
            INVITE | {"projects": ["nope"]},
            Reason.NOT_FOUND,
            "tenant 'acme' has no project 'nope'",
        ),
        (devices.invite, [ADA, "acme", "d9"], INVITE | {"projects": []}, Reason.REQUEST_INVALID, "name 1 to"),
        (devices.invite, [ADA, "acme", "d9"], INVITE | {"adds_key": True}, Reason.NOT_FOUND, "has no device 'd9'"),
        (devices.invite, [ADA, "acme", "d0"], INVITE | {"adds_key": True}, Reason.CONFLICT, "'d0' is retired"),
        (
            devices.invite,
            [ADA, "acme", "d1"],
            INVITE | {"adds_key": True, "account": "other"},
            Reason.CONFLICT,
            "has the account 'owner-1' for good",
        ),
        (devices.list_of_tenant, ["nope"], {}, Reason.NOT_FOUND, "there is no tenant 'nope'"),
        (devices.retire, [ADA, "acme", "d9"], {}, Reason.NOT_FOUND, "has no device 'd9'"),
        (devices.retire, [ADA, "acme", "d0"], {}, Reason.CONFLICT, "'d0' is retired already"),
        (
            credentials.create,
            [ADA, "acme"],
            ISSUE | {"role": Role.DEVICE},
            Reason.REQUEST_INVALID,
            "a device gets its credential by enrolment",
        ),
        (credentials.create, [ADA, "acme"], ISSUE | {"projects": ["x"]}, Reason.NOT_FOUND, "no project 'x'"),
        (
            credentials.create,
            [ADA, "acme"],
            ISSUE | {"account": "-"},
            Reason.REQUEST_INVALID,
            "'-' cannot be an account",
        ),
        (credentials.list_of_tenant, ["nope"], {}, Reason.NOT_FOUND, "there is no tenant 'nope'"),
        (credentials.revoke, [ADA, "acme", "0" * 32], {}, Reason.NOT_FOUND, "has no such credential"),
        (keys.list_of_tenant, ["acme", "d9"], {"window_s": DAY_S}, Reason.NOT_FOUND, "has no device 'd9'"),
        (keys.revoke, [ADA, "acme", KEYID], {}, Reason.NOT_FOUND, "has no such key"),
        (keys.retire, [ADA, "nope", KEYID], {}, Reason.NOT_FOUND, "there is no tenant 'nope'"),
        (streams.list_of_tenant, ["acme", "x"], {}, Reason.NOT_FOUND, "no project 'x'"),
        (streams.show, ["acme", "apollo", "d9"], {}, Reason.NOT_FOUND, "has no stream of 'd9'"),
        (streams.raise_floor, [ADA, "acme", "apollo", "d9"], RAISE, Reason.NOT_FOUND, "has no stream of 'd9'"),
        (audit.page, ["nope", AuditFilter()], {"rows": 1}, Reason.NOT_FOUND, "there is no tenant 'nope'"),
        (audit.page, ["acme", AuditFilter()], {"rows": 1001}, Reason.REQUEST_INVALID, "1 to 1000"),
        (
            audit.page,
            ["acme", AuditFilter()],
            {"rows": 1, "before": 1, "after": 1},
            Reason.REQUEST_INVALID,
            "not both",
        ),
    ],
)
async def test_what_cannot_be_done_is_told_in_one_line(
    database: Database,
    access: Access,
    act: Callable[..., Any],
    arguments: list[Any],
    options: dict[str, Any],
    reason: Reason,
    line: str,
) -> None:
    """The line names what is wrong, and nothing is changed."""
    enrol(access, "d1")
    enrol(access, "d0")
    await do(database, devices.retire, ADA, "acme", "d0")
    before = counts(access)
    with pytest.raises(AdminError, match=line) as refused:
        await do(database, act, *arguments, **options)
    assert refused.value.reason is reason
    assert "\n" not in str(refused.value)
    assert counts(access) == before


async def test_a_pasted_credential_is_not_repeated(database: Database, access: Access) -> None:
    """Somebody who gives the credential for its id does not find it in the message."""
    device = enrol(access)
    with pytest.raises(AdminError) as refused:
        await do(database, credentials.revoke, ADA, "acme", device.token.reveal())
    assert device.token.reveal() not in str(refused.value)
    assert refused.value.__suppress_context__


async def test_what_belongs_to_another_tenant_is_not_there(database: Database, access: Access) -> None:
    """Devices, keys, credentials, streams and trails are found in their own tenant alone."""
    device = enrol(access, "d1")
    await do(database, tenants.create, ADA, "other")
    for act, arguments in [
        (devices.retire, [ADA, "other", "d1"]),
        (keys.revoke, [ADA, "other", device.keyid]),
        (credentials.revoke, [ADA, "other", str(device.token.credential_id)]),
        (streams.show, ["other", "apollo", "d1"]),
    ]:
        with pytest.raises(AdminError) as refused:
            await do(database, act, *arguments)
        assert refused.value.reason is Reason.NOT_FOUND
    assert await do(database, devices.list_of_tenant, "other") == []
    assert await do(database, keys.list_of_tenant, "other", window_s=DAY_S) == []
    assert await do(database, credentials.list_of_tenant, "other") == []
    assert await do(database, streams.list_of_tenant, "other") == []

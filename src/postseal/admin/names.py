"""What every act asks of what it was given: that names are ids and name something, and that a reason is one."""

from collections.abc import Sequence
from enum import StrEnum

from postseal.envelope.names import ID
from postseal.errors import AdminError
from postseal.outcomes import Reason
from postseal.postgres import directory
from postseal.postgres.transaction import Connection

MAX_PROJECTS = 1_000
"""Projects that one invitation or credential can name."""
MAX_REASON_CHARACTERS = 500


def require_id(noun: str, text: str) -> None:
    """Raise AdminError unless `text` is an id of protocol section 1."""
    if not ID.fullmatch(text):
        raise AdminError(Reason.REQUEST_INVALID, f"{text!r} cannot be {noun}: ids match {ID.pattern}")


def require_code(code: str | None, codes: type[StrEnum]) -> None:
    """Raise AdminError unless `code` is one of `codes`, or none is asked for."""
    if code is not None and code not in list(codes):
        raise AdminError(Reason.REQUEST_INVALID, f"there is no code {code!r}: it is one of {', '.join(codes)}")


async def require_tenant(connection: Connection, tenant: str) -> None:
    """Raise AdminError unless there is such a tenant."""
    if not await directory.tenant_exists(connection, tenant):
        raise AdminError(Reason.NOT_FOUND, f"there is no tenant {tenant!r}")


async def require_projects(connection: Connection, tenant: str, projects: Sequence[str]) -> list[str]:
    """The projects in order, each once. Raises AdminError unless the tenant exists and has all of them."""
    await require_tenant(connection, tenant)
    wanted = sorted(set(projects))
    if not 1 <= len(wanted) <= MAX_PROJECTS:
        raise AdminError(Reason.REQUEST_INVALID, f"name 1 to {MAX_PROJECTS} projects")
    existing = await directory.existing_projects(connection, tenant, wanted)
    for project in wanted:
        if project not in existing:
            raise AdminError(Reason.NOT_FOUND, f"tenant {tenant!r} has no project {project!r}")
    return wanted


def require_reason(reason: str) -> None:
    """Raise AdminError unless `reason` is a line of text that the trail can keep."""
    if not reason.strip() or not reason.isprintable() or len(reason) > MAX_REASON_CHARACTERS:
        raise AdminError(Reason.REQUEST_INVALID, f"the reason is one line of 1 to {MAX_REASON_CHARACTERS} characters")

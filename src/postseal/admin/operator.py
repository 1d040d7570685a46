"""An operator: who acts over HTTP, in one tenant, on the projects of one credential.

Acts ask here first, in the transaction in which they are done. What has no share in the operator's projects is not
there (`not_found`). What the operator sees but shares with other projects, a device with a stream in one of them or a
credential for one of them, is refused with `role_forbidden`: an act on it would reach into those projects.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from postseal.admin.actor import Actor
from postseal.errors import AdminError, Refused
from postseal.identity.verified import VerifiedIdentity
from postseal.outcomes import Reason
from postseal.postgres import credentials, devices, directory, keys, streams
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Operator:
    """Whom the trail names, and how far their acts reach."""

    actor: Actor
    tenant: str
    projects: frozenset[str]

    @classmethod
    def of(cls, caller: VerifiedIdentity) -> "Operator":
        """The operator whose credential was verified."""
        return cls(Actor(caller.account), caller.tenant, caller.projects)

    def require_projects(self, projects: Iterable[str]) -> None:
        """AdminError `not_found` unless all of them are the operator's."""
        if not self.projects.issuperset(projects):
            raise _not_found()

    async def covers_tenant(self, connection: Connection) -> bool:
        """Whether the operator has all projects that the tenant has now."""
        projects = await directory.list_projects(connection, self.tenant)
        return self.projects.issuperset(row.project for row in projects)

    async def require_tenant(self, connection: Connection) -> None:
        """Raise unless all projects of the tenant are the operator's."""
        if not await self.covers_tenant(connection):
            raise Refused(Reason.ROLE_FORBIDDEN, "this reaches into projects that the credential is not for")

    async def require_seen_device(self, connection: Connection, device: str) -> None:
        """AdminError `not_found` unless a device has a stream in one of the operator's projects."""
        if self.projects.isdisjoint(await streams.projects_of_device(connection, self.tenant, device)):
            raise _not_found()

    async def require_device(self, connection: Connection, device: str) -> None:
        """Lock a device, so that it gets no further streams, and raise unless all that it has are the operator's."""
        if await devices.lock(connection, self.tenant, device) is None:
            raise _not_found()
        self._require_all(await streams.projects_of_device(connection, self.tenant, device))

    async def require_key(self, connection: Connection, keyid: str) -> None:
        """The same for the device whose key it is."""
        key = await keys.find(connection, self.tenant, keyid)
        if key is None:
            raise _not_found()
        await self.require_device(connection, key.device)

    async def require_credential(self, connection: Connection, credential_id: UUID) -> None:
        """Raise unless all projects of a credential are the operator's."""
        projects = await credentials.find_projects(connection, self.tenant, credential_id)
        self._require_all(projects or [])

    def _require_all(self, projects: list[str]) -> None:
        if self.projects.isdisjoint(projects):
            raise _not_found()
        if not self.projects.issuperset(projects):
            raise Refused(Reason.ROLE_FORBIDDEN, "this reaches into projects that the credential is not for")


def _not_found() -> AdminError:
    return AdminError(Reason.NOT_FOUND, "there is no such thing, or it is not the caller's")

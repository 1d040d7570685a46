"""Who does an administrator's act, and the audit event that it leaves (protocol section 6)."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from postseal.correlation import new_correlation_id
from postseal.postgres import audit
from postseal.postgres.transaction import Connection


@dataclass(frozen=True, slots=True)
class Actor:
    """Whoever is to be named in the trail: `os:<user name>` for somebody at the command line."""

    account: str

    async def acted(
        self,
        connection: Connection,
        action: str,
        *,
        tenant: str,
        project: str | None = None,
        **detail: Any,
    ) -> None:
        """Write an act on a tenant into its trail. `detail` holds names and numbers, never a secret."""
        await audit.insert_act(
            connection,
            tenant=tenant,
            project=project,
            account=self.account,
            device=None,
            action=action,
            detail=detail,
            correlation_id=_correlation_id(),
        )

    async def acted_on_platform(self, connection: Connection, action: str, **detail: Any) -> None:
        """Write an act on the platform itself into its trail."""
        await audit.insert_platform_act(
            connection,
            account=self.account,
            action=action,
            detail=detail,
            correlation_id=_correlation_id(),
        )


def _correlation_id() -> UUID:
    return UUID(bytes=new_correlation_id())

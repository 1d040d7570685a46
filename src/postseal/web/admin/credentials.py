"""`/v1/admin/credentials`: list, create, revoke."""

from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta, Struct

from postseal.admin import credentials
from postseal.admin.credentials import IssuedCredential
from postseal.admin.names import MAX_PROJECTS
from postseal.admin.operator import Operator
from postseal.identity.verified import Role
from postseal.outcomes import Reason
from postseal.postgres.credentials import ListedCredential
from postseal.postgres.database import Connection
from postseal.web.admin.office import ADMIN, DEFAULT_PAGE_ITEMS, OPERATORS, Office, page_of
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, milliseconds
from postseal.web.query import Id, Limit, UuidOrEmpty

CREDENTIALS = f"{ADMIN}/credentials"


class Credential(Struct, frozen=True, rename="camel"):
    """A credential without its secret, and for which of the operator's projects it is."""

    credential_id: str
    role: Role
    account: str
    device: str | None
    projects: list[str]
    state: Annotated[str, Meta(description="valid, expired or revoked")]
    created_at_ms: int
    expires_at_ms: int
    revoked_at_ms: int | None


class CredentialList(Struct, frozen=True):
    """Credentials, oldest first; `next` is the `after` of the next page, null at the end."""

    items: list[Credential]
    next: str | None


class CredentialsQuery(Struct, frozen=True):
    """Which credentials; `after` is an id."""

    after: UuidOrEmpty = ""
    limit: Limit = DEFAULT_PAGE_ITEMS


class NewCredential(Struct, frozen=True, forbid_unknown_fields=True):
    """Whom a credential is for; its account is named like its role where none is given."""

    role: Literal["consumer", "sender"]
    projects: Annotated[list[Id], Meta(min_length=1, max_length=MAX_PROJECTS)]
    account: Id | None = None


class CreatedCredential(Struct, frozen=True, rename="camel"):
    """A new credential; it is shown this once."""

    credential_id: str
    role: Role
    account: str
    projects: list[str]
    credential: str
    expires_at_ms: int


class CredentialCalls:
    """The credentials for an operator's projects."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def calls(self) -> list[Call]:
        """All of them."""
        reception, revoke = self._office.reception, f"{CREDENTIALS}/{{credential}}/revoke"
        return [
            reception.read(CREDENTIALS, self.list_all, roles=OPERATORS, query=CredentialsQuery, answer=CredentialList),
            reception.change(
                CREDENTIALS,
                self.create,
                roles=OPERATORS,
                body=NewCredential,
                answer=CreatedCredential,
                status=201,
                reasons=(Reason.NOT_FOUND,),
            ),
            reception.order(revoke, self.revoke, roles=OPERATORS),
        ]

    async def list_all(self, asked: Asked[CredentialsQuery, Nothing]) -> CredentialList:
        """The credentials for one of the operator's projects, devices' included."""
        after, limit = asked.query.after, asked.query.limit

        async def work(connection: Connection, operator: Operator) -> list[ListedCredential]:
            return await credentials.list_of_tenant(connection, operator.tenant, page_of(operator, after, limit))

        rows = await self._office.act(asked, work)
        last = str(rows[-1].credential_id) if len(rows) == limit else None
        return CredentialList([_credential(row) for row in rows], last)

    async def create(self, asked: Asked[Nothing, NewCredential]) -> CreatedCredential:
        """Make a credential of a consumer or a sender; those of operators are made at the command line."""
        wanted = asked.body

        async def work(connection: Connection, operator: Operator) -> IssuedCredential:
            operator.require_projects(wanted.projects)
            return await credentials.create(
                connection,
                operator.actor,
                operator.tenant,
                role=Role(wanted.role),
                projects=wanted.projects,
                lifetime_s=self._office.credential_lifetime_s,
                account=wanted.account,
            )

        made = await self._office.act(asked, work)
        return CreatedCredential(
            str(made.credential_id),
            made.role,
            made.account,
            made.projects,
            made.credential,
            milliseconds(made.expires_at),
        )

    async def revoke(self, asked: Asked[Nothing, Nothing]) -> None:
        """Revoke a credential; every process refuses it within seconds."""
        credential_id = asked.path["credential"]

        async def work(connection: Connection, operator: Operator) -> None:
            await operator.require_credential(connection, UUID(credential_id))
            await credentials.revoke(connection, operator.actor, operator.tenant, credential_id)

        await self._office.act(asked, work)


def _credential(row: ListedCredential) -> Credential:
    return Credential(
        str(row.credential_id),
        Role(row.role),
        row.account,
        row.device,
        row.projects,
        row.state,
        milliseconds(row.created_at),
        milliseconds(row.expires_at),
        None if row.revoked_at is None else milliseconds(row.revoked_at),
    )

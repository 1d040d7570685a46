"""`/v1/admin/projects/{project}/destinations`: list, create, change, disable, enable, test, rotate the secret."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import structlog
from msgspec import UNSET, Meta, Struct, UnsetType
from structlog.typing import FilteringBoundLogger

from postseal.admin import destinations
from postseal.admin.actor import Actor
from postseal.admin.destinations import CreatedDestination, Secrets
from postseal.admin.operator import Operator
from postseal.admin.secrets import MAX_OVERLAP_S, Schemes, ShownSecret, schemes_of
from postseal.errors import Refused, StartupError, Unavailable
from postseal.outbound.holding import move_mail
from postseal.outbound.probing import probe
from postseal.outcomes import Reason
from postseal.postgres import destinations as rows
from postseal.postgres.database import Connection, Database
from postseal.senders import Scheme, Sender
from postseal.senders.addresses import MAX_URL_CHARACTERS
from postseal.senders.secrets import DeploymentKey
from postseal.settings import Settings
from postseal.web.admin.office import ADMIN, DEFAULT_PAGE_ITEMS, OPERATORS, Office
from postseal.web.calls import Asked, Call
from postseal.web.documents import Nothing, milliseconds
from postseal.web.query import Id, IdOrEmpty, Limit
from postseal.worker_service import deployment_key

DESTINATIONS = f"{ADMIN}/projects/{{project}}/destinations"
DEFAULT_OVERLAP_S = 86_400

T = TypeVar("T")

_log: FilteringBoundLogger = structlog.get_logger("postseal.destinations")

Url = Annotated[str, Meta(min_length=1, max_length=MAX_URL_CHARACTERS)]
MaxPending = Annotated[int, Meta(ge=1, le=100_000_000)]


class Destination(Struct, frozen=True, kw_only=True, rename="camel"):
    """A destination, and how it fares; `lastCode` is why the last attempt that failed did."""

    destination: str
    mode: Literal["push", "pull"]
    url: str | None
    max_pending: int
    pending: int
    highest: int
    created_at_ms: int
    disabled_at_ms: int | None
    disabled_reason: str | None
    failing_since_ms: int | None
    last_failure_at_ms: int | None
    last_code: str | None
    last_success_at_ms: int | None
    next_due_at_ms: int | None


class DestinationList(Struct, frozen=True):
    """Destinations by name; `next` is the `after` of the next page, null at the end."""

    items: list[Destination]
    next: str | None


class DestinationsQuery(Struct, frozen=True):
    """Which destinations."""

    after: IdOrEmpty = ""
    limit: Limit = DEFAULT_PAGE_ITEMS


class NewDestination(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A destination that is pushed to, at `url`; or one that a device pulls from, whose id it has."""

    destination: Id
    mode: Literal["push", "pull"]
    url: Url | UnsetType = UNSET
    scheme: Schemes | UnsetType = UNSET
    max_pending: MaxPending | UnsetType = UNSET


class DestinationChange(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What is to be another one: the URL of a destination that is pushed to, or how much may be pending."""

    url: Url | UnsetType = UNSET
    max_pending: MaxPending | UnsetType = UNSET


class DestinationSecret(Struct, frozen=True):
    """What a receiver verifies requests with, shown this once: `whsec_…` of `v1`, the public `whpk_…` of `v1a`."""

    secret: str
    scheme: Scheme
    receiver: str


class NewSecrets(Struct, frozen=True):
    """New secrets."""

    secrets: list[DestinationSecret]


class MadeDestination(Struct, frozen=True, rename="camel"):
    """A new destination, with its secrets."""

    destination: str
    mode: Literal["push", "pull"]
    url: str | None
    max_pending: int
    secrets: list[DestinationSecret]


class Rotation(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Of which schemes new secrets are made, by default all; for how many seconds the older ones go on signing."""

    scheme: Schemes | UnsetType = UNSET
    overlap_s: Annotated[int, Meta(ge=0, le=MAX_OVERLAP_S)] = DEFAULT_OVERLAP_S


class TestResult(Struct, frozen=True):
    """How a test went: `code` says why it failed, and is null where the receiver took it."""

    delivered: bool
    code: str | None


@dataclass(frozen=True, slots=True)
class Outbound:
    """What destinations need beside the office. `database` is the part that delivers."""

    settings: Settings
    database: Database
    sender: Sender
    """One for all tests, whose threads and connections are bounded once for the process."""

    def key(self) -> DeploymentKey:
        """The deployment's key. Raises Unavailable where it cannot be used; the log says why."""
        try:
            return deployment_key(self.settings)
        except StartupError as error:
            _log.error("deployment_key_not_used", why=str(error))
            raise Unavailable("the deployment key cannot be used") from None


class DestinationCalls:
    """The destinations of an operator's projects."""

    def __init__(self, office: Office, outbound: Outbound) -> None:
        self._office = office
        self._outbound = outbound

    def calls(self) -> list[Call]:
        """All of them."""
        reception, one = self._office.reception, f"{DESTINATIONS}/{{destination}}"
        conflict = (Reason.CONFLICT,)
        return [
            reception.read(
                DESTINATIONS, self.list_all, roles=OPERATORS, query=DestinationsQuery, answer=DestinationList
            ),
            reception.change(
                DESTINATIONS,
                self.create,
                roles=OPERATORS,
                body=NewDestination,
                answer=MadeDestination,
                status=201,
                reasons=conflict,
            ),
            reception.change(
                f"{one}/change",
                self.change,
                roles=OPERATORS,
                body=DestinationChange,
                answer=Destination,
                reasons=conflict,
            ),
            reception.order(f"{one}/disable", self.disable, roles=OPERATORS),
            reception.order(f"{one}/enable", self.enable, roles=OPERATORS, reasons=conflict),
            reception.trial(f"{one}/test", self.test, roles=OPERATORS, answer=TestResult, reasons=conflict),
            reception.change(
                f"{one}/rotate-secret",
                self.rotate_secret,
                roles=OPERATORS,
                body=Rotation,
                answer=NewSecrets,
                reasons=conflict,
            ),
        ]

    async def list_all(self, asked: Asked[DestinationsQuery, Nothing]) -> DestinationList:
        """The destinations of a project, with their health."""
        project, after, limit = asked.path["project"], asked.query.after, asked.query.limit

        async def work(connection: Connection, operator: Operator) -> list[rows.Destination]:
            operator.require_projects([project])
            return await destinations.page(connection, operator.tenant, project, after=after, rows=limit)

        found = await self._office.act(asked, work)
        last = found[-1].destination if len(found) == limit else None
        return DestinationList([_destination(row) for row in found], last)

    async def create(self, asked: Asked[Nothing, NewDestination]) -> MadeDestination:
        """Make a destination; its secrets are shown this once."""
        project, wanted = asked.path["project"], asked.body
        settings = self._outbound.settings
        max_pending = settings.max_pending if wanted.max_pending is UNSET else wanted.max_pending
        secrets = None if wanted.mode == "pull" else Secrets(self._outbound.key(), settings.allow_http)

        async def work(connection: Connection, operator: Operator) -> CreatedDestination:
            operator.require_projects([project])
            if secrets is None:
                if (wanted.url, wanted.scheme) != (UNSET, UNSET):
                    raise Refused(Reason.REQUEST_INVALID, "what is pulled from has neither url nor scheme")
                return await destinations.create_pull(
                    connection, operator.actor, operator.tenant, project, wanted.destination, max_pending=max_pending
                )
            if wanted.url is UNSET:
                raise Refused(Reason.REQUEST_INVALID, "what is pushed to needs a url")
            return await destinations.create_push(
                connection,
                operator.actor,
                operator.tenant,
                project,
                wanted.destination,
                url=wanted.url,
                schemes=schemes_of(_given(wanted.scheme)),
                max_pending=max_pending,
                secrets=secrets,
            )

        made = await self._office.act(asked, work)
        return MadeDestination(made.destination, made.mode, made.url, made.max_pending, _secrets(made.secrets))

    async def change(self, asked: Asked[Nothing, DestinationChange]) -> Destination:
        """Give a destination another URL, or other room for what is pending; its secrets and its mail stay."""
        project, destination, wanted = asked.path["project"], asked.path["destination"], asked.body

        async def work(connection: Connection, operator: Operator) -> rows.Destination:
            operator.require_projects([project])
            return await destinations.change(
                connection,
                operator.actor,
                operator.tenant,
                project,
                destination,
                url=_given(wanted.url),
                max_pending=_given(wanted.max_pending),
                allow_http=self._outbound.settings.allow_http,
            )

        return _destination(await self._office.act(asked, work))

    async def disable(self, asked: Asked[Nothing, Nothing]) -> None:
        """Send nothing more to a destination; its mail is held."""
        await self._switch(asked, destinations.disable)

    async def enable(self, asked: Asked[Nothing, Nothing]) -> None:
        """Send what is held for a destination, and what comes."""
        await self._switch(asked, destinations.enable)

    async def _switch(
        self,
        asked: Asked[Nothing, Nothing],
        act: Callable[[Connection, Actor, str, str, str], Awaitable[rows.Destination]],
    ) -> None:
        project, destination = asked.path["project"], asked.path["destination"]

        async def work(connection: Connection, operator: Operator) -> rows.Destination:
            operator.require_projects([project])
            return await act(connection, operator.actor, operator.tenant, project, destination)

        found = await self._office.act(asked, work)
        await move_mail(self._office.database, asked.caller.tenant, found.stream)

    async def test(self, asked: Asked[Nothing, Nothing]) -> TestResult:
        """Send one signed request that is no delivery, and say how that went."""
        project, destination = asked.path["project"], asked.path["destination"]
        key = self._outbound.key()

        async def work(connection: Connection, operator: Operator) -> rows.Destination:
            operator.require_projects([project])
            return await destinations.note_test(connection, operator.actor, operator.tenant, project, destination)

        found = await self._office.act(asked, work)
        outbound = self._outbound
        attempted = await probe(outbound.database, outbound.sender, key, asked.caller.tenant, found.stream)
        return TestResult(attempted.delivered, attempted.code)

    async def rotate_secret(self, asked: Asked[Nothing, Rotation]) -> NewSecrets:
        """Make new secrets, shown this once; the older ones go on signing for a while."""
        project, destination, wanted = asked.path["project"], asked.path["destination"], asked.body
        key = self._outbound.key()

        async def work(connection: Connection, operator: Operator) -> list[ShownSecret]:
            operator.require_projects([project])
            return await destinations.rotate_secret(
                connection,
                operator.actor,
                operator.tenant,
                project,
                destination,
                schemes=schemes_of(_given(wanted.scheme)),
                overlap_s=wanted.overlap_s,
                key=key,
            )

        return NewSecrets(_secrets(await self._office.act(asked, work)))


def _given(value: T | UnsetType) -> T | None:
    return None if value is UNSET else value


def _secrets(shown: list[ShownSecret]) -> list[DestinationSecret]:
    return [DestinationSecret(str(secret.secret), secret.scheme, secret.receiver) for secret in shown]


def _destination(row: rows.Destination) -> Destination:
    return Destination(
        destination=row.destination,
        mode=row.mode,
        url=row.url,
        max_pending=row.max_pending,
        pending=row.pending,
        highest=row.highest,
        created_at_ms=milliseconds(row.created_at),
        disabled_at_ms=None if row.disabled_at is None else milliseconds(row.disabled_at),
        disabled_reason=row.disabled_reason,
        failing_since_ms=None if row.failing_since is None else milliseconds(row.failing_since),
        last_failure_at_ms=None if row.last_failure_at is None else milliseconds(row.last_failure_at),
        last_code=row.last_code,
        last_success_at_ms=None if row.last_success_at is None else milliseconds(row.last_success_at),
        next_due_at_ms=None if row.next_due_at is None else milliseconds(row.next_due_at),
    )

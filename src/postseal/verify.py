"""Proving a database: every invariant held against every row of one snapshot, and each breach named.

1. one transaction, repeatable read and read only: nothing is changed, and what goes on meanwhile is not seen
2. the schema is this release's; else nothing further can be asked
3. grants and roles are as listed
4. each proof of `postgres/invariants*.py`: a statement that returns what breaks an invariant
5. each payload that is kept: its event identity, its signature, and the names in it

It needs a login that may read everything, the service's tables and those for administrators alike. No part of the
service may, so it is the owner's; a login that is a member of PostgreSQL's own `pg_read_all_data`, and nothing else, is
the least that will do.

The snapshot lasts as long as the proofs: meanwhile the server keeps what is deleted or replaced. A migration waits for
it, and gives up.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

import msgspec
import psycopg
from msgspec import Struct

from postseal.envelope import dsse, ed25519
from postseal.errors import StartupError
from postseal.outbound.wishes import PRODUCER
from postseal.postgres.access import first_line
from postseal.postgres.contents import Content, read_contents
from postseal.postgres.grants import listed_grants, read_grants, read_special_roles
from postseal.postgres.invariants import (
    GENERAL,
    Breach,
    Invariant,
    count_rows,
    find_breaches,
    open_snapshot,
    read_time,
    read_version,
)
from postseal.postgres.invariants_inbound import INBOUND
from postseal.postgres.invariants_outbound import OUTBOUND
from postseal.postgres.migrate import migrations
from postseal.postgres.transaction import Connection, roll_back

MAX_NAMED = 20
"""Of each invariant so many breaches are named; all are counted."""
SAMPLE = 100
"""Of a sample, one signature in so many is verified."""
TOLD_EVERY = 1_000
"""After so many payloads progress is told again."""

PROOFS = (*GENERAL, *INBOUND, *OUTBOUND)
CONTENTS = "payloads are what was signed"


class Signatures(StrEnum):
    """Whose signatures are verified; a payload's event identity and names are looked at in any case."""

    ALL = "all"
    SAMPLE = "sample"
    NONE = "none"


Progress: TypeAlias = Callable[[str, int, int], None]
"""Is told now and then which proof is under way, and how much of how much is done; one statement is 0, then 1, of 1."""


def no_progress(_proof: str, _done: int, _of: int) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class Report:
    """What was proved, and what was not."""

    at: datetime
    """When the snapshot was taken, by the database's clock."""
    schema_version: int
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """How many rows the tables had that grow, by name."""
    signatures: int = 0
    """How many were verified."""
    breaches: list[Breach] = field(default_factory=list[Breach])
    """At most MAX_NAMED of each invariant."""
    counts: Counter[Invariant] = field(default_factory=Counter[Invariant])
    """How many there are of each invariant that is broken."""

    @property
    def holds(self) -> bool:
        """Whether no invariant is broken."""
        return not self.counts

    def add(self, breach: Breach) -> None:
        """Count a breach, and name it unless enough of its kind are."""
        self.counts[breach.invariant] += 1
        if self.counts[breach.invariant] <= MAX_NAMED:
            self.breaches.append(breach)


async def verify(conninfo: str, *, signatures: Signatures = Signatures.ALL, progress: Progress = no_progress) -> Report:
    """Prove the database of `conninfo`, whatever it is, and change nothing.

    Memory does not grow with the database; time does (see docs/verifying.md). Raises StartupError if it cannot be
    reached, and psycopg.Error if the login may not read everything or the connection is lost.
    """
    try:
        connection = await psycopg.AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    except psycopg.OperationalError as error:
        raise StartupError(f"cannot reach the database: {first_line(error)}") from None
    async with connection:
        try:
            await open_snapshot(connection)
            return await prove(connection, signatures, progress)
        finally:
            await roll_back(connection)


async def prove(connection: Connection, signatures: Signatures, progress: Progress) -> Report:
    """The report on what the caller's transaction sees, which has the bounds of `open_snapshot`."""
    report = Report(await read_time(connection), await read_version(connection))
    known = migrations()[-1].version
    if report.schema_version != known:
        report.add(_breach(Invariant.SCHEMA, f"version {report.schema_version}, where this release has {known}"))
        return report
    report.rows = await count_rows(connection)
    await _prove_grants(connection, report)
    for proof in PROOFS:
        progress(proof.name, 0, 1)
        async for breach in find_breaches(connection, proof):
            report.add(breach)
        progress(proof.name, 1, 1)
    await _prove_contents(connection, report, signatures, progress)
    return report


async def _prove_grants(connection: Connection, report: Report) -> None:
    there, listed = set(await read_grants(connection)), set(listed_grants())
    for grant in sorted(there - listed):
        report.add(_breach(Invariant.GRANTS, f"there is, and must not be: {grant}"))
    for grant in sorted(listed - there):
        report.add(_breach(Invariant.GRANTS, f"there must be, and is not: {grant}"))
    for role in await read_special_roles(connection):
        report.add(_breach(Invariant.GRANTS, f"the role {role} is more than a login with grants"))


async def _prove_contents(connection: Connection, report: Report, signatures: Signatures, progress: Progress) -> None:
    total, done = report.rows["payloads"], 0
    progress(CONTENTS, 0, total)
    async for content in read_contents(connection):
        signed_bytes = dsse.pae(dsse.PAYLOAD_TYPE, content.payload)
        for invariant, detail in _faults(content, signed_bytes):
            report.add(_breach_of(content, invariant, detail))
        # Where there is no such key, another proof has said so.
        if content.public_key is not None and _wanted(signatures):
            report.signatures += 1
            if not ed25519.verify(content.public_key, signed_bytes, content.signature):
                report.add(_breach_of(content, Invariant.SIGNATURE_WRONG, "the signature does not hold"))
        done += 1
        if done % TOLD_EVERY == 0:
            progress(CONTENTS, done, total)
    progress(CONTENTS, done, total)


def _wanted(signatures: Signatures) -> bool:
    match signatures:
        case Signatures.ALL:
            return True
        case Signatures.SAMPLE:
            return random.randrange(SAMPLE) == 0  # noqa: S311 - which ones is no secret
        case Signatures.NONE:
            return False


class _Route(Struct):
    tenant: str
    project: str
    producer: str
    audience: str | None = None


class _Named(Struct, rename="camel"):
    """The members of a payload under which it is kept."""

    route: _Route
    event_id: str
    idempotency_key: str
    sequence: int


_NAMED = msgspec.json.Decoder(_Named)


def _faults(content: Content, signed_bytes: bytes) -> Generator[tuple[Invariant, str]]:
    """How a payload differs from what the tables say of it."""
    identity = hashlib.sha256(signed_bytes).digest()
    if identity != content.event_identity:
        yield Invariant.EVENT_IDENTITY_WRONG, f"it is kept as {content.event_identity.hex()}, and is {identity.hex()}"
    try:
        named = _NAMED.decode(content.payload)
    except (ValueError, RecursionError):
        yield Invariant.CONTENT_WRONG, "the payload cannot be read"
        return
    producer = content.producer or PRODUCER
    if named.route != _Route(content.tenant, content.project, producer, content.destination):
        yield Invariant.CONTENT_WRONG, "the payload's route is another stream's"
    if (named.event_id, named.sequence) != (str(content.event_id), content.sequence):
        yield Invariant.CONTENT_WRONG, "the payload has another event id or sequence"
    if not _has_key(content, named.idempotency_key):
        yield Invariant.CONTENT_WRONG, "the payload has another idempotency key"


def _has_key(content: Content, idempotency_key: str) -> bool:
    if content.idempotency_hash is None:
        return content.idempotency_key == idempotency_key
    return content.idempotency_hash.bytes == hashlib.sha256(idempotency_key.encode()).digest()[:16]


def _breach(invariant: Invariant, detail: str) -> Breach:
    return Breach(invariant, None, None, None, None, None, detail)


def _breach_of(content: Content, invariant: Invariant, detail: str) -> Breach:
    return Breach(
        invariant, content.tenant, content.project, content.producer, content.destination, content.sequence, detail
    )

"""One tenant that can sign, one destination, and the part that delivers."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outgoing import Destination, new_destination, signing_key
from postseal.envelope import ed25519
from postseal.envelope.kinds import NO_KINDS
from postseal.outbound.outbox import Outbox
from postseal.postgres.access import Access
from postseal.postgres.database import Database, Part
from postseal.signing.pem_folder import PemFolder

ATTEMPT_LIMIT = 8


@pytest.fixture
def anyio_backend() -> str:
    """Psycopg needs asyncio."""
    return "asyncio"


@pytest.fixture
async def database(access: Access) -> AsyncIterator[Database]:
    """The part that delivers."""
    async with Database(access.of(Part.DELIVERY), prepare=True) as database:
        yield database


@pytest.fixture
def destination(access: Access) -> Destination:
    """A destination of project apollo."""
    return new_destination(access)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where signing keys lie."""
    return tmp_path / "signing"


@pytest.fixture
def public_key(access: Access, destination: Destination, folder: Path) -> bytes:
    """The public half of the tenant's signing key."""
    return ed25519.public_key(signing_key(access, folder))


@pytest.fixture
def outbox(database: Database, folder: Path) -> Outbox:
    """An outbox that signs with that folder."""
    return Outbox(database, PemFolder(folder), kinds=NO_KINDS, attempt_limit=ATTEMPT_LIMIT)

"""One running service on one device's database, whose consumer reads while a sweep deletes."""

from collections.abc import AsyncIterator

import pytest

from fleet import Device, enrol
from postseal.postgres.access import Access
from postseal.service import Service, running_service
from postseal.settings import Settings


@pytest.fixture
def anyio_backend() -> str:
    """Psycopg needs asyncio."""
    return "asyncio"


@pytest.fixture
def device(access: Access) -> Device:
    """An enrolled device."""
    return enrol(access)


@pytest.fixture
async def service(access: Access) -> AsyncIterator[Service]:
    """A running service of one process."""
    async with running_service(Settings(), access) as service:
        yield service

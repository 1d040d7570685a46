"""Tests of what delivers run on asyncio, which psycopg needs."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Let tests run on asyncio."""
    return "asyncio"

"""One server for the tests of a module."""

from collections.abc import Iterator

import pytest
from served import Site, running_site

from postseal.postgres.access import Access
from postseal.settings import Settings


@pytest.fixture(scope="module")
def site(shared_access: Access) -> Iterator[Site]:
    """A server with the settings as they are by default, and one enrolled device."""
    with running_site(shared_access, Settings()) as site:
        yield site

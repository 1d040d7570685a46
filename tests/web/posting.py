"""A server that can sign, and a tenant of one test's own on it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from served import Site, running_site
from wire import Answer, get, request

from fleet import issue
from outgoing import Destination, decision, new_destination, signing_key
from postseal.envelope import ed25519
from postseal.postgres.access import Access
from postseal.settings import Settings

JSON = "application/json"


@contextmanager
def signing_site(access: Access, folder: Path, **settings: Any) -> Iterator[Site]:
    """Serve with keys in `folder` until the block ends."""
    keys = {"signing_keys_dir": str(folder / "signing"), "deployment_key_file": str(folder / "deployment.key")}
    with running_site(access, Settings(**(keys | settings))) as site:
        yield site


@dataclass(frozen=True, slots=True)
class Mailer:
    """A tenant with a signing key, a destination and a sender; its name is this test's own."""

    site: Site
    folder: Path
    tenant: str
    destination: Destination
    sender: str = field(repr=False)
    public_key: bytes = field(repr=False)

    def credential(self, role: str, *projects: str) -> str:
        """A credential of that role, for apollo where no project is named."""
        return issue(self.site.access, self.tenant, None, list(projects or ["apollo"]), role).reveal()

    def also(self, name: str, **options: Any) -> Destination:
        """A further destination."""
        return new_destination(self.site.access, name, tenant=self.tenant, **options)

    def post(self, path: str, document: object, *, credential: str | None = None, **headers: str) -> Answer:
        """A POST of a JSON document."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        fields = {"content_type": JSON, **headers}
        return self.site.ask(request("POST", path, body, credential=credential or self.sender, **fields))

    def order(self, path: str, *, credential: str | None = None) -> Answer:
        """A POST without a body."""
        return self.site.ask(request("POST", path, b"", credential=credential or self.sender))

    def read(self, path: str, *, credential: str | None = None) -> Answer:
        """A GET."""
        return self.site.ask(get(path, credential or self.sender))

    def send(self, document: dict[str, Any] | None = None, *, key: str | None = None, **options: Any) -> Answer:
        """One delivery, under a fresh key where none is given."""
        wanted = delivery() if document is None else document
        return self.post(DELIVERIES, wanted, idempotency_key=key or str(uuid4()), **options)

    def shown(self, identity: str) -> dict[str, Any]:
        """How a delivery stands."""
        answer = self.read(f"{DELIVERIES}/{identity}")
        assert answer.status == 200, answer.body
        return answer.document


DELIVERIES = "/v1/projects/apollo/deliveries"


def new_mailer(site: Site, folder: Path) -> Mailer:
    """A tenant of its own on a server that signs with the keys in `folder`."""
    tenant = f"tenant-{uuid4()}"
    destination = new_destination(site.access, tenant=tenant)
    public_key = ed25519.public_key(signing_key(site.access, folder / "signing", tenant))
    sender = issue(site.access, tenant, None, ["apollo"], "sender").reveal()
    return Mailer(site, folder, tenant, destination, sender, public_key)


def delivery(destination: str = "orders", **members: Any) -> dict[str, Any]:
    """The body of one delivery; `members` replaces what it has."""
    data = decision()
    return {"destination": destination, "kind": data.pop("kind"), "data": data} | members

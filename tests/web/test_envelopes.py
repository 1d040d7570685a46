"""`POST /v1/envelopes` and its batch: each outcome, each refusal of the surface, and its audit event."""

from served import Site
from wire import post


def test_every_outcome(site: Site) -> None:
    """accepted, duplicate, gap and reordered, each with its status and the stream's cursors."""
    token, device = site.device.token.reveal(), site.device
    with site.client() as client:
        first = client.ask(post(token, device.envelope(1)))
        print(first)
        assert (first.status, first.document["outcome"]) == (201, "accepted")

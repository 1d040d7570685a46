"""Paths that name nothing, whatever they try; health; the published schema."""

import json

import pytest
from served import Site
from wire import get, request

from fleet import issue
from postseal.envelope.schema import payload_schema

TRICKS = [
    "/",
    "/v1",
    "/v1/envelopes/",
    "//v1/envelopes",
    "/v1//envelopes",
    "/v1/envelope%73",
    "/v1/projects/%2e%2e/streams",
    "/v1/projects/../streams",
    "/v1/projects/apollo/streams/%00",
    "/v1/projects/apollo/streams/device-01%00",
    "/v1/projects/apollo/streams/device-01/",
    "/v1/projects/apollo/streams//envelopes",
    "/v1/projects/apollo/streams/DEVICE-01",
    "/v1/projects/APOLLO/streams",
    "/v1/projects/apollo%2fstreams",
    "/v1/projects/apollo/streams/" + "a" * 64,
    "/v1/projects/apollo/streams/.hidden",
    "/v1/projects/apollo/streams/a'b",
    "/v1/projects/apollo/streams/a;b",
    "/v1/projects/zeus/streams",
    "/v1/projects/apollo/streams/nobody",
    "/v1/projects/apollo/producers/nobody/keys",
    "/v1/projects/apollo/producers/controlplane/keys",
    "/schemas/../healthz",
    "/schemas/payload.v1.schema.json/",
    "/Healthz",
]


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("role", ["device", "consumer"])
def test_what_is_not_there_is_not_found(site: Site, path: str, role: str) -> None:
    """404 with a problem for whatever is no path of ours, or not the caller's; a consumer's role comes first."""
    device = site.device.name if role == "device" else None
    token = issue(site.access, "acme", device, ["apollo"], role).reveal()
    answer = site.ask(get(path, token))
    if role == "device" and "/producers/" in path:
        assert (answer.status, answer.reason) == (403, "role_forbidden")
    else:
        assert (answer.status, answer.reason) == (404, "not_found")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/envelopes", {"POST"}),
        ("GET", "/v1/envelopes/batch", {"POST"}),
        ("GET", "/v1/enrolments", {"POST"}),
        ("POST", "/healthz", {"GET", "HEAD"}),
        ("DELETE", "/v1/projects/apollo/streams", {"GET", "HEAD"}),
        ("OPTIONS", "/readyz", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_names_the_right_ones(site: Site, method: str, path: str, allow: set[str]) -> None:
    """405 with Allow."""
    answer = site.ask(request(method, path))
    assert (answer.status, answer.reason) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == allow


def test_health_and_readiness(site: Site) -> None:
    """The process is up, and commits work."""
    assert site.ask(get("/healthz")).document == {"status": "ok"}
    assert site.ask(get("/readyz")).document == {"status": "ready"}


def test_the_schema_is_served(site: Site) -> None:
    """Byte for byte as it is published with the package."""
    answer = site.ask(get("/schemas/payload.v1.schema.json"))
    assert answer.headers["content-type"] == "application/schema+json"
    assert answer.body == payload_schema()
    assert json.loads(answer.body)["type"] == "object"

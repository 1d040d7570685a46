"""/openapi.json tells the truth: every call is in it, and a real server answers as it says, to good and bad requests.

The requests are made by schemathesis out of the document itself, and the run's seed is theirs.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from uuid import uuid4

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from posting import Mailer, delivery, signing_site
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.openapi.loaders import from_dict
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import Site
from starlette.routing import Route
from test_device_renewals import challenge_of, further
from test_enrolments import base64url, invite, wanted
from wire import NDJSON, get, post, request

from fleet import Device, enrol, issue
from outgoing import new_destination, signing_key
from postseal.envelope import ed25519
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.service import running_service
from postseal.settings import Settings
from postseal.web.app import App

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 4
"""Random requests of each call."""
SOAK_EXAMPLES = 500
METHODS = ("get", "post")

schemathesis.serializer.alias(NDJSON, "text/plain")


@dataclass(frozen=True, slots=True)
class World:
    """A server, its calls as its own document describes them, and what can be asked for."""

    site: Site
    operations: dict[str, APIOperation]
    credentials: dict[str, str]
    device: Device
    mailer: Mailer

    def ask(self, case: Case, credential: str | None) -> requests.Response:
        """Make a request, and check its answer against the document."""
        headers = {"Authorization": f"Bearer {credential}"} if credential else {}
        return case.call_and_validate(base_url=f"http://127.0.0.1:{self.site.port}", headers=headers, checks=CHECKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's keys lie."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def site(shared_access: Access, folder: Path) -> Iterator[Site]:
    """A server that can sign, and that a hundred wrong credentials do not tire."""
    with signing_site(shared_access, folder, peer_burst=100_000) as site:
        yield site


@pytest.fixture(scope="module")
def document(site: Site) -> dict[str, Any]:
    """The description as it is served."""
    answer = site.ask(get("/openapi.json"))
    assert answer.headers["content-type"] == "application/json"
    return answer.document


@pytest.fixture(scope="module")
def world(site: Site, document: dict[str, Any], folder: Path) -> World:
    """A stream with a hole, an event to read, destinations to push to and to pull from, a credential of each role."""
    schema = from_dict(document)
    found = [result.ok() for result in schema.get_all_operations()]
    credentials = {
        role: issue(site.access, "acme", None, ["apollo"], role).reveal() for role in ("consumer", "sender", "operator")
    }
    credentials["device"] = site.device.token.reveal()
    for sequence in (1, 2, 4):
        assert site.ask(post(credentials["device"], site.device.envelope(sequence))).status == 201
    seed = signing_key(site.access, folder / "signing")
    # To which nothing is ever sent.
    destination = new_destination(site.access, url="https://127.0.0.1:9/")
    new_destination(site.access, site.device.name, mode="pull")
    mailer = Mailer(site, folder, "acme", destination, credentials["sender"], ed25519.public_key(seed))
    return World(site, {f"{op.method.upper()} {op.path}": op for op in found}, credentials, site.device, mailer)


def test_the_document_is_openapi_3_1(document: dict[str, Any]) -> None:
    """It has what is asked of one; names are unique, every reference leads somewhere, schemas are schemas."""
    assert document["openapi"] == "3.1.0"
    assert {"title", "version"} <= set(document["info"])
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    for path, item in document["paths"].items():
        assert set(item) <= set(METHODS)
        for operation in item.values():
            assert operation["summary"].endswith(".")
            assert all(response["description"] for response in operation["responses"].values())
            named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path" and p["required"]}
            assert named == set(re.findall(r"\{(\w+)\}", path))
    for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_reason_is_in_the_problem(document: dict[str, Any]) -> None:
    """A client can tell all of them apart; each stands in the answers of some call, but for a wrong method."""
    schemas = document["components"]["schemas"]
    assert schemas["Problem"]["properties"]["reason"] == {"$ref": "#/components/schemas/Reason"}
    assert set(schemas["Reason"]["enum"]) == {str(reason) for reason in Reason}
    described = set(re.findall(r"`([a-z_]+)`", json.dumps(document["paths"])))
    assert {str(reason) for reason in Reason} - described == {"method_not_allowed"}


async def calls_of(access: Access) -> set[tuple[str, str]]:
    """Method and path of all that a service answers."""
    async with running_service(Settings(), access) as service:
        app = App(service)
        routed = {route.path: route.app for route in app._router.routes if isinstance(route, Route)}
        exact = {path.decode(): methods for path, methods in app._exact.items()}
        return {(method, path) for path, methods in (routed | exact).items() for method in methods._handlers}


def test_the_document_has_every_call_and_no_other(access: Access, document: dict[str, Any]) -> None:
    """The routes of the application are the paths of the document; HEAD goes with GET."""
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    routed = asyncio.run(calls_of(access))
    assert routed == described | {("HEAD", path) for method, path in described if method == "GET"}


def test_the_protocol_lists_every_call_and_no_other(document: dict[str, Any]) -> None:
    """So does the table of section 10, with the roles."""
    section = (Path(__file__).parents[2] / "docs/protocol.md").read_text().split("## 10. HTTP")[1].split("## 11.")[0]
    listed: dict[str, str] = {}
    for cells in (line.split("|") for line in section.splitlines() if line.startswith("| `")):
        listed |= dict.fromkeys(re.findall(r"`((?:GET|POST) [^`]+)`", cells[1]), cells[2].strip())
    described = {
        f"{method.upper()} {path}": ", ".join(roles_of(operation)) or "anyone"
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }
    assert listed == described


def roles_of(operation: dict[str, Any]) -> list[str]:
    """The roles that may make a call."""
    return [role for either in operation.get("security", []) for role in either["credential"]]


def good_requests(world: World) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """For each call one request that succeeds: its name, the role, the parts."""
    site, code, seed = world.site, invite(world.site, "fresh"), ed25519.generate()
    stream = {"project": "apollo", "producer": world.device.name}
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"):
        yield f"GET {path}", None, {}
    for name in ("envelope", "payload"):
        yield f"GET /schemas/{name}.v1.schema.json", None, {}
    yield "POST /v1/enrolments", None, {"body": wanted(code, "fresh", seed)}
    yield "POST /v1/envelopes", "device", {"body": json.loads(world.device.envelope(5))}
    yield "POST /v1/envelopes/batch", "device", {"body": f"{world.device.envelope(6).decode()}\n{{}}\n"}
    projects = "/v1/projects/{project}"
    yield f"GET {projects}/streams", "device", {"path_parameters": {"project": "apollo"}}
    yield f"GET {projects}/streams/{{producer}}", "consumer", {"path_parameters": stream}
    yield f"GET {projects}/streams/{{producer}}/envelopes", "consumer", {"path_parameters": stream}
    yield f"GET {projects}/producers/{{producer}}/keys", "consumer", {"path_parameters": stream}
    for noun in ("projects", "devices", "credentials", "keys", "audit"):
        yield f"GET /v1/admin/{noun}", "operator", {"query": {} if noun == "projects" else {"limit": 5}}
    yield "POST /v1/admin/devices", "operator", {"body": {"device": "new", "projects": ["apollo"]}}
    yield "POST /v1/admin/credentials", "operator", {"body": {"role": "consumer", "projects": ["apollo"]}}
    admin = "/v1/admin/projects/{project}/streams"
    yield f"GET {admin}", "operator", {"path_parameters": {"project": "apollo"}}
    yield f"GET {admin}/{{producer}}", "operator", {"path_parameters": stream}
    floor = {"floor": 3, "reason": "the third is lost"}
    yield f"POST {admin}/{{producer}}/raise-floor", "operator", {"path_parameters": stream, "body": floor}
    spare = enrol(site.access, f"spare-{uuid4()}")
    token = str(spare.token.credential_id)
    for act in ("retire", "revoke", "remove"):
        yield f"POST /v1/admin/keys/{{keyid}}/{act}", "operator", {"path_parameters": {"keyid": spare.keyid}}
    new_key = {"device": spare.name, "publicKey": base64url(ed25519.public_key(ed25519.generate()))}
    yield "POST /v1/admin/keys", "operator", {"body": new_key | {"overlapS": 60}}
    yield "POST /v1/admin/credentials/{credential}/revoke", "operator", {"path_parameters": {"credential": token}}
    yield "POST /v1/admin/devices/{device}/retire", "operator", {"path_parameters": {"device": spare.name}}
    yield from good_renewals(world)
    yield "GET /v1/admin/retention", "operator", {}
    yield "POST /v1/admin/retention", "operator", {"body": {"days": 30}}
    apollo = {"path_parameters": {"project": "apollo"}}
    yield "POST /v1/admin/projects/{project}/retention", "operator", apollo | {"body": {"days": None}}
    yield "POST /v1/admin/holds", "operator", {"body": {"hold": "case-17", "reason": "a claim"}}
    yield "GET /v1/admin/holds", "operator", {}
    released = {"path_parameters": {"hold": "case-17"}, "body": {"reason": "settled"}}
    yield "POST /v1/admin/holds/{hold}/release", "operator", released
    yield from good_deliveries(world)
    yield from good_destinations(world)


def good_renewals(world: World) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """The same for what a device renews by itself."""
    yield "POST /v1/device/keys/challenge", "device", {}
    # In place of that challenge, which the caller of this has.
    challenge = challenge_of(world.site, world.device)
    yield "POST /v1/device/keys", "device", {"body": further(world.device, challenge, ed25519.generate())}
    yield "POST /v1/device/credential", "device", {}


def good_deliveries(world: World) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """The same for what is sent and pulled."""
    mailer, path = world.mailer, "/v1/projects/{project}/deliveries"
    sent = mailer.send().document["delivery"]
    mailer.send(delivery(world.device.name))
    one = {"path_parameters": {"project": "apollo", "delivery": sent}}
    parts = {"path_parameters": {"project": "apollo"}, "headers": {"Idempotency-Key": "order:0001"}}
    yield f"POST {path}", "sender", parts | {"body": delivery()}
    yield f"GET {path}/{{delivery}}", "sender", one
    yield f"POST {path}/{{delivery}}/cancel", "sender", one
    yield "POST /v1/deliveries/claim", "device", {"body": {"limit": 1}}
    settlement = {"project": "apollo", "sequence": 1, "attempt": 1, "token": str(uuid4()), "verdict": "delivered"}
    yield "POST /v1/deliveries/settle", "device", {"body": {"items": [settlement]}}
    yield "GET /v1/keys", "consumer", {}
    yield "GET /v1/keyset", "consumer", {}


def good_destinations(world: World) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """The same for where it is sent, and for what was given up."""
    path, project = "/v1/admin/projects/{project}/destinations", {"path_parameters": {"project": "apollo"}}
    orders = {"path_parameters": {"project": "apollo", "destination": "orders"}}
    push = {"destination": "bills", "mode": "push", "url": "https://receiver.example.net/"}
    yield f"GET {path}", "operator", project
    yield f"POST {path}", "operator", project | {"body": push}
    for act in ("disable", "enable", "test"):
        yield f"POST {path}/{{destination}}/{act}", "operator", orders
    yield f"POST {path}/{{destination}}/change", "operator", orders | {"body": {"maxPending": 1000}}
    yield f"POST {path}/{{destination}}/rotate-secret", "operator", orders | {"body": {"scheme": "both"}}
    mailer, letters = world.mailer, "/v1/admin/projects/{project}/dead-letters"
    dead = mailer.send().document
    mailer.destination.end(dead["sequence"], "dead", "status_5xx")
    one = {"path_parameters": {"project": "apollo", "delivery": dead["delivery"]}}
    for name in ("", "/count"):
        yield f"GET {letters}{name}", "operator", project
    yield f"POST {letters}/{{delivery}}/redrive", "operator", one | {"body": {}}
    yield f"POST {letters}/redrive", "operator", project | {"body": {"code": "status_5xx"}}


def test_a_good_request_of_each_call(world: World) -> None:
    """Its success has a status, a type and a document as described, for every call that is described."""
    asked: set[str] = set()
    for name, role, parts in good_requests(world):
        operation = world.operations[name]
        media_type = next((body.media_type for body in operation.body), None)
        case = operation.Case(media_type=media_type, **parts) if media_type else operation.Case(**parts)
        answer = world.ask(case, world.credentials[role] if role else None)
        assert answer.status_code < 300, (name, answer.content)
        asked.add(name)
    assert asked == set(world.operations)


def bad_requests(world: World, method: str, path: str, operation: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
    """Requests of one call that are refused, and the status that says so."""
    made_up = {"keyid": "A" * 43, "credential": str(uuid4()), "delivery": str(uuid4())}
    path = re.sub(r"\{(keyid|credential|delivery)\}", lambda found: made_up[found[1]], path)
    path = re.sub(r"\{\w+\}", "nobody", path)
    roles = roles_of(operation)
    credential = world.credentials[roles[0]] if roles else None
    [media_type] = operation.get("requestBody", {}).get("content", [None])
    good = {"content_type": media_type} if media_type else {}
    body = b"{}" if media_type else None
    if roles:
        yield 401, request(method, path, body, credential="nonsense", **good)
        other = next(role for role in world.credentials if role not in roles)
        yield 403, request(method, path, body, credential=world.credentials[other], **good)
    if media_type:
        yield 413, request(method, path, b"", credential=credential, content_length="9999999", **good)
        yield 415, request(method, path, b"{}", credential=credential, content_type="text/css")
        yield 400, request(method, path, b"", credential=credential, **good)
    elif "nobody" in path or "A" * 43 in path or "/revoke" in path:
        yield 404, request(method, path, credential=credential)
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "query":
            yield 400, request(method, f"{path}?{parameter['name']}=%00", credential=credential)
            if parameter["name"] in ("project", "device"):
                yield 404, request(method, f"{path}?{parameter['name']}=nobody", credential=credential)


def test_refusals_are_described(world: World, document: dict[str, Any]) -> None:
    """Each has the status that it must have, and the document names the reason under it."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            for status, raw in bad_requests(world, method.upper(), path, operation):
                answer = world.site.ask(raw)
                assert answer.status == status, (method, path, raw)
                assert f"`{answer.reason}`" in operation["responses"][str(status)]["description"], (method, path)


def check_random_requests(world: World, seed: int, examples: int) -> None:
    """Answer random requests of every call, valid and not, half of them about what is there, by all callers."""
    print(f"{seed=}")
    spare = enrol(world.site.access, f"spare-{uuid4()}")
    token = issue(world.site.access, "acme", spare.name, ["apollo"])
    there = {
        "project": "apollo",
        "producer": spare.name,
        "device": spare.name,
        "keyid": spare.keyid,
        "credential": str(token.credential_id),
        "destination": world.mailer.destination.name,
        "delivery": world.mailer.send().document["delivery"],
        "hold": "case-17",
    }
    statuses: set[int] = set()
    for name, operation in world.operations.items():
        print(name)
        statuses |= answered(world, operation, there, seed, examples)
    assert {200, 400, 401, 403, 404} <= statuses


def answered(world: World, operation: APIOperation, there: dict[str, str], seed: int, examples: int) -> set[int]:
    """The statuses with which random requests of one call were answered, each as it is described."""
    own = st.sampled_from([world.credentials[role] for role in roles_of(operation.definition.raw)] or [None])
    others = st.sampled_from([*world.credentials.values(), "nonsense", None])
    takes_something = operation.body or operation.query or operation.path_parameters
    modes = list(GenerationMode) if takes_something else [GenerationMode.POSITIVE]
    statuses: set[int] = set()

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @hypothesis.given(
        case=st.one_of([operation.as_strategy(mode) for mode in modes]),
        credential=st.one_of(own, own, others),
        is_there=st.booleans(),
    )
    def answer(case: Case, credential: str | None, is_there: bool) -> None:
        if is_there:
            case.path_parameters.update({name: there[name] for name in case.path_parameters})
        for parts in (case.query, case.body):
            if isinstance(parts, dict) and str(parts.get("wait")).isdecimal():
                parts["wait"] = 0  # a wait that is granted would take its time
        statuses.add(world.ask(case, credential).status_code)

    answer()
    return statuses


# schemathesis draws from `random` in its strategies, which hypothesis reseeds and warns of.
random_module = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@random_module
def test_random_requests(world: World, seed: int) -> None:
    """No answer is a fault of ours, or has a status, type, header or document that is not described."""
    check_random_requests(world, seed, EXAMPLES)


@random_module
@pytest.mark.soak
def test_many_random_requests(world: World, seed: int) -> None:
    """The same, many times as many."""
    check_random_requests(world, seed, SOAK_EXAMPLES)


def test_the_page_needs_nothing_from_elsewhere(site: Site, document: dict[str, Any]) -> None:
    """Its policy allows its one style and nothing else, it has no script, and it names every call."""
    answer = site.ask(get("/docs"))
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    page = answer.body.decode()
    assert not re.search(r"<script|\son\w+=|https?:|style=|@import|url\(|src=", page.replace("https://json-schema", ""))
    text = unescape(page)
    for path, item in document["paths"].items():
        for method in item:
            assert f"{method.upper()} {path}" in text
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)

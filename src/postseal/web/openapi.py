"""`/openapi.json`: the calls described as OpenAPI 3.1, from the very values that their routes are made of.

Nothing is said here that a Call, a type or a docstring does not say already.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from operator import itemgetter
from typing import Any, Final

import msgspec
from msgspec import Struct

from postseal.outcomes import Reason
from postseal.web.answers import Problem, status_of
from postseal.web.calls import Call, Content
from postseal.web.documents import ITEM_TYPES, SCHEMAS
from postseal.web.query import IN_PATHS

Json = dict[str, Any]

BEARER: Final = "credential"
HEAD_TOO_LARGE: Final = 431
OF_ANY_CALL: Final = (Reason.REQUEST_TIMEOUT, Reason.REQUEST_INVALID, Reason.UNAVAILABLE)
OF_A_CREDENTIAL: Final = (Reason.PEER_RATE_LIMITED, Reason.UNAUTHENTICATED, Reason.ROLE_FORBIDDEN)
OF_A_BODY: Final = (Reason.BODY_TOO_LARGE, Reason.UNSUPPORTED_MEDIA_TYPE)
OF_A_PATH: Final = (Reason.NOT_FOUND,)

HEADERS_OF_STATUS: Final[dict[int, dict[str, str]]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {
        "Retry-After": "Seconds until it is worth trying again",
        "RateLimit": "As in draft-ietf-httpapi-ratelimit-headers-10",
        "RateLimit-Policy": "As in draft-ietf-httpapi-ratelimit-headers-10",
    },
    503: {"Retry-After": "Seconds until it is worth trying again"},
}


def describe(calls: Sequence[Call], envelope_schema: Json) -> Json:
    """The OpenAPI document of `calls`; the schema of envelopes stands in it as the component Envelope."""
    paths: dict[str, Json] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "postseal",
            "summary": metadata.metadata("postseal")["Summary"],
            "version": metadata.version("postseal"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "paths": paths,
        "components": {
            "schemas": _schemas(calls) | {"Envelope": _without_address(envelope_schema)},
            "securitySchemes": {
                BEARER: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An opaque credential of one role; each operation names the roles that may call it.",
                }
            },
        },
    }


def _operation(call: Call) -> Json:
    operation: Json = {"operationId": _operation_id(call), "summary": call.summary}
    if call.roles:
        operation["security"] = [{BEARER: [str(role)]} for role in call.roles]
    parameters = [*_path_parameters(call.path), *_parameters(call.query, "query"), *_parameters(call.headers, "header")]
    if parameters:
        operation["parameters"] = parameters
    if call.takes:
        operation["requestBody"] = {"required": True, "content": _content([call.takes])}
    operation["responses"] = {str(status): response for status, response in sorted(_responses(call), key=itemgetter(0))}
    return operation


def _operation_id(call: Call) -> str:
    return "-".join([call.method.lower(), *re.findall(r"[a-z0-9.-]+", call.path)])


def _path_parameters(path: str) -> Iterator[Json]:
    for name in re.findall(r"\{([a-z]+)\}", path):
        yield {"name": name, "in": "path", "required": True, "schema": msgspec.json.schema(IN_PATHS[name])}


def _parameters(known: type[Struct], place: str) -> Iterator[Json]:
    schema = msgspec.json.schema(known)["$defs"][known.__name__]
    for name, rule in schema["properties"].items():
        yield {"name": name, "in": place, "required": name in schema["required"], "schema": rule}


def _responses(call: Call) -> Iterator[tuple[int, Json]]:
    for status, contents in call.answers.items():
        response: Json = {"description": "Done"}
        if contents:
            response["content"] = _content(contents)
        yield status, response
    reasons = _reasons(call)
    for status in {status_of(reason) for reason in reasons}:
        words = ", ".join(f"`{reason}`" for reason in Reason if reason in reasons and status_of(reason) == status)
        yield status, _problem(words, HEADERS_OF_STATUS.get(status, {}))
    yield HEAD_TOO_LARGE, _problem(f"`{Reason.REQUEST_INVALID}`: the head of the request is too large", {})


def _reasons(call: Call) -> set[Reason]:
    return {
        *call.reasons,
        *OF_ANY_CALL,
        *(OF_A_CREDENTIAL if call.roles else ()),
        *(OF_A_BODY if call.takes else ()),
        *(OF_A_PATH if "{" in call.path else ()),
    }


def _problem(description: str, headers: dict[str, str]) -> Json:
    response: Json = {"description": description, "content": _content([Content("application/problem+json", Problem)])}
    if headers:
        response["headers"] = {
            name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()
        }
    return response


def _content(contents: Iterable[Content]) -> Json:
    return {content.media_type: {"schema": _schema(content)} for content in contents}


def _schema(content: Content) -> Json:
    match content.form:
        case dict():
            return content.form
        case (form,):
            return {"$ref": SCHEMAS + form.__name__}
        case tuple():
            return {"anyOf": [{"$ref": SCHEMAS + form.__name__} for form in content.form]}
        case _:
            return {"$ref": SCHEMAS + content.form.__name__}


def _schemas(calls: Sequence[Call]) -> dict[str, Json]:
    """The schema of every type that a body can have, by its name."""
    contents = [content for call in calls for answers in call.answers.values() for content in answers]
    contents += [call.takes for call in calls if call.takes]
    forms = [content.form for content in contents if not isinstance(content.form, dict)]
    types = [form for either in forms for form in (either if isinstance(either, tuple) else (either,))]
    _, schemas = msgspec.json.schema_components([Problem, *ITEM_TYPES, *types], ref_template=SCHEMAS + "{name}")
    return schemas


def _without_address(schema: Json) -> Json:
    return {keyword: value for keyword, value in schema.items() if keyword not in ("$schema", "$id")}

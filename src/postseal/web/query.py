"""What stands in a request's path and query, read as the types that also describe it.

A parameter is there once or not at all. What a call does not know is passed over.
"""

from typing import Annotated, Any, Final, TypeVar
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from postseal.envelope.canonical import MAX_INTEGER
from postseal.envelope.names import ID, IDEMPOTENCY_KEY, KEYID
from postseal.errors import Refused
from postseal.outcomes import Reason

Q = TypeVar("Q", bound=Struct)

MAX_ID_CHARACTERS: Final = 63

Id = Annotated[str, Meta(pattern=f"^{ID.pattern}$", max_length=MAX_ID_CHARACTERS)]
IdOrEmpty = Annotated[str, Meta(pattern=f"^({ID.pattern})?$", max_length=MAX_ID_CHARACTERS)]
Keyid = Annotated[str, Meta(pattern=f"^{KEYID.pattern}$", max_length=43)]
KeyidOrEmpty = Annotated[str, Meta(pattern=f"^({KEYID.pattern})?$", max_length=43)]
Uuid = Annotated[str, Meta(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", max_length=36)]
UuidOrEmpty = Annotated[str, Meta(pattern="^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?$", max_length=36)]
IdempotencyKey = Annotated[str, Meta(pattern=f"^{IDEMPOTENCY_KEY.pattern}$", min_length=8, max_length=128)]
Word = Annotated[str, Meta(pattern="^[a-z_]*$", max_length=40)]
Sequence = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Limit = Annotated[int, Meta(ge=1, le=1000)]

IN_PATHS: Final[dict[str, Any]] = {
    "project": Id,
    "producer": Id,
    "device": Id,
    "destination": Id,
    "keyid": Keyid,
    "credential": Uuid,
    "delivery": Uuid,
    "hold": Id,
}
"""The type of each parameter that stands in a path."""

_NOT_TOLD = ("Invalid enum value", "Object contains unknown field")
"""Beginnings of msgspec's messages that would repeat what was sent."""


def read_path(request: Request) -> dict[str, str]:
    """The parameters in the path; what cannot be one names nothing, which is `not_found`."""
    parameters: dict[str, str] = request.path_params
    try:
        return {name: msgspec.convert(value, IN_PATHS[name]) for name, value in parameters.items()}
    except msgspec.ValidationError:
        raise Refused(Reason.NOT_FOUND, "there is no such thing, or it is not the caller's") from None


def uuid_in(path: dict[str, str], name: str) -> UUID:
    """A parameter of a path that was read as one."""
    return UUID(path[name])


def read_headers(request: Request, headers: type[Q]) -> Q:
    """The header fields that a call knows, each there once or not at all. Refused `request_invalid`."""
    given: dict[str, str] = {}
    for name in headers.__struct_encode_fields__:
        values = request.headers.getlist(name)
        if len(values) > 1:
            raise Refused(Reason.REQUEST_INVALID, f"{name} is there more than once")
        if values:
            given[name] = values[0]
    try:
        return msgspec.convert(given, headers)
    except msgspec.ValidationError as error:
        raise Refused(Reason.REQUEST_INVALID, broken_rule(error)) from None


def read_query(request: Request, query: type[Q]) -> Q:
    """The parameters of the query that a call knows. Refused `request_invalid`."""
    given: dict[str, str] = {}
    for name in query.__struct_encode_fields__:
        values = request.query_params.getlist(name)
        if len(values) > 1:
            raise Refused(Reason.REQUEST_INVALID, f"{name} is there more than once")
        if values:
            given[name] = values[0]
    try:
        read = msgspec.convert(given, query, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(Reason.REQUEST_INVALID, broken_rule(error)) from None
    for name, attribute in zip(query.__struct_encode_fields__, query.__struct_fields__, strict=True):
        # msgspec takes 1.0 and 1e0 for whole numbers too.
        if isinstance(getattr(read, attribute), int) and not given.get(name, "0").isdecimal():
            raise Refused(Reason.REQUEST_INVALID, f"{name}: Expected a whole number")
    return read


def broken_rule(error: msgspec.ValidationError) -> str:
    """Which member breaks which rule, without anything that was sent."""
    rule, _, place = str(error).partition(" - at `$")
    if rule.startswith(_NOT_TOLD):
        rule = "nothing that is allowed there"
    return f"{place.strip('`.') or 'the body'}: {rule}"

"""Parameters of a request's path and query, each with its bounds."""

import re

from starlette.requests import Request

from postseal.errors import Refused
from postseal.outcomes import Reason

_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,16}", re.ASCII)


def path_id(request: Request, name: str) -> str:
    """An id in the path; what cannot be one names nothing, which is `not_found`."""
    text = request.path_params[name]
    if not _ID.fullmatch(text):
        raise Refused(Reason.NOT_FOUND, "there is no such thing, or it is not the caller's")
    return text


def text(request: Request, name: str, default: str) -> str:
    """A parameter that is there once, or not at all."""
    values = request.query_params.getlist(name)
    if len(values) > 1:
        raise Refused(Reason.REQUEST_INVALID, f"{name} is there more than once")
    return values[0] if values else default


def id_or_empty(request: Request, name: str) -> str:
    """An id, or the empty string where there is none."""
    value = text(request, name, "")
    if value and not _ID.fullmatch(value):
        raise Refused(Reason.REQUEST_INVALID, f"{name} is no id")
    return value


def whole_number(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    """A whole number within its bounds, both included."""
    value = text(request, name, str(default))
    if not _WHOLE_NUMBER.fullmatch(value) or not least <= int(value) <= most:
        raise Refused(Reason.REQUEST_INVALID, f"{name} must be a whole number from {least} to {most}")
    return int(value)

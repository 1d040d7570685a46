"""The parts of a request's head that we read, each with one meaning or none.

A credential is one `Authorization: Bearer <opaque>` in ASCII: a second such field, another scheme or another character
makes it no credential at all. A media type is one Content-Type without parameters, which our types do not have.
"""

from dataclasses import dataclass

from starlette.types import Scope

from postseal.web.peer import TrustedProxies


@dataclass(frozen=True, slots=True)
class Head:
    """What a request says of itself before its body."""

    peer: str
    credential: str | None
    media_type: bytes | None
    """In lower case; None if there is no such field, or more than one."""
    encoded: bool
    """Whether the body is compressed, or otherwise not as it is."""
    declared_bytes: int
    """Content-Length; 0 where the length is not declared."""


def read_head(scope: Scope, proxies: TrustedProxies) -> Head:
    """Read a request's head. The parser has refused what is no HTTP, a contradictory length among it."""
    authorizations: list[bytes] = []
    types: list[bytes] = []
    forwarded: list[bytes] = []
    encoded = False
    declared_bytes = 0
    for name, value in scope["headers"]:
        match name:
            case b"authorization":
                authorizations.append(value)
            case b"content-type":
                types.append(value)
            case b"content-length":
                declared_bytes = int(value)
            case b"content-encoding":
                encoded = True
            case b"transfer-encoding":
                encoded = encoded or value.strip().lower() != b"chunked"
            case b"x-forwarded-for":
                forwarded.append(value)
            case _:
                pass
    client = scope["client"]
    return Head(
        proxies.peer(client[0] if client else None, forwarded),
        _bearer(authorizations[0]) if len(authorizations) == 1 else None,
        types[0].strip().lower() if len(types) == 1 else None,
        encoded,
        declared_bytes,
    )


def _bearer(authorization: bytes) -> str | None:
    scheme, _, credential = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not authorization.isascii():
        return None
    return credential.strip(b" ").decode("ascii") or None

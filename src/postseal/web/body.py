"""Taking a body in, so that no length that is declared, left out or wrong makes us hold more than we said.

Before it is counted here, uvicorn holds up to 64 KiB and one read of the socket of a request that is being worked on,
and somewhat more of one that was pipelined behind a read that waits. The decoded bytes are counted as they come, and
nothing is taken beyond the cap. What is held for callers who are not verified is counted over all of them, apart from
what verified callers send, so that strangers cannot use that up; and within both nobody has more than a share. A body
for which there is no room is `unavailable`, and not audited: under load each would become a commit.
In order: the declared length, the media type and encoding, then each part's size, room and time.
"""

from collections import Counter
from dataclasses import dataclass

from starlette.types import Receive, Scope

from postseal.errors import PostsealError, Refused, Unavailable
from postseal.outcomes import Reason
from postseal.web.head import Head

TIMED_OUT = "postseal.timed_out"
"""The key of a request's state under which its connection says that the time to receive it is over."""


class BodyRefused(Refused):
    """A body was not taken. `received` is what of it had come, up to its cap."""

    def __init__(self, reason: Reason, detail: str, received: bytes = b"") -> None:
        super().__init__(reason, detail)
        self.received = received


class ClientGone(PostsealError):
    """The client went away before its request was whole; there is nobody to answer."""


MIN_SHARE_BYTES = 2 * 1024 * 1024
"""Two of the largest bodies: a holder can always send one."""
SHARES = 8
"""No holder has more than one part in so many of all: some who never end their bodies stop nobody else."""


class HeldBytes:
    """Bytes of bodies that are held at once, up to `limit_bytes`, each holder's up to its share."""

    def __init__(self, limit_bytes: int) -> None:
        self.free_bytes = limit_bytes
        self.share_bytes = max(limit_bytes // SHARES, MIN_SHARE_BYTES)
        self.held_by: Counter[str] = Counter()

    def of(self, holder: str) -> "Holding":
        """What `holder`, a tenant or a network peer, holds and may take."""
        return Holding(self, holder)


@dataclass(frozen=True, slots=True)
class Holding:
    """One holder's part of the bytes that are held."""

    all: HeldBytes
    holder: str

    def take(self, size_bytes: int) -> bool:
        """Hold so many more, if there is room for them."""
        held_bytes = self.all.held_by[self.holder] + size_bytes
        if size_bytes > self.all.free_bytes or held_bytes > self.all.share_bytes:
            return False
        self.all.free_bytes -= size_bytes
        self.all.held_by[self.holder] = held_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Let go of what was taken."""
        self.all.free_bytes += size_bytes
        self.all.held_by[self.holder] -= size_bytes
        if not self.all.held_by[self.holder]:
            del self.all.held_by[self.holder]


async def receive_body(
    scope: Scope, receive: Receive, head: Head, *, media_type: bytes, cap_bytes: int, held: Holding
) -> bytes:
    """The whole body, whose size the caller gives back to `held` once it is done with it.

    Raises BodyRefused, ClientGone, and Unavailable where there is no room; and then holds nothing.
    """
    if head.declared_bytes > cap_bytes:
        raise _too_large(cap_bytes)
    if head.encoded:
        raise BodyRefused(Reason.UNSUPPORTED_MEDIA_TYPE, "a body is sent as it is, without any encoding")
    if head.media_type != media_type:
        raise BodyRefused(Reason.UNSUPPORTED_MEDIA_TYPE, f"the media type must be {media_type.decode()}")
    body = bytearray()
    try:
        while await _receive_part(scope, receive, body, cap_bytes, held):
            pass
    except BaseException:
        held.release(len(body))
        raise
    return bytes(body)


async def _receive_part(scope: Scope, receive: Receive, body: bytearray, cap_bytes: int, held: Holding) -> bool:
    """Add the next part, which is held, to `body`; whether there is more to come."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    part: bytes = message["body"]
    if len(body) + len(part) > cap_bytes:
        raise _too_large(cap_bytes, bytes(body + part)[:cap_bytes])
    if not held.take(len(part)):
        raise Unavailable("too many bodies are on their way; send it again")
    body += part
    if message["more_body"] and scope["state"].get(TIMED_OUT):
        raise BodyRefused(Reason.REQUEST_TIMEOUT, "the body did not arrive in time", bytes(body))
    return message["more_body"]


def _too_large(cap_bytes: int, received: bytes = b"") -> BodyRefused:
    return BodyRefused(Reason.BODY_TOO_LARGE, f"a body has at most {cap_bytes} bytes here", received)

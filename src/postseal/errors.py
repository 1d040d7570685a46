"""Every error that postseal raises on purpose.

PostsealError
├── Refused             a request was judged and refused, with its stable reason
├── Unavailable         nothing is known to be committed; the same request may be sent again
├── AdminError          an administrator's act cannot be done; one line says why
├── ArchiveError        a backup cannot be taken or restored; one line says why
└── StartupError        the service cannot start; one line says what to do

No message of these errors carries a credential, a code, a key, a signature or a payload.
"""

from postseal.outcomes import Reason


class PostsealError(Exception):
    """The root; catching it catches whatever postseal means to say."""


class Refused(PostsealError):
    """A request was refused with `reason`; `detail` is one plain sentence for people, never parsed."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Unavailable(PostsealError):
    """A commit or an audit is not certain: nothing is known to be committed."""


class AdminError(PostsealError):
    """An administrator's act was refused: `reason` is `not_found`, `conflict` or `request_invalid`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ArchiveError(PostsealError):
    """A backup cannot be taken, or an archive not restored; the message is one line that says why."""


class StartupError(PostsealError):
    """The service cannot start; the message is one line that says what to do."""

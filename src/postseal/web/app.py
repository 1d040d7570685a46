"""The ASGI application: a path without parameters by one look-up, all others by their routes, every fault as a problem.

A path is compared as it was sent. None of ours needs a percent sign, an empty segment or a dot segment, so a path with
one names nothing.
"""

from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from postseal.correlation import new_correlation_id
from postseal.door import RateLimited
from postseal.errors import AdminError, Refused, Unavailable
from postseal.outcomes import Reason
from postseal.service import Service
from postseal.verdicts import Refusal
from postseal.web import answers
from postseal.web.body import ClientGone
from postseal.web.calls import Call
from postseal.web.head import read_head
from postseal.web.peer import TrustedProxies
from postseal.web.refusals import CALLER, Refusals, log_bug
from postseal.web.surface import all_calls


class App:
    """The HTTP surface of one process. StartupError if a setting cannot be used."""

    def __init__(self, service: Service) -> None:
        self.refusals = Refusals(service.metrics)
        self._door = service.door
        self._proxies = TrustedProxies(service.settings.trusted_proxies)
        self.calls = all_calls(service, proxies=self._proxies, refusals=self.refusals)
        """All that is answered."""
        paths = {call.path: _Methods(other for other in self.calls if other.path == call.path) for call in self.calls}
        self._exact = {path.encode(): methods for path, methods in paths.items() if "{" not in path}
        routes = [Route(path, methods) for path, methods in paths.items() if "{" in path]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; never raises for what a caller can bring about."""
        try:
            await self._dispatch(scope, receive, send)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - whatever is left is a fault of ours, answered as such
            await answers.send_answer(send, self._problem(scope, error))

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        exact = self._exact.get(scope["raw_path"])
        if exact is not None:
            await exact(scope, receive, send)
            return
        if b"%" in scope["raw_path"]:
            raise HTTPException(404)
        # With this key in the scope Starlette raises what it would else answer in its own words.
        scope["app"] = self
        await self._router(scope, receive, send)

    def _problem(self, scope: Scope, error: Exception) -> answers.Answer:
        correlation_id = error.correlation_id if isinstance(error, RateLimited) else new_correlation_id()
        headers: tuple[answers.Header, ...] = ()
        match error:
            case Refused():
                refused = error
            case AdminError():
                refused = Refused(error.reason, str(error))
            case HTTPException():
                refused = Refused(Reason.METHOD_NOT_ALLOWED if error.status_code == 405 else Reason.NOT_FOUND)  # noqa: PLR2004 - the status is the name here
                headers = tuple((k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items())
            case Unavailable():
                refused = Refused(Reason.UNAVAILABLE, str(error))
            case _:
                log_bug(error, correlation_id)
                refused = Refused(Reason.UNAVAILABLE, "an unexpected error; nothing is known to be committed")
        head = read_head(scope, self._proxies)
        refusal = Refusal(refused.reason, correlation_id, refused.detail)
        caller = scope["state"].get(CALLER) or self._door.recall(head.credential)
        self.refusals.note(refusal, caller, head.peer)
        return answers.of_refused(refused, correlation_id, *headers)


class _Methods:
    """The calls of one path, of which the request's method chooses one; HEAD is a GET whose body is not sent."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._handlers: dict[str, ASGIApp] = {call.method: call.handle for call in calls}
        if "GET" in self._handlers:
            self._handlers["HEAD"] = self._handlers["GET"]
        self._allow = ", ".join(self._handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._handlers.get(scope["method"])
        if handle is None:
            raise HTTPException(405, headers={"allow": self._allow})
        await handle(scope, receive, send)

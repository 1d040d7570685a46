"""The shipped sender: one HTTP POST of the stored envelope, signed as the Standard Webhooks have it.

1. the URL is held against `addresses.check_url`, as it was when the destination was made
2. its host is looked up, vetted and connected to (`resolving`); an idle connection that was so made is used again
3. TLS is verified for the name, by the system's authorities or those of `ca_file`
4. the request is signed for this attempt and sent; its result is the status of the answer, once the head is read
5. beside that the body is thrown away; a connection is kept only if that took little

Redirects are never followed, cookies never kept, proxies and passwords never read from the environment or a netrc file.

Through an egress proxy the same addresses are vetted here, and the proxy is told to connect to a vetted one, not to the
name: it resolves nothing. TLS inside the tunnel is still verified for the name. Plain http:// through a proxy carries
the address where a receiver expects its name. What a proxy does with what it is told is up to whoever runs it, and its
own address is not vetted.

Nothing of a URL, a secret or an answer is logged.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
from yarl import URL

from postseal.envelope.dsse import ENVELOPE_MEDIA_TYPE
from postseal.errors import StartupError
from postseal.rules.delivery import Attempted, Code
from postseal.senders import Mail, webhook
from postseal.senders.addresses import Network, check_url
from postseal.senders.judging import judge_answer, judge_failure
from postseal.senders.resolving import LookUp, SystemLookUp, VettedResolver, asking_tenant

MAX_ANSWER_BYTES = 65_536
"""Of an answer's body; with more of it, its connection is closed."""
READ_AHEAD_BYTES = 16_384
"""Of it that is held in memory, or a few times as much."""
MAX_DRAINING = 64
"""Answers whose rest is read at once; of one more the connection is closed."""
DRAIN_S = 1.0
"""How long the rest of an answer may take once its status is known; after that its connection is closed."""
KEEP_IDLE_S = 15.0
REMEMBERED_URLS = 4_096
"""Reading one takes as long as signing for it."""


@dataclass(slots=True)
class _Progress:
    """How far an attempt has come."""

    connected: bool = False
    sent: bool = False
    """It has had a connection, over which something may have been sent."""
    reused: bool = False
    """It goes over a connection that was idle, and that the receiver may have been closing."""


@dataclass(frozen=True, slots=True)
class _Aim:
    """Where a request goes."""

    url: URL
    proxy: str | None = None
    host: str | None = None
    tls_name: str | None = None


class HttpSender:
    """Pushes over one pool of connections; an async context manager, which closes them all.

    `timeout_s` bounds an attempt up to the answer's status, `connect_timeout_s` in it the look-up of the name, and
    connecting to one address including TLS. How many connections are open at once is up to whoever sends.
    """

    def __init__(
        self,
        *,
        allowed: Sequence[Network] = (),
        allow_http: bool = False,
        proxy: str | None = None,
        ca_file: Path | None = None,
        timeout_s: float = 15.0,
        connect_timeout_s: float = 5.0,
        look_up: LookUp | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._allowed = allowed
        self._allow_http = allow_http
        self._proxy = proxy
        self._ca_file = ca_file
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._draining: set[asyncio.Task[None]] = set()
        self._look_up = look_up
        self._now = now

    async def __aenter__(self) -> Self:
        """Raises StartupError where the proxy's URL is none, or the authorities cannot be read."""
        _check_proxy(self._proxy)
        tls = _tls_context(self._ca_file)
        self._own_look_up = self._system_look_up() if self._look_up is None else None
        look_up = self._own_look_up or self._look_up
        assert look_up is not None  # noqa: S101 - it is one or the other
        self._resolver = VettedResolver(self._allowed, look_up)
        # With a proxy, whatever is connected to is the proxy, and what is vetted the proxy's target.
        vetting: dict[str, Any] = (
            {} if self._proxy else {"resolver": self._resolver, "socket_factory": self._resolver.open_socket}
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=tls,
                use_dns_cache=False,
                keepalive_timeout=KEEP_IDLE_S,
                limit=0,  # what waited here would wait within its time-out, for a receiver that may be well
                **vetting,
            ),
            headers={
                "Accept-Encoding": "identity",
                "Content-Type": ENVELOPE_MEDIA_TYPE,
                "User-Agent": f"postseal/{version('postseal')}",
            },
            timeout=aiohttp.ClientTimeout(sock_connect=self._connect_timeout_s, ceil_threshold=float("inf")),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_AHEAD_BYTES,
            trust_env=False,
            trace_configs=[_trace_config()],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._draining:
            task.cancel()
        if self._draining:
            await asyncio.wait(self._draining)
        await self._session.close()
        if self._own_look_up is not None:
            self._own_look_up.close()

    async def send(self, mail: Mail) -> Attempted:
        """See `Sender`. 2xx is success; nothing is sent without a signature."""
        if not mail.secrets:
            return Attempted(Code.SECRET_UNUSABLE, ours=True)
        try:
            url = _read_url(mail.url, self._allow_http)
        except ValueError:
            return Attempted(Code.ADDRESS_REFUSED)
        progress = _Progress()
        asking = asking_tenant.set(mail.tenant)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._post(mail, url, progress)
        except Exception as error:  # noqa: BLE001 - whatever a receiver can cause has a code
            return judge_failure(error, connected=progress.connected, sent=progress.sent)
        finally:
            asking_tenant.reset(asking)
        # Nothing is waited for any more: who is cut off now would not know what the receiver has said.
        self._leave(response)
        return judge_answer(response.status, response.headers, self._now())

    def _leave(self, response: aiohttp.ClientResponse) -> None:
        """Let a short rest of an answer be read, which gives its connection back to the pool; or close it."""
        if response.connection is None:
            return  # it is back there: all of a short answer came at once
        if len(self._draining) >= MAX_DRAINING:
            response.close()
            return

        def end(task: asyncio.Task[None]) -> None:
            self._draining.discard(task)
            response.close()  # of a connection that is back in the pool this closes nothing

        task = asyncio.create_task(_drain(response))
        self._draining.add(task)
        task.add_done_callback(end)

    def _system_look_up(self) -> SystemLookUp:
        # Half of the time at most is for a thread: an attempt that never had one may not end as the receiver's failure.
        begin_s = min(self._connect_timeout_s, self._timeout_s / 2)
        return SystemLookUp(begin_s=begin_s, timeout_s=self._connect_timeout_s)

    async def _post(self, mail: Mail, url: URL, progress: _Progress) -> aiohttp.ClientResponse:
        aim = await self._aim(mail, url)
        try:
            return await self._request(mail, aim, progress)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # It was closed while we wrote to it, which says nothing about the receiver.
            if not progress.reused:
                raise
        return await self._request(mail, aim, progress)

    async def _request(self, mail: Mail, aim: _Aim, progress: _Progress) -> aiohttp.ClientResponse:
        progress.connected = progress.reused = False
        headers = webhook.sign(mail.secrets, mail.delivery, mail.body, self._now())
        if aim.host is not None:
            headers["Host"] = aim.host
        return await self._session.post(
            aim.url,
            data=mail.body,
            headers=headers,
            proxy=aim.proxy,
            server_hostname=aim.tls_name,
            allow_redirects=False,
            trace_request_ctx=progress,
        )

    async def _aim(self, mail: Mail, url: URL) -> _Aim:
        host = url.raw_host
        if self._proxy is None or host is None:
            return _Aim(url)
        found = await self._resolver.resolve(host, url.port or 0)
        # A proxy tries one address; the next attempt tries the next one.
        address = found[(mail.attempt - 1) % len(found)]["host"]
        tls_name = host if url.scheme == "https" else None
        return _Aim(url.with_host(address), self._proxy, url.host_port_subcomponent, tls_name)


@lru_cache(maxsize=REMEMBERED_URLS)
def _read_url(url: str, allow_http: bool) -> URL:
    """A good URL, byte for byte as the operator wrote it. Raises ValueError."""
    check_url(url, allow_http=allow_http)
    return URL(url, encoded=True)


def _check_proxy(proxy: str | None) -> None:
    if proxy is None:
        return
    try:
        url = URL(proxy)
        usable = url.scheme in {"http", "https"} and bool(url.host)
    except ValueError:
        usable = False
    if not usable:  # not repeated: it may hold a password
        raise StartupError("egress_proxy is no URL such as http://proxy.example.net:3128")


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one: a file without a certificate
        why = "it holds no certificates" if isinstance(error, ssl.SSLError) else error.strerror
        raise StartupError(f"cannot use the ca_file {ca_file}: {why}") from None


def _trace_config() -> aiohttp.TraceConfig:
    async def connected(_session: object, trace: SimpleNamespace, _about: object) -> None:
        progress = trace.trace_request_ctx
        progress.connected = progress.sent = True

    async def reused(_session: object, trace: SimpleNamespace, _about: object) -> None:
        progress = trace.trace_request_ctx
        progress.connected = progress.sent = progress.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_create_end.append(connected)
    config.on_connection_reuseconn.append(reused)
    return config


async def _drain(response: aiohttp.ClientResponse) -> None:
    left = MAX_ANSWER_BYTES
    with contextlib.suppress(Exception):  # the status has said all
        async with asyncio.timeout(DRAIN_S):
            while left > 0 and (piece := await response.content.read(left)):
                left -= len(piece)

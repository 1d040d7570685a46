"""What becomes of an attempt, by the answer or by the error that it ended with: one of a closed set of codes."""

import socket
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import aiohttp
import structlog
from aiohttp.http_exceptions import LineTooLong
from structlog.typing import FilteringBoundLogger

from postseal import logs
from postseal.rules.delivery import Attempted, Code
from postseal.senders.resolving import AddressRefused, is_shortage

MAX_RETRY_AFTER_S = 604_800.0
"""A week. What a receiver asks beyond it counts as this."""

_CODE_OF_CLASS: dict[int, Code | None] = {2: None, 3: Code.STATUS_3XX, 4: Code.STATUS_4XX, 5: Code.STATUS_5XX}

_log: FilteringBoundLogger = structlog.get_logger("postseal.senders")


def judge_answer(status: int, headers: Mapping[str, str], now_s: float) -> Attempted:
    """What an answer with that status makes of the attempt: 2xx is success; 429 and 503 may ask for time.

    `headers` are looked up whatever the case of their names; `now_s` is the time here, in seconds since 1970.
    """
    match status:
        case 429:
            return Attempted(Code.RATE_LIMITED, _retry_after_s(headers, now_s))
        case 503:
            return Attempted(Code.STATUS_5XX, _retry_after_s(headers, now_s))
        case 410:
            return Attempted(Code.GONE)
        case _:
            return Attempted(_CODE_OF_CLASS.get(status // 100, Code.ANSWER_INVALID))


def _retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Seconds, or a date on the receiver's own clock where it tells that; None for what cannot be read."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    until_s = _timestamp_of(text)
    if until_s is None:
        return None
    their_now_s = _timestamp_of(headers.get("Date", ""))
    return min(max(0.0, until_s - (now_s if their_now_s is None else their_now_s)), MAX_RETRY_AFTER_S)


def _timestamp_of(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def judge_failure(error: Exception, *, connected: bool, sent: bool) -> Attempted:
    """What an attempt without an answer comes to: `connected` if it ended on a connection, `sent` if it ever had one.

    What is no receiver's doing is logged: the kind of error and where it arose, not its message, which may quote. A
    shortage of ours does not count where nothing was sent.
    """
    system_error = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if is_shortage(system_error):
        return Attempted(_fault_of_ours(error), ours=not sent)
    return Attempted(_code_of(error, system_error, connected=connected))


def _code_of(error: Exception, system_error: Exception, *, connected: bool) -> Code:
    # What aiohttp takes for an invalid URL here is a number that only the system's resolver reads as an address.
    if isinstance(system_error, AddressRefused) or isinstance(error, aiohttp.InvalidURL):
        return Code.ADDRESS_REFUSED
    if isinstance(error, TimeoutError):
        return Code.SEND_TIMEOUT if connected else Code.CONNECT_TIMEOUT
    if _is_caused_by(error, ssl.SSLError):
        return Code.TLS_FAILED
    if isinstance(system_error, socket.gaierror):
        return Code.DNS_FAILED
    if _is_caused_by(error, LineTooLong):
        return Code.ANSWER_TOO_LARGE
    if isinstance(error, aiohttp.ClientError | OSError):
        return Code.ANSWER_INVALID if connected else Code.CONNECT_FAILED
    return _fault_of_ours(error)


def _is_caused_by(error: BaseException | None, kind: type[Exception]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__
    return False


def _fault_of_ours(error: Exception) -> Code:
    _log.error("push_failed", error=type(error).__name__, where=logs.where(error))
    return Code.SENDER_FAILED

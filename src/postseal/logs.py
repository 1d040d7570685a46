"""Logs on stderr: one line an event, JSON unless a person is watching.

What libraries log through the standard library comes out the same way. No event carries a credential, a code, a key, a
signature or a payload.
"""

import logging
import sys
import traceback

import structlog

FIRST: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)

TRACED_FRAMES = 5


def configure(level: str) -> None:
    """Write events of `level` (debug, info, warning or error) and above to stderr, from here on."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*FIRST, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=FIRST, processors=_last_processors()))
    # On the handler too: psycopg's logger has a level of its own.
    handler.setLevel(threshold)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)


def where(error: Exception) -> list[str]:
    """Where an error arose, innermost last. To be logged in place of its message, which may quote what was sent."""
    frames = traceback.extract_tb(error.__traceback__)[-TRACED_FRAMES:]
    return [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]


def _last_processors() -> list[structlog.typing.Processor]:
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if sys.stderr.isatty():
        return [strip, structlog.dev.ConsoleRenderer()]
    return [strip, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]

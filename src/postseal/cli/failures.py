"""How a command fails: one line on stderr that says why, and exit code 1. Imports nothing of the server's half."""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from typer import Exit, echo

from postseal.errors import PostsealError, Unavailable


@contextmanager
def one_line_errors() -> Generator[None]:
    """Turn every failure that is not a bug of ours into one line."""
    try:
        yield
    except Unavailable as error:
        fail(f"{error}; nothing is known to be done: look, and try again")
    except PostsealError as error:
        fail(str(error))
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        fail(f"{error.filename or 'input or output'}: {error.strerror or type(error).__name__}")
    except Exception as error:
        diagnostic = getattr(error, "diag", None)
        if diagnostic is None:
            raise
        # psycopg's. The primary message alone: the others quote rows and parameters.
        fail(f"the database refused: {diagnostic.message_primary or type(error).__name__}")


def fail(line: str) -> NoReturn:
    """End the command with one line on stderr."""
    echo(f"postseal: {' '.join(line.split())}", err=True)
    raise Exit(1) from None

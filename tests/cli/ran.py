"""How a command ended, and what it said."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    """The end of one command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """What it printed for people."""
        assert (self.code, self.err) == (0, "")
        return self.out

    @property
    def lines(self) -> list[Any]:
        """The JSON documents that it printed, one a line."""
        assert (self.code, self.err) == (0, "")
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def document(self) -> Any:
        """The one JSON document that it printed."""
        [document] = self.lines
        return document

    @property
    def why(self) -> str:
        """The one line with which it failed."""
        assert (self.code, self.out) == (1, "")
        assert self.err.startswith("postseal: ")
        assert self.err.count("\n") == 1
        return self.err


Cli = Callable[..., Ran]

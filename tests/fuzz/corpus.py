r"""The kept inputs of each harness: `corpus/<harness>/<what-it-is>.txt`, one input a file.

A file has the bytes as printable ASCII: \xNN, \n, \r and \t for what is not, \\ for a backslash; the line break at its
end is not part of the input. `text_of` writes it and `bytes_of` reads it.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def files_of(harness: str) -> list[Path]:
    """The files of one harness, in the order of their names."""
    return sorted((FOLDER / harness).glob("*.txt"))


def bytes_of(text: str) -> bytes:
    """The input that a file's text stands for."""
    return text.removesuffix("\n").encode("ascii").decode("unicode_escape").encode("latin-1")


def text_of(raw: bytes) -> str:
    """The text under which an input is kept."""
    return raw.decode("latin-1").encode("unicode_escape").decode("ascii") + "\n"

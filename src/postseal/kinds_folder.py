"""The folder of a deployment's kinds, read once at the start, and the validator that holds data against them.

Patterns run on an engine without backtracking, whose time grows with the text alone whatever the pattern is.
"""

from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError

from postseal.envelope.closed_schema import NotClosedError
from postseal.envelope.kinds import MAX_KINDS, MAX_SCHEMA_BYTES, NO_KINDS, Fault, Kinds, read_kinds
from postseal.errors import StartupError
from postseal.settings import Settings


def kinds_of(settings: Settings) -> Kinds:
    """A deployment's own kinds; none where it has no folder of them. Raises StartupError."""
    return load_kinds(Path(settings.kinds_dir)) if settings.kinds_dir else NO_KINDS


def load_kinds(folder: Path) -> Kinds:
    """Read every file of the folder; a hidden one is left alone. StartupError where one is no closed schema."""
    try:
        shown = (path for path in folder.iterdir() if not path.name.startswith("."))
        files = {path.name: _read(path) for path in islice(shown, MAX_KINDS + 1)}
    except OSError as error:
        raise StartupError(f"cannot read {error.filename} of the kinds folder: {error.strerror}") from None
    return read_kinds(files, compile_schema)


def compile_schema(schema: dict[str, Any]) -> Fault:
    """The check of a closed schema; NotClosedError for a pattern that the engine refuses."""
    # References are local, so an identifier would only move what they are relative to.
    plain = {keyword: value for keyword, value in schema.items() if keyword != "$id"}
    try:
        validator = Draft202012Validator(plain, pattern_options=RegexOptions(), offline=True)
    except ValidationError as error:
        raise NotClosedError(tuple(map(str, error.instance_path)), "not a pattern that can be read") from None

    def fault(data: object) -> str | None:
        try:
            if validator.is_valid(data):
                return None
            error = next(iter(validator.iter_errors(data)))
        except ValueError:  # deeper than the validator goes, and so than any schema here allows
            return "$.data"
        # The path has names that the schema gives; one that it does not give is the fault of the object around it.
        return ".".join(("$.data", *map(str, error.instance_path)))

    return fault


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SCHEMA_BYTES + 1)

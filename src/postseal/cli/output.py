"""What commands print: one JSON document, or aligned text for people."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

from typer import echo

from postseal.settings import SECONDS_A_DAY, SECONDS_A_MINUTE, SECONDS_AN_HOUR

Record = Mapping[str, Any]
"""Names in camelCase, as on the wire, and their values; the name of a time ends in `Ms`, as its JSON form is."""


def record(row: object) -> dict[str, Any]:
    """The fields of a dataclass as a record."""
    assert is_dataclass(row)  # noqa: S101 - whatever is printed is defined as data
    return {
        _camel(field.name) + ("Ms" if field.type in (datetime, datetime | None) else ""): getattr(row, field.name)
        for field in fields(row)
    }


def print_json(document: Record) -> None:
    """Print one JSON document on one line; times are milliseconds since 1970."""
    echo(json.dumps(document, default=_json, separators=(",", ":")))


def print_table(rows: Sequence[Record], columns: Iterable[str]) -> None:
    """Print one line a row, below the names of the columns, which are members of each row."""
    names = list(columns)
    lines = [[_header(name) for name in names], *([text(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    for line in lines:
        echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_record(document: Record) -> None:
    """Print one line a member."""
    width = max(len(_header(name)) for name in document)
    for name, value in document.items():
        echo(f"{_header(name).ljust(width)}  {text(value)}")


def age(seconds: int) -> str:
    """A span of time in its greatest whole unit."""
    for unit, length in (("d", SECONDS_A_DAY), ("h", SECONDS_AN_HOUR), ("m", SECONDS_A_MINUTE)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _json(value: object) -> object:
    match value:
        case datetime():
            return round(value.timestamp() * 1000)
        case UUID():
            return str(value)
        case _:
            raise TypeError(f"{type(value).__name__} has no form in JSON")


def _header(name: str) -> str:
    return name.removesuffix("Ms")


def text(value: object) -> str:
    """A value as people read it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        case list():
            return ",".join(map(text, cast("list[object]", value))) or "-"
        case dict():
            return json.dumps(value, separators=(",", ":"))
        case _:
            return str(value)

"""Tables of the pages in docs/, and how they are read and made again from the code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from postseal.settings import ENVIRONMENT_PREFIX, Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted({*DOCS.rglob("*.md"), *ROOT.glob("*.md")})

SETTINGS_HEAD = "| setting | variable | default | allowed | meaning |\n|---|---|---|---|---|\n"


def rows(page: str) -> Iterator[list[str]]:
    """The cells of each row of the page's tables, without their code marks; heads and rules left out."""
    for line in page.splitlines():
        if line.startswith("| `"):
            yield [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]


def settings_table() -> str:
    """The table of docs/settings.md as it must be."""
    hints = get_type_hints(Settings, include_extras=True)
    return SETTINGS_HEAD + "".join(
        f"| `{field.name}` | `{ENVIRONMENT_PREFIX}{field.name.upper()}` | {_default(field.default)} "
        f"| {_allowed(hints[field.name])} | {_meta(hints[field.name]).description} |\n"
        for field in msgspec.structs.fields(Settings)
    )


def _default(value: object) -> str:
    match value:
        case None | ():
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case _:
            return f"`{value}`"


def _allowed(hint: Any) -> str:
    meta = _meta(hint)
    bounds = {"at least": meta.ge, "more than": meta.gt, "at most": meta.le}
    words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
    if meta.pattern is not None:
        whole = meta.pattern.removeprefix("^").removesuffix(r"\Z")
        words.append("`" + whole.replace("|", r"\|") + "`")
    return ", ".join(words)


def _meta(hint: Any) -> msgspec.Meta:
    [meta] = hint.__metadata__
    return meta


if __name__ == "__main__":
    print(settings_table(), end="")

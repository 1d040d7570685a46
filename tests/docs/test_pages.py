"""The pages hold together: links, words, commands, messages, the vector; and they tell nothing of any one machine."""

import base64
import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tables
import typer

from postseal import cli
from postseal.envelope import dsse, ed25519, enrolment, v1

PROTOCOL = (tables.DOCS / "protocol.md").read_text()
GLOSSARY = (tables.DOCS / "glossary.md").read_text()
OPERATIONS = (tables.DOCS / "operations.md").read_text()

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMAND = re.compile(r"\bpostseal ([a-z]+(?:-[a-z]+)*)(?: ([a-z]+(?:-[a-z]+)*))?([^`\n]*)")
SOURCES = "".join(path.read_text() for path in (tables.ROOT / "src").rglob("*.py"))

# In pieces, so that this file does not name them either.
OF_A_MACHINE = re.compile(
    "|".join(
        ["/" + folder + "/(?!someone)[a-z0-9]" for folder in ("work", "root", "home", "Users", "opt")]
        + [r"(?:https?|file)://[^\s)\"'`]*" + word for word in ("pypi", "/simple/", "registry", "mirror")]
    )
)
READABLE = {".md", ".py", ".toml", ".txt", ".sql", ".json", ".yml", ".yaml", ".sh", ".cfg", ""}


def without_blocks(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made from them."""
    headings = HEADING.findall(without_blocks(page.read_text()))
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(tables.ROOT).as_posix())
def test_links_resolve(page: Path):
    """Each link inside the repository leads to a file, and to a heading where it names one."""
    for link in LINK.findall(without_blocks(page.read_text())):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked():
    """Each page in docs/ can be reached from the README."""
    reached, waiting = set[Path](), [tables.ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(without_blocks(page.read_text()))]
        waiting += [(page.parent / link).resolve() for link in links if link and not link.startswith("https://")]
    assert {page for page in tables.PAGES if page.is_relative_to(tables.DOCS)} <= reached


def glossary() -> list[list[str]]:
    """The rows of the glossary: word, meaning, what it is not called."""
    lines = [line for line in GLOSSARY.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_glossary_order():
    """Words stand in alphabetical order, each once."""
    words = [word.casefold() for word, *_ in glossary()]
    assert all(earlier < later for earlier, later in pairwise(words))


def test_glossary_words_are_used():
    """Each word of the glossary is used in the code or on another page."""
    pages = "".join(page.read_text() for page in tables.PAGES if page.name != "glossary.md")
    used = (SOURCES + pages).casefold()
    assert [word for word, *_ in glossary() if word.casefold() not in used] == []


def test_glossary_has_the_words_of_the_protocol():
    """Each word that section 1 of the protocol defines is in the glossary."""
    section = PROTOCOL.split("## 1. Words")[1].split("## 2.")[0]
    defined = re.findall(r"^\| ([a-z][a-z, ]*) \|", section, re.MULTILINE)
    words = {word for cell in defined for word in cell.split(", ")} - {"word"}
    assert words <= {word for word, *_ in glossary()}


def test_glossary_names_in_code():
    """Each name of the code that the glossary gives is there."""
    for module, name in re.findall(r"`([a-z_.]+)\.([A-Z]\w+)`", GLOSSARY):
        assert hasattr(importlib.import_module(f"postseal.{module}"), name)


def commands() -> Iterator[tuple[str, str, str]]:
    """Every `postseal …` that a page names: its noun or verb, what follows, and the rest."""
    for page in tables.PAGES:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        spans = "\n".join(re.findall(r"`([^`\n]+)`", without_blocks(text)))
        yield from COMMAND.findall(blocks + "\n" + spans)


@pytest.mark.parametrize("named", sorted(set(commands())), ids=" ".join)
def test_commands_exist(named: tuple[str, str, str]):
    """Each command on a page exists, with the options that stand behind it."""
    first, second, rest = named
    group: Any = typer.main.get_command(cli.program([first]))
    found = group.commands[first]
    if first in cli.NOUNS:
        found = found.commands[second]
    options: set[str] = {option for parameter in found.params for option in parameter.opts}
    assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= options


def test_start_up_errors_are_the_codes():
    """Each line of the table of start-up errors is a message of the code."""
    messages = re.sub(r'"\s*\n\s*f?"', "", SOURCES)
    table = OPERATIONS.split("## When it does not start")[1].split("\n## ")[0]
    lines = [cell for line in table.splitlines() if line.startswith("| `") for cell in line.split(" | ")[:1]]
    pieces = [piece.strip() for line in lines for said in re.findall(r"`([^`]+)`", line) for piece in said.split("…")]
    assert [piece for piece in pieces if piece not in messages] == []


def vector(name: str) -> bytes:
    """The one line of a marked block of the protocol."""
    [line] = re.findall(rf"<!-- vector: {name} -->\n```json\n(.*)\n```", PROTOCOL)
    return line.encode()


def test_vector():
    """Section 12 of the protocol: key, payload, envelope, identity and proof belong together."""
    seed = bytes(range(32))
    public_key = ed25519.public_key(seed)
    payload, body = vector("payload"), vector("envelope")
    v1.open_payload(payload)
    sealed = dsse.seal(payload, seed)
    assert dsse.wrap(sealed.payload, sealed.keyid, sealed.signature) == body
    proof = enrolment.prove(seed, code="example-code", device="device-01", keyid=sealed.keyid, tenant="acme")
    expected = [
        public_key.hex(),
        ed25519.thumbprint(public_key),
        sealed.identity.hex(),
        dsse.undecodable_identity(b"").hex(),
        f"An event, {len(payload)} bytes",
        dsse.pae("http://example.com/HelloWorld", b"hello world").decode(),
        *(base64.urlsafe_b64encode(raw).rstrip(b"=").decode() for raw in (public_key, proof)),
    ]
    section = PROTOCOL.split("## 12.")[1]
    assert [text for text in expected if text not in section] == []


def tracked() -> list[Path]:
    """What belongs to the project: all but caches and what is built."""
    return [
        path
        for path in tables.ROOT.rglob("*")
        if path.suffix in READABLE
        and path.is_file()
        and not any(
            part.startswith(".") or part in {"__pycache__", "dist", "build"}
            for part in path.relative_to(tables.ROOT).parts
        )
    ]


def test_nothing_of_a_machine():
    """No file names a folder of somebody's machine, or the address of a package index."""
    files = tracked()
    assert len(files) > 50
    found = {
        path.relative_to(tables.ROOT).as_posix(): match[0]
        for path in files
        if (match := OF_A_MACHINE.search(path.read_text("utf-8", "replace")))
    }
    assert found == {}

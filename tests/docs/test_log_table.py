"""The table of docs/operations.md names every event that the code logs, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tables

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def test_each_event_stands_in_the_table() -> None:
    """An operator who meets a line finds what it means, and looks for no line that never comes."""
    _, _, behind = (tables.DOCS / "operations.md").read_text().partition("| `event` | what |\n|---|---|\n")
    rows, _, _ = behind.partition("\n\n")
    named = [name for row in rows.splitlines() for name in re.findall("`([^`]+)`", row.split(" | ")[0])]
    logged = {event for path in (tables.ROOT / "src").rglob("*.py") for event in events_of(path)}
    assert sorted(named) == sorted(logged)


def events_of(path: Path) -> Iterator[str]:
    """The first argument of each call that logs; or what it can be, where it is a name."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    by_name = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _takes_event(node)}
    for call in calls:
        if _logs(call.func) or (isinstance(call.func, ast.Name) and call.func.id in by_name):
            yield from _texts(call.args[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["event"]:
            yield from _texts(node.value)


def _logs(function: ast.expr) -> bool:
    """Whether it is a method of a logger: `log.info`, `self._log.info`, `structlog.get_logger().info`."""
    if not isinstance(function, ast.Attribute) or function.attr not in LEVELS:
        return False
    return re.search(r"(\blog|_log|get_logger\(.*\))$", ast.unparse(function.value)) is not None


def _takes_event(function: ast.FunctionDef) -> bool:
    return bool(function.args.args) and function.args.args[0].arg == "event"


def _texts(expression: ast.expr) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value

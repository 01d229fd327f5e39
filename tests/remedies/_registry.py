"""The errors that recommend something, found in the source, and the cases that run what they recommend."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Imperatives with which our messages recommend, at the beginning of a text or after a comma, a semicolon or a stop.
_VERBS = (
    "add|apply|bind|build|call|cast|choose|convert|create|cut|declare|define|delete|divide|drop|fit|freeze|give|"
    "include|increase|install|keep|leave|let|list|load|make|map|mark|merge|move|name|omit|pad|pass|put|raise|"
    "read|reduce|remove|rename|repeat|replace|restart|resume|return|run|save|set|shard|split|stack|start|"
    "switch|take|trace|train|turn|use|wait|wrap|write"
)
_RECOMMENDS = re.compile(rf"(?:^|[;:,.] (?:[a-z][^;:,.]* )??(?:do not )?)(?:{_VERBS})\b", re.IGNORECASE)


def recommendations() -> dict[str, list[str]]:
    """Return the texts in our source that recommend something, with holes as `{}`, and the places of each."""
    found: dict[str, list[str]] = {}
    for path in sorted(file for folder in ("transforms", "ensemble") for file in (ROOT / folder).rglob("*.py")):
        for text, line in _texts(ast.parse(path.read_text())):
            if len(text) > 18 and _RECOMMENDS.search(text):
                found.setdefault(text, []).append(f"{path.relative_to(ROOT)}:{line}")
    return found


def _texts(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the string literals of a module and their lines, without docstrings."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values), node.lineno


@dataclass(frozen=True)
class Case:
    """Raises errors with these texts, and runs what they recommend."""

    texts: tuple[str, ...]
    run: Callable[[Fails], Any]


CASES: dict[str, Case] = {}


def remedy(*texts: str) -> Callable[[Callable[[Fails], Any]], Callable[[Fails], Any]]:
    """Register a function that raises errors with all of these texts, by `fails`, and runs the remedy of each."""

    def register(run: Callable[[Fails], Any]) -> Callable[[Fails], Any]:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
        assert name not in CASES, name
        CASES[name] = Case(texts, run)
        return run

    return register


class Fails:
    """Calls a function that is expected to raise, or to warn, with one of the texts of a case."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.left = list(texts)
        self._texts = texts

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        """Return the message."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call(*args, **kwargs)
            except Exception as error:
                said = ["\n".join([str(error), *getattr(error, "__notes__", ())])]
            else:
                said = [str(warning.message) for warning in caught]
        assert said, "it neither raised nor warned"
        message = "\n".join(said)
        found = [text for text in self._texts if _pattern(text).search(message)]
        assert found, f"another message: {message}"
        self.left = [text for text in self.left if text not in found]
        return message


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("{}"))), re.DOTALL)

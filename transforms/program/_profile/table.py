"""Rows as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..._core.arguments import describe


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Align the columns of a table, the first `left` of them flush left, the others flush right."""
    columns = []
    for i, column in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, column))
        first, *others = (x.ljust(width) if i < left else x.rjust(width) for x in column)
        columns.append([first, "-" * width, *others])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def seconds(time: float) -> str:
    """Format a time in s, ms or us with three digits."""
    # From 0.9995 on three digits round to 1.
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if time * factor >= 0.9995:
            return f"{time * factor:.3g} {unit}"
    return f"{time * 1e6:.3g} us"


def count(number: float) -> str:
    """Format a number in T, G, M or k with three digits."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def check_groups(api: str, by: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that the rows of a table are added up by, given one or several; raise if they are not known."""
    groups = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, (tuple, list)) else ()
    if not groups or set(groups) - set(names):
        raise ValueError(f"{api}: by must be one or some of {', '.join(names)}, but got {describe(by)}.")
    return groups


def check_choice(api: str, name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise if a value is not one of some strings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{api}: {name} must be one of {', '.join(choices)}, but got {describe(value)}.")

"""Format rows as a table for a terminal, or as horizontal bars, which need the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..._core.arguments import describe

Name = TypeVar("Name", bound=str)

# Two colors of Paul Tol's bright scheme, which color-blind readers can distinguish.
_COLORS = "#4477aa", "#ee6677"
_LONGEST = 48  # characters of a name; for longer names the end is shown, which is the operation


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Align the columns of a table: the first `left` columns flush left, the others flush right."""
    columns = []
    for i, column in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, column))
        first, *others = (x.ljust(width) if i < left else x.rjust(width) for x in column)
        columns.append([first, "-" * width, *others])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def seconds(time: float) -> str:
    """Format a time in s, ms or us with three significant digits."""
    return _scaled(time, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def count(number: float) -> str:
    """Format a number with the suffix T, G, M, k or none, and three significant digits."""
    return _scaled(number, (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)))


def _scaled(number: float, units: Sequence[tuple[str, float]]) -> str:
    # With three digits, numbers from 0.9995 round to 1.
    unit, size = next((x for x in units if number >= 0.9995 * x[1]), units[-1])
    return f"{number / size:.3g} {unit}".rstrip()


def bars(names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], label: str, ax: Any) -> Any:
    """Draw horizontal bars for each name in one or two series, the first name on top; return the axes."""
    if ax is None:
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            message = "plots need matplotlib; install it with: pip install 'plurax[plot]'"
            raise ModuleNotFoundError(message) from error
        size = 8, 1.2 + (0.19 + 0.13 * len(series)) * max(len(names), 2)
        # Do not use pyplot, which would keep the figure and choose a backend for the process.
        ax = Figure(figsize=size, layout="constrained").add_subplot()
    height = 0.8 / len(series)
    for i, (kind, values) in enumerate(series):
        places = [row + (i + 0.5) * height - 0.4 for row in range(len(names))]
        drawn = ax.barh(places, values, height, color=_COLORS[i], label=kind)
        ax.bar_label(drawn, [f"{value:.3g}" for value in values], padding=3, fontsize="small")
    if len(series) > 1:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    short = [name if len(name) <= _LONGEST else f"...{name[-_LONGEST + 3 :]}" for name in names]
    ax.set_yticks(range(len(names)), short, parse_math=False)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlim(left=0)
    ax.set_xlabel(label, parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def check_groups(api: str, by: Any, names: Sequence[Name]) -> tuple[Name, ...]:
    """Return the names to group rows by as a tuple, given one or several; raise if one is unknown."""
    groups = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, (tuple, list)) else ()
    if not groups or set(groups) - set(names):
        raise ValueError(f"{api}: by must be one or more of {', '.join(names)}, but got {describe(by)}.")
    return groups

"""Horizontal bars with names, for profiles and their differences; they need the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Two colours of Paul Tol's bright scheme, which colour-blind readers can tell apart.
_FIRST, _SECOND = "#4477aa", "#ee6677"
_LONGEST = 48  # letters of a name; the end of a longer one is shown, which is its operation


def bars(values: Sequence[tuple[str, float]], label: str, ax: Any) -> Any:
    """Draw one bar for each name, the first on top, and return the axes."""
    ax = _axes(ax, len(values), 0.32)
    drawn = ax.barh(range(len(values)), [value for _, value in values], color=_FIRST)
    ax.bar_label(drawn, [f"{value:.3g}" for _, value in values], padding=3, fontsize="small")
    return _named(ax, [name for name, _ in values], label)


def pairs_of_bars(values: Sequence[tuple[str, float, float]], names: tuple[str, str], label: str, ax: Any) -> Any:
    """Draw two bars for each name, of the control and of the test, the first on top, and return the axes."""
    ax = _axes(ax, len(values), 0.45)
    for i, (kind, name, color) in enumerate(zip(("control", "test"), names, (_FIRST, _SECOND), strict=True)):
        places = [row + (i - 0.5) * 0.4 for row in range(len(values))]
        drawn = ax.barh(places, [value[1 + i] for value in values], 0.4, color=color, label=f"{kind}: {name}")
        ax.bar_label(drawn, [f"{value[1 + i]:.3g}" for value in values], padding=3, fontsize="small")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    return _named(ax, [name for name, *_ in values], label)


def _axes(ax: Any, rows: int, height: float) -> Any:
    """Return `ax`, or new axes with this height for each row, in inches."""
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots of plurax.transforms.program need matplotlib; install it with: pip install 'plurax[plot]'"
        ) from error
    # Not by pyplot, which would keep the figure, and choose a backend for the process.
    return Figure(figsize=(8, 1.2 + height * max(rows, 2)), layout="constrained").add_subplot()


def _named(ax: Any, names: Sequence[str], label: str) -> Any:
    """Label the bars and the horizontal axis."""
    short = [name if len(name) <= _LONGEST else f"...{name[-_LONGEST + 3 :]}" for name in names]
    ax.set_yticks(range(len(names)), short, parse_math=False)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlim(left=0)
    ax.set_xlabel(label, parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax

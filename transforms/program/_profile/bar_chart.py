"""Horizontal bars with names, for profiles and their differences; they need the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Two colours of Paul Tol's bright scheme, which colour-blind readers can tell apart.
_COLORS = "#4477aa", "#ee6677"
_LONGEST = 48  # letters of a name; the end of a longer one is shown, which is its operation


def bars(names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], label: str, ax: Any) -> Any:
    """Draw a bar for each name and each of one or two series, the first name on top, and return the axes."""
    if ax is None:
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "plots of plurax.transforms.program need matplotlib; install it with: pip install 'plurax[plot]'"
            ) from error
        size = 8, 1.2 + (0.19 + 0.13 * len(series)) * max(len(names), 2)
        # Not by pyplot, which would keep the figure, and choose a backend for the process.
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

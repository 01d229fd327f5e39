"""Colorings: from the pattern of a matrix to a few products that determine all of its entries.

Columns that share no row can be summed: each entry of the product with their sum belongs to one of them. In reverse
mode the same holds for rows that share no column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .greedy import column_colors, star_colors
from .pattern import Pattern, pattern_at

# The cost of a product in reverse mode relative to one in forward mode: measurements gave 1 to 2.
_REVERSE = 1.5

# Iterations that look for fewer colors, and the number of entries from which on they would take too long.
_ROUNDS, _MANY = 4, 250_000


class Coloring(NamedTuple):
    """The products with sums of columns and of rows, and the position of each entry of a pattern in them.

    Attributes:
      columns: for each column the index of its product in forward mode; -1 for none.
      rows: for each row the index of its product in reverse mode; -1 for none.
      counts: the number of products in forward and in reverse mode.
      by_row: for each entry, whether it is read at its row, from a product with a sum of columns, or at its column,
        from a product with a sum of rows. For a symmetric matrix the same products serve for both.
      product: for each entry the index of this product.
    """

    columns: np.ndarray
    rows: np.ndarray
    counts: tuple[int, int]
    by_row: np.ndarray
    product: np.ndarray


def cost(forward: int, reverse: int) -> float:
    """Return the cost of some products in forward and in reverse mode, in units of a product in forward mode."""
    return forward + _REVERSE * reverse


def coloring_of(pattern: Pattern, modes: tuple[str, ...]) -> Coloring:
    """Return the cheapest coloring found, in the given modes ("forward", "reverse").

    With both modes, dense rows can be computed in reverse mode and the rest in forward mode, or dense columns in
    forward mode and the rest in reverse mode. So an arrowhead matrix of any size takes three products.
    """
    best: Coloring | None = None
    for least, forward in sorted(_splits(pattern, modes), key=lambda split: split[0]):
        if best is not None and least >= cost(*best.counts):  # sorted by this bound: no later split can be cheaper
            break
        tried = _of_split(pattern, forward)
        if best is None or cost(*tried.counts) < cost(*best.counts):
            best = tried
    assert best is not None
    return best if len(pattern.rows) > _MANY else _of_split(pattern, best.by_row, rounds=_ROUNDS)


def _of_split(pattern: Pattern, forward: np.ndarray, rounds: int = 0) -> Coloring:
    """Return the coloring with these entries in forward mode, and the others in reverse mode."""
    row, col, shape = pattern
    columns = column_colors(row[forward], col[forward], shape, rounds)
    rows = column_colors(col[~forward], row[~forward], shape[::-1], rounds)
    counts = int(columns.max(initial=-1)) + 1, int(rows.max(initial=-1)) + 1
    return Coloring(columns, rows, counts, forward, np.where(forward, columns[col], rows[row]))


def symmetric_coloring_of(pattern: Pattern, mode: str) -> Coloring:
    """Return the coloring of a symmetric matrix in one mode: each entry, or its mirror image, is read from a product.

    The mirror image of each entry counts as an entry too, whether or not it is in the pattern.
    """
    size = pattern.shape[0]
    both = np.concatenate([pattern.rows, pattern.cols]), np.concatenate([pattern.cols, pattern.rows])
    rows, cols, _ = pattern_at(*both, pattern.shape)
    colors = star_colors(rows, cols, size)
    needed, direct = _reads(rows, cols, colors)
    colors = np.where(needed[colors], np.cumsum(needed)[colors] - 1, -1)
    places = np.searchsorted(rows * size + cols, pattern.rows.astype(np.int64) * size + pattern.cols)
    by_row = direct[places]
    product = np.where(by_row, colors[pattern.cols], colors[pattern.rows])
    none, count = np.full(size, -1), int(needed.sum())
    if mode == "reverse":
        return Coloring(none, colors, (0, count), by_row, product)
    return Coloring(colors, none, (count, 0), by_row, product)


def _reads(rows: np.ndarray, cols: np.ndarray, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which colors are needed, and for each entry whether it is read in its own row, from its column's color.

    Entry (i, j) can be read there if no other entry of row i has the color of j. Otherwise its mirror image (j, i) can
    be read in row j, from the color of i: a star coloring guarantees that.
    """
    _, place, times = np.unique(
        rows * (colors.max(initial=0) + 1) + colors[cols], return_inverse=True, return_counts=True
    )
    direct = times[place] == 1
    mirrored = direct[np.lexsort((rows, cols))]  # sorted by columns, entries are their mirror images sorted by rows
    needed = np.zeros(colors.max(initial=-1) + 1, bool)
    needed[colors[cols[~mirrored]]] = True
    needed[colors[rows[~direct]]] = True
    # Entries that can be read from either of two colors, of which none is needed yet: the one with more of them.
    either = ~needed[colors[rows]] & ~needed[colors[cols]]
    a, b = colors[rows[either]], colors[cols[either]]
    reads = np.bincount(a, minlength=len(needed))
    needed[np.where((reads[a] > reads[b]) | ((reads[a] == reads[b]) & (a < b)), a, b)] = True
    return needed, direct & needed[colors[cols]]


def _splits(pattern: Pattern, modes: tuple[str, ...]) -> Iterator[tuple[float, np.ndarray]]:
    """Yield divisions of the entries between the modes: a lower bound of the cost, and a mask of the forward mode.

    Either each row or each column is in one mode as a whole. So no product adds entries of the other mode into a
    position that is read.
    """
    in_row = np.bincount(pattern.rows, minlength=pattern.shape[0])
    in_column = np.bincount(pattern.cols, minlength=pattern.shape[1])
    choices = [np.full(len(pattern.rows), mode == "forward") for mode in modes]
    if len(modes) > 1:
        choices += [in_row[pattern.rows] < bound for bound in _thresholds(in_row)]
        choices += [in_column[pattern.cols] >= bound for bound in _thresholds(in_column)]
    for forward in choices:
        # A product gives one entry of each row, so the fullest row (or column) needs a product for each of its entries.
        fullest = [np.bincount(x, minlength=1).max() for x in (pattern.rows[forward], pattern.cols[~forward])]
        yield cost(*fullest), forward


def _thresholds(entries: np.ndarray) -> list[int]:
    """Return powers of two that separate the rows with few entries from those with many, at least twice the median."""
    some = entries[entries > 0]
    bounds = 2 ** np.arange(1, int(some.max(initial=0)).bit_length())
    return bounds[bounds >= 2 * np.median(some)].tolist() if len(some) else []

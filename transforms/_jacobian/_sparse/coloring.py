"""Colorings: from the pattern of a matrix to a few products that determine all of its entries.

Columns that share no row can be summed: each entry of the product with their sum belongs to one of them. In reverse
mode the same holds for rows that share no column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .pattern import Pattern, asdex, pattern_at

# The cost of a product in reverse mode relative to one in forward mode: measurements gave 1 to 2.
_REVERSE = 1.5


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


def coloring_of(api: str, pattern: Pattern, modes: tuple[str, ...]) -> Coloring:
    """Return the cheapest coloring found, in the given modes ("forward", "reverse").

    With both modes, dense rows can be computed in reverse mode and the rest in forward mode, or dense columns in
    forward mode and the rest in reverse mode. So an arrowhead matrix of any size takes three products.
    """
    best: Coloring | None = None
    for least, forward in sorted(_splits(pattern, modes), key=lambda split: split[0]):
        if best is not None and least >= cost(*best.counts):  # sorted by this bound: no later split can be cheaper
            break
        columns, count = _colors(api, pattern.rows[forward], pattern.cols[forward], pattern.shape)
        rows, number = _colors(api, pattern.cols[~forward], pattern.rows[~forward], pattern.shape[::-1])
        if best is None or cost(count, number) < cost(*best.counts):
            product = np.where(forward, columns[pattern.cols], rows[pattern.rows])
            best = Coloring(columns, rows, (count, number), forward, product)
    assert best is not None
    return best


def symmetric_coloring_of(api: str, pattern: Pattern, mode: str) -> Coloring:
    """Return the coloring of a symmetric matrix in one mode: each entry, or its mirror image, is read from a product.

    The mirror image of each entry counts as an entry too, whether or not it is in the pattern.
    """
    size = pattern.shape[0]
    both = np.concatenate([pattern.rows, pattern.cols]), np.concatenate([pattern.cols, pattern.rows])
    mirrored = pattern_at(*both, pattern.shape)
    colors, count = np.zeros(size, np.int64), 0
    if len(mirrored.rows):
        found = asdex(api).color_symmetric(_for_asdex(api, *mirrored), postprocess=True)
        colors, count = np.asarray(found[0], np.int64), int(found[1])
    # Entry (i, j) is read in row i of the product of j's color if no other entry of row i has that color. Otherwise
    # (j, i) is read in row j of the product of i's color: a star coloring guarantees that this is possible.
    summed = colors[mirrored.cols] >= 0
    places = mirrored.rows * count + colors[mirrored.cols]
    alone = np.bincount(places[summed], minlength=size * count) == 1
    direct = colors[pattern.cols] >= 0
    direct[direct] = alone[(pattern.rows * count + colors[pattern.cols])[direct]]
    product = np.where(direct, colors[pattern.cols], colors[pattern.rows])
    none = np.full(size, -1)
    if mode == "reverse":
        return Coloring(none, colors, (0, count), direct, product)
    return Coloring(colors, none, (count, 0), direct, product)


def _splits(pattern: Pattern, modes: tuple[str, ...]) -> Iterator[tuple[float, np.ndarray]]:
    """Yield divisions of the entries between the modes: a lower bound of the cost, and a mask of the forward mode.

    Either each row or each column is in one mode as a whole. So no product adds entries of the other mode into a
    position that is read.
    """
    in_row = np.bincount(pattern.rows, minlength=pattern.shape[0])
    in_column = np.bincount(pattern.cols, minlength=pattern.shape[1])
    choices = [np.full(len(pattern.rows), mode == "forward") for mode in modes]
    if len(modes) > 1:
        # Rows (or columns) with few entries are separated from those with many, at thresholds of powers of two.
        most = max(in_row.max(initial=0), in_column.max(initial=0))
        bounds = 2 ** np.arange(1, int(most).bit_length())
        choices += [in_row[pattern.rows] < bound for bound in bounds]
        choices += [in_column[pattern.cols] >= bound for bound in bounds]
    for forward in choices:
        # A product gives one entry of each row, so the fullest row (or column) needs a product for each of its entries.
        fullest = [np.bincount(x, minlength=1).max() for x in (pattern.rows[forward], pattern.cols[~forward])]
        yield cost(*fullest), forward


def _colors(api: str, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return for each column a color (-1 if it is empty) unique in each of its rows, and the number of colors."""
    colors = np.full(shape[1], -1, np.int64)
    used = np.flatnonzero(np.bincount(cols, minlength=shape[1]))
    if len(used) and np.bincount(rows).max() == len(used):  # a full row: every column conflicts with every other
        colors[used] = np.arange(len(used))
    elif len(used):
        colors[used] = np.asarray(asdex(api).color_cols(_for_asdex(api, rows, cols, shape))[0])[used]
    return colors, int(colors.max(initial=-1)) + 1


def _for_asdex(api: str, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> Any:
    """Return the pattern as asdex represents it, with entries in row-major order."""
    order = np.lexsort((cols, rows))
    return asdex(api).SparsityPattern.from_coo(rows[order].astype(np.int32), cols[order].astype(np.int32), shape)

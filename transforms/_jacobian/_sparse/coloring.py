"""From the pattern of a matrix to the few products with it that give all of its entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .pattern import Pattern, asdex, pattern_at

# What a product in reverse mode costs, in products in forward mode: measured between 1 and 2.
_REVERSE = 1.5
# So many numbers of entries are tried as the bound between the two modes, by rows and by columns.
_BOUNDS = 8


class Coloring(NamedTuple):
    """Which columns and rows are summed in which products, and where in these the entries of a pattern are.

    Attributes:
      columns: for each column the product in forward mode that it is part of; -1 for none.
      rows: for each row the product in reverse mode that it is part of; -1 for none.
      counts: how many products there are in forward and in reverse mode.
      forward: for each entry whether it is read from a product in forward mode, else from one in reverse mode.
      product: for each entry the number of this product.
      place: for each entry its place in this product.
    """

    columns: np.ndarray
    rows: np.ndarray
    counts: tuple[int, int]
    forward: np.ndarray
    product: np.ndarray
    place: np.ndarray

    @property
    def cost(self) -> float:
        """How much work the products are, in products in forward mode."""
        return cost(*self.counts)


def cost(forward: int, reverse: int) -> float:
    """How much work some products in forward and in reverse mode are, in products in forward mode."""
    return forward + _REVERSE * reverse


def coloring_of(api: str, pattern: Pattern, modes: tuple[str, ...]) -> Coloring:
    """The cheapest products that are found, in these modes: "forward", "reverse".

    With both modes, rows of many entries may be had in reverse mode and what is left in forward mode, or columns of
    many entries in forward mode and what is left in reverse mode: an arrow of any size takes three products.
    """
    best: Coloring | None = None
    for least, forward in sorted(_splits(pattern, modes), key=lambda split: split[0]):
        if best is not None and least >= best.cost:
            break
        columns, count = _colors(api, pattern.rows[forward], pattern.cols[forward], pattern.shape)
        rows, number = _colors(api, pattern.cols[~forward], pattern.rows[~forward], pattern.shape[::-1])
        if best is None or cost(count, number) < best.cost:
            product = np.where(forward, columns[pattern.cols], rows[pattern.rows])
            place = np.where(forward, pattern.rows, pattern.cols)
            best = Coloring(columns, rows, (count, number), forward, product, place)
    assert best is not None
    return best


def symmetric_coloring_of(api: str, pattern: Pattern, mode: str) -> Coloring:
    """Products in one mode with a symmetric matrix, of which each entry may be read, or its mirror image.

    The mirror images of all entries are taken for entries too, whether they are in the pattern or not.
    """
    size = pattern.shape[0]
    both = np.concatenate([pattern.rows, pattern.cols]), np.concatenate([pattern.cols, pattern.rows])
    whole = pattern_at(*both, pattern.shape)
    colors, count = np.zeros(size, np.int64), 0
    if len(whole.rows):
        found = asdex(api).color_symmetric(_for_asdex(api, *whole), postprocess=True)
        colors, count = np.asarray(found[0], np.int64), int(found[1])
    # How many entries of a row are summed into a place of a product: only one alone can be read there.
    summed = colors[whole.cols] >= 0
    places = whole.rows * count + colors[whole.cols]
    alone = np.bincount(places[summed], minlength=size * count) == 1
    direct = colors[pattern.cols] >= 0
    direct[direct] = alone[(pattern.rows * count + colors[pattern.cols])[direct]]
    product = np.where(direct, colors[pattern.cols], colors[pattern.rows])
    place = np.where(direct, pattern.rows, pattern.cols)
    none, every = np.full(size, -1), np.full(len(place), True)
    if mode == "reverse":
        return Coloring(none, colors, (0, count), ~every, product, place)
    return Coloring(colors, none, (count, 0), every, product, place)


def _splits(pattern: Pattern, modes: tuple[str, ...]) -> Iterator[tuple[float, np.ndarray]]:
    """Which entries to have in forward mode, and the least that it can cost.

    All entries of a row are had in one mode, or all entries of a column: so no product sums entries of the other mode
    into a place that is read.
    """
    in_row = np.bincount(pattern.rows, minlength=pattern.shape[0])
    in_column = np.bincount(pattern.cols, minlength=pattern.shape[1])
    choices = [np.full(len(pattern.rows), mode == "forward") for mode in modes]
    if len(modes) > 1:
        choices += [in_row[pattern.rows] < bound for bound in _bounds(in_row)]
        choices += [in_column[pattern.cols] >= bound for bound in _bounds(in_column)]
    for forward in choices:
        # A place of a product tells one entry: there are as many products as entries in the fullest row, or column.
        fullest = [np.bincount(x, minlength=1).max() for x in (pattern.rows[forward], pattern.cols[~forward])]
        yield cost(*fullest), forward


def _bounds(entries: np.ndarray) -> np.ndarray:
    """Numbers of entries that part rows, or columns, in two."""
    levels = np.flatnonzero(np.bincount(entries, minlength=1))[1:]
    return levels[np.unique(np.linspace(0, len(levels) - 1, _BOUNDS).astype(int))] if len(levels) else levels


def _colors(api: str, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, int]:
    """For each column of a pattern a colour that no other one of the same row has, -1 for empty ones; how many."""
    colors = np.full(shape[1], -1, np.int64)
    used = np.flatnonzero(np.bincount(cols, minlength=shape[1]))
    if len(used) and np.bincount(rows).max() == len(used):  # a full row: every column conflicts with every other
        colors[used] = np.arange(len(used))
    elif len(used):
        colors[used] = np.asarray(asdex(api).color_cols(_for_asdex(api, rows, cols, shape))[0])[used]
    return colors, int(colors.max(initial=-1)) + 1


def _for_asdex(api: str, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> Any:
    order = np.lexsort((cols, rows))
    return asdex(api).SparsityPattern.from_coo(rows[order].astype(np.int32), cols[order].astype(np.int32), shape)

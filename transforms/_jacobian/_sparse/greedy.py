"""Greedy colorings of the columns of a sparse matrix, one column after another.

A set of colors is an integer with a bit for each color, so the union of the colors around a column takes one operation
for each of its entries, and the first free color is the lowest zero bit. Cost: time and memory in proportion to the
entries, with a word for each 64 colors.

Sources: Curtis, Powell and Reid, "On the estimation of sparse Jacobian matrices" (1974), and Coleman and Moré,
"Estimation of sparse Jacobian matrices and graph coloring problems" (1983), for groups of columns; Gebremedhin, Manne
and Pothen, "What color is your Jacobian?" (2005), for the graphs and orders, and with Tarafdar, "New acyclic and star
coloring algorithms" (2007), for symmetric matrices; Culberson, "Iterated greedy graph coloring" (1992).
"""

from __future__ import annotations

import numpy as np

# Colors are assigned some at a time, so that a row with very many entries does not make the sets of all rows long:
# the sets of one pass together have at most so many bits, but at least 1,024 each.
_BITS = 2**31


def column_colors(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int], rounds: int = 0) -> np.ndarray:
    """Return a color for each column such that no two columns of one color have an entry in the same row.

    Columns with many neighbors come first. If there are iterations, the order of the columns is tried too, and each
    iteration colors all columns of one color after those of another: never with more colors, often with fewer.

    Args:
      rows: the row of each entry.
      cols: the column of each entry; no entry is repeated.
      shape: the numbers of rows and columns.
      rounds: the maximal number of iterations; they end when the colors are as few as the entries of the fullest row.

    Returns:
      Integers, shape (columns,), with each value from 0 to the largest; -1 for columns without entries.
    """
    in_row = np.bincount(rows, minlength=shape[0])
    fewest = in_row.max(initial=0)
    used = np.flatnonzero(np.bincount(cols, minlength=shape[1]))
    colors = np.full(shape[1], -1, np.int64)
    if fewest == len(used):  # a full row, or no entry at all: all columns differ
        colors[used] = np.arange(len(used))
        return colors
    starts, entries = _lists(cols, rows, shape[1])
    neighbors = np.bincount(cols, weights=in_row[rows], minlength=shape[1])  # with repetitions
    order = used[np.argsort(-neighbors[used], kind="stable")]
    for k in range(1 + rounds):
        tried = np.array(_first_fit(order.tolist(), starts, entries, shape[0]))
        if k == 0 or tried.max() < colors.max() or k > 1:
            colors = tried
        if colors.max() < fewest:
            break
        sizes = np.bincount(colors[used])
        first = (-np.arange(len(sizes)), -sizes)[k % 2]  # the latest colors, or the largest groups
        order = used[np.lexsort((colors[used], first[colors[used]]))] if k else used
    return colors


def star_colors(rows: np.ndarray, cols: np.ndarray, size: int) -> np.ndarray:
    """Return a star coloring of the graph of a symmetric matrix, the fullest rows first.

    Neighbors differ, and each path of four vertices has at least three colors. Then each edge between two colors
    belongs to a star, and its entry can be read in the row of the star's leaf (Gebremedhin et al.).

    Args:
      rows: the row of each entry; with each entry also its mirror image is an entry.
      cols: the column of each entry; no entry is repeated.
      size: the number of rows and of columns.

    Returns:
      Integers, shape (size,), with each value from 0 to the largest.
    """
    edges = rows != cols
    starts, neighbors = _lists(rows[edges], cols[edges], size)
    order = np.argsort(-np.diff(starts), kind="stable")
    return np.array(_star(order.tolist(), starts, neighbors), np.int64)


def _lists(major: np.ndarray, minor: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """Return where the entries of each major index start, and the minor indices of all entries."""
    order = np.lexsort((minor, major))
    return np.cumsum([0, *np.bincount(major, minlength=size)]).tolist(), minor[order].tolist()


def _first_fit(order: list[int], starts: list[int], rows: list[int], number: int) -> list[int]:
    """Return for each column the first color that no column before it in the order, with a common row, has."""
    colors = [-1] * (len(starts) - 1)
    width = max(1024, _BITS // max(1, number))
    limit, base = 1 << width, 0
    while order:
        taken = [0] * number  # by row: which of the colors from `base` on its columns have
        later = []
        for column in order:
            own = rows[starts[column] : starts[column + 1]]
            around = 0
            for row in own:
                around |= taken[row]
            free = ~around & (around + 1)
            if free >= limit:
                later.append(column)
                continue
            colors[column] = base + free.bit_length() - 1
            for row in own:
                taken[row] |= free
        order, base = later, base + width
    return colors


def _star(order: list[int], starts: list[int], neighbors: list[int]) -> list[int]:
    """Return for each vertex the first color with which no path of four vertices has only two colors.

    With v the vertex to be colored, such a path is either v - w - x - y, where w and y have one color and v would get
    that of x; or x - w - v - y, where again w and y have one color and v would get that of x.
    """
    size = len(starts) - 1
    color = [0] * size  # a set of one color; empty for vertices that have none yet
    around = [0] * size  # the colors of a vertex's neighbors
    # The colors of those neighbors of a vertex w that have a further neighbor of w's color: x on the first path.
    hubs = [0] * size
    # For each vertex and each color: its neighbor of that color, or -1 if there are several.
    only: list[dict[int, int]] = [{} for _ in range(size)]
    for v in order:
        own = neighbors[starts[v] : starts[v + 1]]
        colored = [w for w in own if color[w]]
        once = twice = taken = 0
        of = only[v]
        for w in colored:
            c = color[w]
            if once & c:
                twice |= c
                of[c] = -1
            else:
                once |= c
                of[c] = w
            taken |= hubs[w]
        taken |= once
        if twice:
            for w in colored:
                if twice & color[w]:
                    taken |= around[w]
        new = color[v] = ~taken & (taken + 1)
        for w in own:
            around[w] |= new
        for w in colored:
            c = color[w]
            if twice & c:
                hubs[w] |= new
            other = only[w].get(new)
            if other is None:
                only[w][new] = v
                continue
            hubs[v] |= c
            if other >= 0:
                hubs[other] |= c
                only[w][new] = -1
    return [c.bit_length() - 1 for c in color]

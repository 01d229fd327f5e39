"""Index sets: for each number of an array, the numbers asked about (the inputs) that it depends on.

The sets of an array are the rows of a sparse matrix of booleans: entry (i, k) says that its number i, counted in C
order, depends on input k. An operation that moves or adds numbers is a product with another such matrix. A value that
depends on no input is known (an array), computed on demand (`Lazy`), partly known, or `UNKNOWN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from ..._core.compat import Tracer
from ..._core.jaxpr import aval
from ..._core.prng import is_key

# A value that depends on no input, and is not known.
UNKNOWN = object()


def is_set(value: Any) -> bool:
    """Return whether a value depends on some input."""
    return getattr(value, "format", None) == "csr"


def unit_sets(sizes: Sequence[int]) -> tuple[list[Any], int]:
    """Return for arrays of these sizes sets in which each number depends on itself alone, and the number of columns."""
    ends = np.cumsum([0, *sizes])
    columns = int(ends[-1])
    return [
        matrix_at(np.arange(size), end + np.arange(size), (size, columns))
        for size, end in zip(sizes, ends, strict=False)
    ], columns


class Lazy:
    """A value that depends on constants only, computed once, when a rule asks for it."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.value = cache(compute)


class PartlyKnown(NamedTuple):
    """An array of which only some numbers are known, such as indices of which only the column is.

    Attributes:
      numbers: the array, with any value where a number is not known.
      sure: whether each of its numbers is known.
    """

    numbers: np.ndarray
    sure: np.ndarray


def known(value: Any) -> np.ndarray | None:
    """Return a value as an array, or None if some of it is not known."""
    value = value.value() if isinstance(value, Lazy) else value
    if value is UNKNOWN or is_set(value) or isinstance(value, (Tracer, PartlyKnown)) or is_key(value):
        return None
    return np.asarray(value)


def partly_known(value: Any, x: Any) -> PartlyKnown:
    """Return what is known of a value with the shape and dtype of `x`."""
    value = value.value() if isinstance(value, Lazy) else value
    if isinstance(value, PartlyKnown):
        return value
    found, shape = known(value), aval(x).shape
    return PartlyKnown(np.zeros(shape, aval(x).dtype) if found is None else found, np.full(shape, found is not None))


def places_of(x: Any) -> np.ndarray:
    """Return the flat index of each number of an array, in the array's shape."""
    return np.arange(math.prod(aval(x).shape)).reshape(aval(x).shape)


def matrix_at(rows: Any, cols: Any, shape: tuple[int, int]) -> Any:
    """Return the sparse matrix of booleans with entries at these rows and columns."""
    from scipy.sparse import csr_array

    rows, cols = np.ravel(rows), np.ravel(cols)
    return csr_array((np.ones(len(rows), bool), (rows, cols)), shape=shape)


def stacked(parts: Sequence[Any]) -> Any:
    """Return the sets of several arrays, concatenated."""
    from scipy.sparse import vstack

    return vstack(parts, format="csr")


def take(sets: Any, places: np.ndarray) -> Any:
    """Return the sets at these flat indices, empty ones where an index is negative."""
    places = places.ravel()
    found = np.flatnonzero(places >= 0)
    if len(found) == len(places):  # indexing is quicker than the product below, which can leave rows empty
        return sets[places]
    return matrix_at(found, places[found], (len(places), sets.shape[0])) @ sets


def part_of(value: Any, places: np.ndarray) -> Any:
    """Return the sets at these flat indices, or the known value there, in the shape of `places`."""
    if is_set(value):
        return value[places.ravel()]

    def compute() -> Any:
        found = known(value)
        return UNKNOWN if found is None else found.ravel()[places]

    return UNKNOWN if value is UNKNOWN else Lazy(compute)


def united(sets: Sequence[Any]) -> Any:
    """Return the union of the sets of arrays of one size; `UNKNOWN` if none of them is a set."""
    found = [x for x in sets if is_set(x)]
    return sum(found[1:], start=found[0]) if found else UNKNOWN  # a sum of booleans is their logical or


def grouped(sets: Any, groups: np.ndarray, size: int) -> Any:
    """Return the union of the sets of each of `size` groups; `groups` is the group of each number."""
    return matrix_at(groups, np.arange(groups.size), (size, groups.size)) @ sets


def cells_of(shape: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """Return for each number of an array its flat index along these axes alone, counted in their order."""
    # Numbered over `axes` in their order, then transposed to the array's order, and broadcast along all other axes.
    sizes = [shape[i] for i in axes]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose(np.argsort(axes))
    return np.broadcast_to(places.reshape([n if i in axes else 1 for i, n in enumerate(shape)]), shape)


def mixed(eqn: JaxprEqn, values: list[Any], operands: Sequence[Any], results: Sequence[Sequence[int]]) -> list[Any]:
    """Return results each of which depends on all operands at its index along some axes, along which nothing mixes.

    Args:
      eqn: the operation.
      values: its operands, some of them sets.
      operands: for each operand these axes; None for one of which every result depends on all numbers.
      results: for each result these axes, in the same order.
    """
    # The union of the operands' sets in each cell of these axes, then spread over all numbers of that cell.
    sizes = [aval(eqn.outvars[0]).shape[i] for i in results[0]]
    count, found = math.prod(sizes), []
    for x, value, axes in zip(eqn.invars, values, operands, strict=True):
        if not is_set(value):
            continue
        if axes is None:
            found.append(grouped(value, np.zeros(value.shape[0], int), 1)[np.zeros(count, int)])
        else:
            found.append(grouped(value, cells_of(aval(x).shape, axes).ravel(), count))
    if not found:
        return [UNKNOWN] * len(eqn.outvars)
    sums = united(found)
    return [sums[cells_of(aval(x).shape, axes).ravel()] for x, axes in zip(eqn.outvars, results, strict=True)]


def rows_of(x: Any, value: Any, columns: int) -> Any:
    """Return the sets of a value, empty ones if it has none."""
    return value if is_set(value) else matrix_at([], [], (math.prod(aval(x).shape), columns))

"""Index sets: for each element of an array, the input elements that it depends on.

The sets of an array are the rows of a sparse boolean matrix: entry (i, k) means that element i, in C order, depends on
input k. An operation that moves or adds elements is a product with another such matrix. A value that depends on no
input is known (an array), computed on demand (`Lazy`), partly known, or `UNKNOWN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..._core.compat import JaxprEqn, Tracer
from ..._core.jaxpr import aval
from ..._core.prng import is_key

# A value that does not depend on any input, but is not known either.
UNKNOWN = object()


def is_set(value: Any) -> bool:
    """Return whether a value depends on some input."""
    return getattr(value, "format", None) == "csr"


def unit_sets(sizes: Sequence[int]) -> tuple[list[Any], int]:
    """Return sets for arrays of these sizes in which each element depends only on itself, and the number of columns."""
    ends = np.cumsum([0, *sizes])
    columns = int(ends[-1])
    return [
        matrix_at(np.arange(size), end + np.arange(size), (size, columns))
        for size, end in zip(sizes, ends, strict=False)
    ], columns


class Lazy:
    """A value that depends on constants only, computed once, when a rule first needs it."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.value = cache(compute)


class PartlyKnown(NamedTuple):
    """An array with some elements known and others unknown, such as indices with a known column but unknown row.

    Attributes:
      numbers: the array, with arbitrary values for unknown elements.
      sure: for each element, whether it is known.
    """

    numbers: np.ndarray
    sure: np.ndarray


def known(value: Any) -> np.ndarray | None:
    """Return a value as an array, or None if any element is unknown."""
    value = value.value() if isinstance(value, Lazy) else value
    if value is UNKNOWN or is_set(value) or isinstance(value, (Tracer, PartlyKnown)) or is_key(value):
        return None
    return np.asarray(value)


def partly_known(value: Any, x: Any) -> PartlyKnown:
    """Return a value as `PartlyKnown`, with the shape and dtype of the variable `x`."""
    value = value.value() if isinstance(value, Lazy) else value
    if isinstance(value, PartlyKnown):
        return value
    found, shape = known(value), aval(x).shape
    return PartlyKnown(np.zeros(shape, aval(x).dtype) if found is None else found, np.full(shape, found is not None))


def places_of(x: Any) -> np.ndarray:
    """Return the flat index of each element of an array, in the array's shape."""
    return np.arange(math.prod(aval(x).shape)).reshape(aval(x).shape)


def matrix_at(rows: Any, cols: Any, shape: tuple[int, int]) -> Any:
    """Return the sparse boolean matrix with entries at these rows and columns."""
    from scipy.sparse import csr_array

    rows, cols = np.ravel(rows), np.ravel(cols)
    return csr_array((np.ones(len(rows), bool), (rows, cols)), shape=shape)


def stacked(parts: Sequence[Any]) -> Any:
    """Return the sets of several arrays, concatenated."""
    from scipy.sparse import vstack

    return vstack(parts, format="csr")


def take(sets: Any, places: np.ndarray) -> Any:
    """Return the sets at these flat indices; negative indices give empty sets."""
    places = places.ravel()
    found = np.flatnonzero(places >= 0)
    if len(found) == len(places):  # indexing is faster than the product below, which can leave rows empty
        return sets[places]
    return matrix_at(found, places[found], (len(places), sets.shape[0])) @ sets


def part_of(value: Any, places: np.ndarray) -> Any:
    """Return the sets at these flat indices, or the known values there in the shape of `places`."""
    if is_set(value):
        return value[places.ravel()]

    def compute() -> Any:
        found = known(value)
        return UNKNOWN if found is None else found.ravel()[places]

    return UNKNOWN if value is UNKNOWN else Lazy(compute)


def united(sets: Sequence[Any]) -> Any:
    """Return the elementwise union of the sets of arrays of one size; `UNKNOWN` if none of the values is a set."""
    found = [x for x in sets if is_set(x)]
    return sum(found[1:], start=found[0]) if found else UNKNOWN  # a sum of booleans is their logical or


def grouped(sets: Any, groups: np.ndarray, size: int) -> Any:
    """Return the union of the sets in each of `size` groups; `groups` has the group of each element."""
    return matrix_at(groups, np.arange(groups.size), (size, groups.size)) @ sets


def cells_of(shape: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """Return for each element of an array its flat index along these axes only, in the order of `axes`."""
    # Numbered over `axes` in their order, then transposed to the array's order, and broadcast along all other axes.
    sizes = [shape[i] for i in axes]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose(np.argsort(axes))
    return np.broadcast_to(places.reshape([n if i in axes else 1 for i, n in enumerate(shape)]), shape)


def mixed(eqn: JaxprEqn, values: list[Any], operands: Sequence[Any], results: Sequence[Sequence[int]]) -> list[Any]:
    """Return the sets of an operation that mixes all axes except batch axes, along which indices correspond.

    Args:
      eqn: the operation.
      values: the operands, some of them sets.
      operands: for each operand its batch axes; None for an operand without any, which every result depends on.
      results: for each result its batch axes, in the same order.
    """
    # The union of the operands' sets in each cell (an index along the batch axes), for all elements of that cell.
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
    """Return the sets of a value, which are empty sets if it does not depend on any input."""
    return value if is_set(value) else matrix_at([], [], (math.prod(aval(x).shape), columns))

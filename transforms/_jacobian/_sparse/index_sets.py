"""Sets: for each number of an array, on which of the numbers that are asked about it depends.

The sets of an array are the rows of a sparse matrix of booleans, and an operation that moves or adds numbers is a
product with such a matrix. What depends on nothing that is asked about is known, or computed later, or not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from ..._core.compat import Tracer
from ..._core.jaxpr import aval, holds_refs
from ..._core.prng import is_key

# A value that does not depend on what is asked about, and is not known.
UNKNOWN = object()
# Above so many pairs each number of a sum is taken to depend on all along the axes that are summed over, zeros too.
PAIRS = 2**23


def is_set(value: Any) -> bool:
    """Whether a value depends on what is asked about."""
    return getattr(value, "format", None) == "csr"


def unit_sets(sizes: Sequence[int]) -> tuple[list[Any], int]:
    """For arrays of these sizes sets with one column for each number, and how many columns there are."""
    ends = np.cumsum([0, *sizes])
    columns = int(ends[-1])
    return [
        matrix_at(np.arange(size), end + np.arange(size), (size, columns))
        for size, end in zip(sizes, ends, strict=False)
    ], columns


class Later:
    """A value that depends on constants only, computed when it is asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.value = cache(compute)


class Partly(NamedTuple):
    """An array of which only some numbers are known, such as indices of which only the column is.

    Attributes:
      numbers: the array, with anything in place of what is not known.
      sure: which of its numbers are known.
    """

    numbers: np.ndarray
    sure: np.ndarray


def known(value: Any) -> np.ndarray | None:
    """Return a value as an array, None if some of it is not known."""
    if isinstance(value, Later):
        value = value.value()
    if value is UNKNOWN or is_set(value) or isinstance(value, (Tracer, Partly)):
        return None
    if is_key(value):
        return None
    return np.asarray(value)


def partly_known(value: Any, x: Any) -> Partly:
    """Return what is known of a value of this shape and dtype."""
    if isinstance(value, Later):
        value = value.value()
    if isinstance(value, Partly):
        return value
    found, shape = known(value), aval(x).shape
    if found is None:
        return Partly(np.zeros(shape, aval(x).dtype), np.zeros(shape, bool))
    return Partly(found, np.ones(shape, bool))


def places_of(x: Any) -> np.ndarray:
    """The places of an array's numbers, in its shape."""
    return np.arange(math.prod(aval(x).shape)).reshape(aval(x).shape)


def matrix_at(rows: Any, cols: Any, shape: tuple[int, int]) -> Any:
    from scipy.sparse import csr_array

    rows, cols = np.ravel(rows), np.ravel(cols)
    return csr_array((np.ones(len(rows), bool), (rows, cols)), shape=shape)


def stacked(parts: Sequence[Any]) -> Any:
    """The sets of several arrays, one behind another."""
    from scipy.sparse import vstack

    return vstack(parts, format="csr")


def picked(sets: Any, places: np.ndarray) -> Any:
    """The sets at these places, none where a place is below 0."""
    places = places.ravel()
    found = np.flatnonzero(places >= 0)
    if len(found) == len(places):
        return sets[places]
    return matrix_at(found, places[found], (len(places), sets.shape[0])) @ sets


def united(sets: Sequence[Any]) -> Any:
    """The union of sets of arrays of one size; `UNKNOWN` for none."""
    found = [x for x in sets if is_set(x)]
    return sum(found[1:], start=found[0]) if found else UNKNOWN


def grouped(sets: Any, groups: np.ndarray, size: int) -> Any:
    """The union of the sets of each group."""
    return matrix_at(groups, np.arange(groups.size), (size, groups.size)) @ sets


def cells_of(shape: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """Return for each number of an array of this shape its place along these axes alone, counted in their order."""
    sizes = [shape[i] for i in axes]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose(np.argsort(axes))
    return np.broadcast_to(places.reshape([n if i in axes else 1 for i, n in enumerate(shape)]), shape)


def mixed(eqn: JaxprEqn, values: list[Any], operands: Sequence[Any], results: Sequence[Sequence[int]]) -> list[Any]:
    """Let each number depend on all that goes in at its place along some axes, along which nothing mixes.

    Args:
      eqn: the operation.
      values: its operands, some of them sets.
      operands: for each operand these axes; None for one all of whose numbers go to every place.
      results: for each result these axes, in the same order.
    """
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
    """The sets of a value, empty ones if it has none."""
    return value if is_set(value) else matrix_at([], [], (math.prod(aval(x).shape), columns))


def refuse_refs(eqn: JaxprEqn) -> None:
    """Refuse an operation with a `jax.Ref`: no variable of the program leads from what is written to what is read."""
    if holds_refs(eqn):
        raise NotImplementedError(f"`{eqn.primitive.name}` may write what is asked about to a `jax.Ref`")

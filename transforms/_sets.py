"""Sets: for each number of an array, on which of the numbers that are asked about it depends.

The sets of an array are the rows of a sparse matrix of booleans, and an operation that moves or adds numbers is a
product with such a matrix. What depends on nothing that is asked about is known, or computed later, or not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ._compat import Tracer
from ._jaxpr import aval
from ._keys import is_key

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


def known(value: Any) -> np.ndarray | None:
    """A value as an array, None if it is not known."""
    if isinstance(value, Later):
        value = value.value()
    if value is UNKNOWN or is_set(value) or isinstance(value, Tracer):
        return None
    if is_key(value):
        return None
    return np.asarray(value)


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


def everything(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Each number depends on all that goes in."""
    found = [value for value in values if is_set(value)]
    columns = np.unique(np.concatenate([value.indices for value in found]))
    whole = matrix_at(np.zeros(len(columns), int), columns, (1, found[0].shape[1]))
    return [whole[np.zeros(math.prod(aval(x).shape), int)] for x in eqn.outvars]


def grouped(sets: Any, groups: np.ndarray, size: int) -> Any:
    """The union of the sets of each group."""
    return matrix_at(groups, np.arange(groups.size), (size, groups.size)) @ sets


def rows_of(x: Any, value: Any, columns: int) -> Any:
    """The sets of a value, empty ones if it has none."""
    return value if is_set(value) else matrix_at([], [], (math.prod(aval(x).shape), columns))

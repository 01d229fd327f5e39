"""Take, replace or select rows of arrays with one row per member, on one device or on several."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...transforms._core.arguments import describe
from ...transforms._core.compat import Tracer
from .sharding import ENSEMBLE, Layout, constrain, move, within


def member_index(api: str, i: Any, size: int) -> int:
    """Return the index of a member, with negative ones counted from the end; raise if it is out of range."""
    if isinstance(i, (bool, np.bool_)) or not hasattr(type(i), "__index__"):
        raise TypeError(f"{api}: the index of a member must be an int, but got {describe(i)}.")
    if not -size <= operator.index(i) < size:
        raise IndexError(f"{api}: member {i} is out of range for an ensemble of {size}.")
    return operator.index(i) % size


def select_rows(api: str, rows: Any, indices: Any, size: int) -> Any:
    """Return the rows of some of `size` members, distributed as `rows` is; raise for invalid indices.

    Args:
      api: the function that the user called, for errors.
      rows: arrays with one row per member.
      indices: integers (count,), with negative ones counted from the end, or a mask (size,).
      size: the number of members.
    """
    # NumPy would convert the booleans of a mixed list to the indices 0 and 1.
    if isinstance(indices, (list, tuple)) and 0 < sum(map(_is_bool, indices)) < len(indices):
        raise TypeError(f"{api}: indices must be all integers or all booleans, but got {describe(indices)}.")
    indices = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if not indices.size:
        raise ValueError(f"{api}: indices are empty; select at least one member.")
    is_mask = indices.dtype == bool
    if not is_mask and not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"{api}: indices must be integers or a mask of booleans, but got {describe(indices)}.")
    if indices.ndim != 1:
        raise ValueError(f"{api}: indices must have shape (count,), but got {indices.shape}.")
    if is_mask and len(indices) != size:
        raise IndexError(f"{api}: a mask needs one entry for each of the {size} members, but it has {len(indices)}.")
    if isinstance(indices, Tracer):
        if is_mask:
            raise TypeError(
                f"{api}: a traced mask selects an unknown number of members; pass indices of a fixed count."
            )
        # Traced indices are part of the user's own program, which decides on the placement of its results.
        return jax.tree.map(lambda x: x[indices], rows)
    if is_mask:
        indices = np.flatnonzero(indices)
        if not indices.size:
            raise ValueError(f"{api}: the mask selects none of the {size} members; select at least one.")
    # `tolist` gives Python integers, which do not overflow.
    places = np.array([member_index(api, i, size) for i in np.asarray(indices).tolist()])
    with within(Layout.home(rows)):
        return take(rows, places)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or getattr(x, "dtype", None) == "bool"


def by_row(values: jax.Array, x: jax.Array) -> jax.Array:
    """Return one value for each row, reshaped to the number of axes of `x`, so that it broadcasts against `x`."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


def take(rows: Any, places: np.ndarray) -> Any:
    """Return the rows of some members, in the given order, distributed as `rows` is."""
    return _take(rows, places, Layout.around(rows))


def put(rows: Any, places: np.ndarray, new: Any) -> Any:
    """Return `rows` with the rows of some members replaced."""
    return _put(rows, places, new, Layout.around(rows))


def match_sharding(rows: Any, others: Any) -> Any:
    """Return the rows on the devices of `others`, a tree of the same structure."""
    layout = Layout.around(others) or Layout.home(others)
    if layout is None or ENSEMBLE not in layout.mesh.axis_names:
        return jax.tree.map(lambda x, y: move(x, _placing(len(x), y)), rows, others)
    return layout.place(rows)


def _placing(size: int, like: jax.Array) -> Any:
    """Return where to place `size` rows, given an array of any number of rows that the user has placed."""
    sharding = like.sharding
    if size == len(like) or not isinstance(sharding, NamedSharding):
        return sharding
    # The number need not be a multiple of that of the devices.
    return NamedSharding(sharding.mesh, P(None, *sharding.spec[1:]), memory_kind=sharding.memory_kind)


@jax.jit
def copied_rows(rows: Any) -> Any:
    """Return copies of arrays, by one program: an operation for each would compile for every shape."""
    return jax.tree.map(jnp.copy, rows)


@jax.jit
def where_rows(mask: jax.Array, new: Any, old: Any) -> Any:
    """Return the new rows where the mask is true, and the old ones elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(by_row(mask, x), x, y), new, old)


@partial(jax.jit, static_argnums=2)
def _take(rows: Any, places: jax.Array, layout: Layout | None) -> Any:
    # Constrained inside the program, since otherwise the compiler may replicate the result on every device.
    return constrain(jax.tree.map(lambda x: x[places], rows), layout)


@partial(jax.jit, static_argnums=3)
def _put(rows: Any, places: jax.Array, new: Any, layout: Layout | None) -> Any:
    return constrain(jax.tree.map(lambda x, y: x.at[places].set(y), rows, new), layout)

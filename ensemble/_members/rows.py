"""Take, replace or select rows of arrays with one row per member, on one device or on several."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...transforms._core.arguments import describe
from .sharding import Layout, constrain, move


def member_index(api: str, i: Any, size: int) -> int:
    """Return the index of a member, with negative ones counted from the end; raise if it is out of range."""
    if isinstance(i, bool) or not hasattr(type(i), "__index__"):
        raise TypeError(f"{api}: the index of a member must be an int, but got {describe(i)}.")
    if not -size <= operator.index(i) < size:
        raise IndexError(f"{api}: member {i} is out of range for an ensemble of {size}.")
    return operator.index(i) % size


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
    """Return the rows on the devices of `others`."""
    layout = Layout.around(others)
    return move(rows, jax.tree.leaves(others)[0].sharding) if layout is None else layout.place(rows)


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

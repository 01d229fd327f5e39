"""Arrays with a row for each member, wherever they are held: those of some are taken, put back, cut, chosen.

On a mesh there may be more rows than members: the last one again and again, so that all devices have as many.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .sharding import Layout


def by_row(values: jax.Array, x: jax.Array) -> jax.Array:
    """One value for each row, with as many axes as `x` has."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


def padded(values: np.ndarray, length: int) -> np.ndarray:
    """One value for each member as one for each of so many rows."""
    return np.pad(values, (0, length - len(values)), "edge")


def take(rows: Any, places: np.ndarray) -> Any:
    """Of stacked arrays those of some members, in that order; on a mesh spread over it, and padded."""
    layout = Layout.around(rows)
    return _take(rows, padded(places, len(places) if layout is None else layout.padded(len(places))), layout)


def put(rows: Any, places: np.ndarray, new: Any) -> Any:
    """Stacked arrays, with others for some of the members."""
    return _put(rows, padded(places, len(jax.tree.leaves(new)[0])), new, Layout.around(rows))


def match_sharding(rows: Any, others: Any, size: int) -> Any:
    """Stacked arrays of `size` members, held where others are: on their devices, and padded as they are."""
    mine, its = jax.tree.leaves(rows)[0], jax.tree.leaves(others)[0]
    layout = Layout.around(others)
    if mine.sharding == its.sharding and (layout is None or len(mine) == layout.padded(size)):
        return rows
    rows = rows if len(mine) == size else cut(rows, size)
    return jax.device_put(rows, its.sharding) if layout is None else layout.place(rows, size)


@partial(jax.jit, static_argnums=1)
def cut(rows: Any, size: int) -> Any:
    """Those of the first `size` members."""
    return jax.tree.map(lambda x: x[:size], rows)


@jax.jit
def where_rows(mask: jax.Array, new: Any, old: Any) -> Any:
    """The new rows where the mask says so, else the old ones."""
    return jax.tree.map(lambda x, y: jnp.where(by_row(mask, x), x, y), new, old)


@partial(jax.jit, static_argnums=2)
def _take(rows: Any, places: jax.Array, layout: Layout | None) -> Any:
    return _held(jax.tree.map(lambda x: x[places], rows), layout)


@partial(jax.jit, static_argnums=3)
def _put(rows: Any, places: jax.Array, new: Any, layout: Layout | None) -> Any:
    return _held(jax.tree.map(lambda x, y: x.at[places].set(y), rows, new), layout)


def _held(rows: Any, layout: Layout | None) -> Any:
    return rows if layout is None else lax.with_sharding_constraint(rows, layout.members)

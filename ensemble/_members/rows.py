"""Arrays with a row for each member, on one device or on many: rows are taken, replaced, cut off or chosen.

On a mesh there may be more rows than members: copies of the last one, so that all devices have equally many.
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
    """Return one value for each row, with as many axes as `x` has, so that they broadcast."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


def padded(values: np.ndarray, length: int) -> np.ndarray:
    """Return values of the members as values of `length` rows, the last repeated."""
    return np.pad(values, (0, length - len(values)), "edge")


def take(rows: Any, places: np.ndarray) -> Any:
    """Return the rows of some members, in the given order; on a mesh sharded over it, and padded."""
    layout = Layout.around(rows)
    return _take(rows, padded(places, len(places) if layout is None else layout.padded(len(places))), layout)


def put(rows: Any, places: np.ndarray, new: Any) -> Any:
    """Return the rows with new ones for some of the members."""
    # `new` may be padded. Then the last place repeats too, and is written several times with one value.
    return _put(rows, padded(places, len(jax.tree.leaves(new)[0])), new, Layout.around(rows))


def match_sharding(rows: Any, others: Any, size: int) -> Any:
    """Return the rows of `size` members with the sharding and the padding of `others`."""
    mine, its = jax.tree.leaves(rows)[0], jax.tree.leaves(others)[0]
    layout = Layout.around(others)
    if mine.sharding == its.sharding and (layout is None or len(mine) == layout.padded(size)):
        return rows
    # Padded for another layout: cut first, then padded anew.
    rows = rows if len(mine) == size else cut(rows, size)
    return jax.device_put(rows, its.sharding) if layout is None else layout.place(rows, size)


@partial(jax.jit, static_argnums=1)
def cut(rows: Any, size: int) -> Any:
    """Return the rows of the first `size` members."""
    return jax.tree.map(lambda x: x[:size], rows)


@jax.jit
def where_rows(mask: jax.Array, new: Any, old: Any) -> Any:
    """Return the new rows where the mask is true, and the old ones elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(by_row(mask, x), x, y), new, old)


@partial(jax.jit, static_argnums=2)
def _take(rows: Any, places: jax.Array, layout: Layout | None) -> Any:
    return _held(jax.tree.map(lambda x: x[places], rows), layout)


@partial(jax.jit, static_argnums=3)
def _put(rows: Any, places: jax.Array, new: Any, layout: Layout | None) -> Any:
    return _held(jax.tree.map(lambda x, y: x.at[places].set(y), rows, new), layout)


def _held(rows: Any, layout: Layout | None) -> Any:
    # Within the program that takes the rows, or the compiler may choose to put all of them on every device.
    return rows if layout is None else lax.with_sharding_constraint(rows, layout.members)

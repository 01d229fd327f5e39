"""Equinox modules: pytrees that may hold functions, numbers and text besides their arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, keystr, register_pytree_with_keys


def is_equinox(x: Any) -> bool:
    """Return whether `x` is an Equinox module, which it cannot be if Equinox has not been imported."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def is_array(x: Any) -> bool:
    """Return whether `x` is an array of JAX or NumPy."""
    return isinstance(x, (jax.Array, np.ndarray))


def differentiated(tree: Any, integers: bool = False) -> Any:
    """Return `tree` with None in place of each leaf that is not differentiated.

    Args:
      tree: any pytree. In an Equinox module the arrays of floating point are differentiated, as by `eqx.filter_grad`;
        in anything else all arrays and numbers.
      integers: whether arrays and numbers of other dtypes are left out too.
    """

    def keep(x: Any) -> Any:
        # Numbers in a module are configuration; elsewhere they are arguments, which JAX takes for 0-d arrays.
        if is_equinox(x):
            return jax.tree.map(lambda leaf: leaf if isinstance(leaf, _ARRAYS) and _is_inexact(leaf) else None, x)
        number = isinstance(x, (bool, int, float, complex))
        return x if (number or hasattr(x, "dtype")) and (not integers or _is_inexact(x)) else None

    return jax.tree.map(keep, tree, is_leaf=is_equinox)


# The last is the shape in place of an array in `Primals.outline`.
_ARRAYS = (jax.Array, np.ndarray, jax.core.ShapedArray)


def _is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(x, (float, complex)) if dtype is None else jnp.issubdtype(dtype, jnp.inexact)


class Held:
    """An Equinox module as a pytree of its arrays alone, which a compiled program takes and returns.

    Args:
      arrays: its arrays, in order.
      static: its structure, and for each leaf the path, its value if it is not an array, and the type of that: 1, 1.0
        and True are equal, but a function may do something else with each.
    """

    __slots__ = ("arrays", "static")

    def __init__(self, arrays: Iterable[Any], static: tuple[Any, tuple[tuple[str, Any, type], ...]]) -> None:
        self.arrays, self.static = list(arrays), static

    def module(self) -> Any:
        """Return the module with these arrays."""
        treedef, leaves = self.static
        given = iter(self.arrays)
        return jax.tree.unflatten(treedef, [next(given) if leaf is _ARRAY else leaf for _, leaf, _ in leaves])

    def keyed(self) -> list[tuple[GetAttrKey, Any]]:
        """Return its arrays with their paths."""
        paths = [path for path, leaf, _ in self.static[1] if leaf is _ARRAY]
        return [(GetAttrKey(path), x) for path, x in zip(paths, self.arrays, strict=True)]


# Placeholder for an array among the leaves of a module: a type, which no leaf of a module is by accident.
_ARRAY = jax.Array

register_pytree_with_keys(
    Held,
    lambda held: (held.keyed(), held.static),
    lambda static, arrays: Held(tuple(arrays), static),
    lambda held: (held.arrays, held.static),
)


def held(tree: Any) -> Any:
    """Return `tree` with its Equinox modules as pytrees of their arrays alone."""

    def hold(x: Any) -> Any:
        if not is_equinox(x):
            return x
        leaves, treedef = jax.tree.flatten_with_path(x)
        others = [_ARRAY if is_array(leaf) else leaf for _, leaf in leaves]
        paths = (keystr(path, simple=True, separator=".") for path, _ in leaves)
        static = tuple(zip(paths, others, map(type, others), strict=True))
        return Held([leaf for _, leaf in leaves if is_array(leaf)], (treedef, static))

    return jax.tree.map(hold, tree, is_leaf=is_equinox)


def released(tree: Any) -> Any:
    """Return `tree` with its modules as they were before `held`."""
    return jax.tree.map(lambda x: x.module() if isinstance(x, Held) else x, tree, is_leaf=lambda x: isinstance(x, Held))

"""Equinox modules: pytrees that may hold functions, numbers and strings besides arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from .._core.compat import ShapedArray
from .hashable import HashablePytree
from .split_model import dotted


def is_equinox(x: Any) -> bool:
    """Return whether `x` is an Equinox module; False if Equinox has not been imported."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def is_array(x: Any) -> bool:
    """Return whether `x` is a JAX or NumPy array."""
    return isinstance(x, (jax.Array, np.ndarray))


def differentiated(tree: Any, integers: bool = False) -> Any:
    """Return `tree` with None in place of each leaf that is not differentiated.

    Args:
      tree: any pytree. In an Equinox module the floating-point arrays are differentiated, as by `eqx.filter_grad`; in
        anything else all arrays and numbers.
      integers: whether to replace arrays and numbers that are not floating-point too.
    """

    def keep(x: Any) -> Any:
        # Numbers in a module are configuration; elsewhere they are arguments, which JAX treats as 0-d arrays.
        if is_equinox(x):
            return jax.tree.map(lambda leaf: leaf if isinstance(leaf, _ARRAYS) and _is_inexact(leaf) else None, x)
        number = isinstance(x, (bool, int, float, complex))
        return x if (number or hasattr(x, "dtype")) and (not integers or _is_inexact(x)) else None

    return jax.tree.map(keep, tree, is_leaf=is_equinox)


# `ShapedArray` is the type of the shapes that replace arrays in `Primals.outline`.
_ARRAYS = (jax.Array, np.ndarray, ShapedArray)


def _is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(x, (float, complex)) if dtype is None else jnp.issubdtype(dtype, jnp.inexact)


@dataclass(frozen=True, eq=False)
class Held:
    """An Equinox module as a pytree of its arrays alone, which a compiled program can take and return.

    Attributes:
      arrays: the arrays, in order.
      paths: the dotted path of each array.
      rest: everything else in the module.
    """

    arrays: Iterable[Any]
    paths: tuple[str, ...]
    rest: HashablePytree


register_pytree_with_keys(
    Held,
    lambda held: (zip(map(GetAttrKey, held.paths), held.arrays, strict=True), (held.paths, held.rest)),
    lambda static, arrays: Held(arrays, *static),
    lambda held: (held.arrays, (held.paths, held.rest)),
)


def held(tree: Any) -> Any:
    """Return `tree` with each Equinox module replaced by a `Held`."""

    def hold(x: Any) -> Any:
        if not is_equinox(x):
            return x
        arrays, rest = HashablePytree.separate(x, (jax.Array, np.ndarray))
        paths = tuple(dotted(path) for path, leaf in jax.tree.leaves_with_path(x) if is_array(leaf))
        return Held(arrays, paths, rest)

    return jax.tree.map(hold, tree, is_leaf=is_equinox)


def released(tree: Any) -> Any:
    """Return `tree` with each `Held` converted back into its module."""
    return jax.tree.map(
        lambda x: x.rest.join(x.arrays) if isinstance(x, Held) else x, tree, is_leaf=lambda x: isinstance(x, Held)
    )

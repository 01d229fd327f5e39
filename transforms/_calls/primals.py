"""The primals of a call as the user passed them: names, structures, shapes and models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_pytree_node

from .._core.arguments import describe, leaf_name
from .._core.weak_types import weak_like
from .._models.equinox import differentiated
from .._models.hashable import HashablePytree
from .._models.split_model import SplitModel, is_split, to_pure


@dataclass(frozen=True, eq=False)
class Primals:
    """Primals with the structures that their gradients and tangents have for the user.

    A pytree of its arrays, so that `jit` can return the function that `vjp` returns. After `outline()`, the only arrays
    are the models' arrays that are not differentiated.

    Attributes:
      api: the transform's name in errors.
      names: the names of the primals in the user's function.
      trees: the primals, with split models.
      integers: whether leaves that are not floating-point are left out.
    """

    api: str
    names: tuple[str, ...]
    trees: tuple[Any, ...]
    integers: bool = False

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the differentiated values: a model's trainable arrays, other trees whole; None for other leaves."""
        return tuple(differentiated(trainable_of(tree), self.integers) for tree in self.trees)

    def outline(self) -> Primals:
        """Return these primals with shapes in place of differentiated arrays, so that none is kept alive."""
        return replace(self, trees=with_trainable(self.trees, jax.tree.map(jax.typeof, self.values)))

    def gradients(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return `values`, one for each primal, in the user's form: an `nnx.State` for a module."""

        def shape(x: Any, value: Any) -> Any:
            return x.structure.gradient(value, x.rest) if isinstance(x, SplitModel) else value

        return jax.tree.map(shape, self.trees, tuple(values), is_leaf=is_split)

    def tangents(self, values: Any) -> tuple[Any, ...]:
        """Return `values`, one for each primal, as checked tangents; for models as trees of their trainable arrays."""

        def check(name: str, tangents: Any, primal: Any) -> Any:
            return jax.tree.map_with_path(
                lambda path, tangent, leaf: _tangent(self.api, leaf_name(name, path), tangent, leaf), tangents, primal
            )

        return tuple(map(check, self.names, self.matched(values, "tangents", "the tangent"), self.values))

    def matched(self, values: Any, all_of_them: str, one: str) -> tuple[Any, ...]:
        """Return `values`, one for each primal, checked for its structure; values of models as trainable arrays.

        Raises:
          TypeError: the number of values differs; the error calls them `all_of_them`.
          ValueError: a structure differs; the error calls each value `one`.
        """
        if not isinstance(values, (tuple, list)) or len(values) != len(self.trees):
            got = f"{len(values)}" if isinstance(values, (tuple, list)) else describe(values)
            wanted = f"a tuple with one entry for each of the {len(self.trees)} primals"
            raise TypeError(f"{self.api}: {all_of_them} must be {wanted}, but got {got}.")
        return tuple(map(partial(self._matched, one), self.names, self.trees, self.values, values))

    def _matched(self, one: str, name: str, tree: Any, primal: Any, value: Any) -> Any:
        """Return the value for one primal, with each `nnx.State` as a dict; raise if its structure differs."""
        expected: Any = jax.tree.structure(primal)
        try:
            value = jax.tree.map(lambda x, v: to_pure(v) if is_split(x) else v, tree, value, is_leaf=is_split)
            same = expected == jax.tree.structure(value)
        except (ValueError, TypeError, KeyError):
            same = False
        if not same:
            fact = f"has the structure {jax.tree.structure(value)}, but the primal has {expected}"
            raise ValueError(f"{self.api}: {one} of `{name}` {fact}; pass one array for each of its arrays.")
        return value


def _tangent(api: str, place: str, tangent: Any, leaf: Any) -> Any:
    """Return the tangent of one array or number; raise if its shape or dtype differs."""
    dtype, found = jnp.result_type(leaf), dtype_of(tangent)
    # The tangent space of integers and booleans is trivial; JAX represents its element as zeros of dtype float0.
    expected = dtype if jnp.issubdtype(dtype, jnp.inexact) else jax.dtypes.float0
    number = (int, float, complex) if jnp.issubdtype(dtype, jnp.complexfloating) else (int, float)
    # A Python number is accepted as the tangent of a 0-d array of any dtype, as JAX accepts it as an operand.
    weak = isinstance(tangent, number) and jnp.shape(leaf) == ()
    if expected == jax.dtypes.float0 and found != expected:
        raise TypeError(f"{api}: `{place}` is {describe(leaf)}, which has no derivative; convert it to floating point.")
    if found is None or jnp.shape(tangent) != jnp.shape(leaf) or (found != expected and not weak):
        fact = f"is {describe(tangent)}, but the primal has shape {jnp.shape(leaf)} and dtype {dtype}"
        raise ValueError(f"{api}: the tangent of `{place}` {fact}; pass an array of that shape and dtype.")
    return weak_like(jnp.asarray(tangent, dtype), leaf) if weak else tangent


# Static data of a pytree must be comparable; leaves that are not arrays may be numbers, strings or functions.
def _flatten(primals: Primals) -> tuple[list[Any], Any]:
    arrays, rest = HashablePytree.separate(primals.trees)
    return arrays, (primals.api, primals.names, primals.integers, rest)


def _unflatten(static: Any, arrays: Any) -> Primals:
    api, names, integers, rest = static
    return Primals(api, names, rest.join(arrays), integers)


register_pytree_node(Primals, _flatten, _unflatten)


def dtype_of(x: Any) -> Any:
    """Return the dtype that JAX gives an array or a number, and None for anything else."""
    found = getattr(x, "dtype", None)
    # Models and variables of Keras have a dtype too, as a string.
    is_array = isinstance(x, jax.Array) or (isinstance(found, np.dtype) and hasattr(x, "shape"))
    if not is_array and not isinstance(x, (int, float, complex)):
        return None
    return found if found == jax.dtypes.float0 else jnp.result_type(x)


def trainable_of(tree: Any) -> Any:
    """Return the differentiated part of an argument: each model's trainable arrays, and everything else whole."""
    return jax.tree.map(lambda x: x.trainable if isinstance(x, SplitModel) else x, tree, is_leaf=is_split)


def with_trainable(tree: Any, values: Any) -> Any:
    """Return `tree` with `trainable_of(tree)` replaced by `values`; where a value is None, the leaf stays."""

    def put(x: Any, value: Any) -> Any:
        if isinstance(x, SplitModel):
            return SplitModel(x.structure, jax.tree.map(put, x.trainable, value), x.rest)
        return x if value is None else value

    return jax.tree.map(put, tree, values, is_leaf=is_split)

"""The primals of a call as its user sees them: their names, structures and shapes, and the models among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_pytree_node

from .._core.arguments import describe, leaf_name
from .._core.weak_types import weak_like
from .._models.equinox import differentiated
from .._models.hashable import HashablePytree
from .._models.split_model import SplitModel, is_split, to_pure


class Primals:
    """Primals, and the forms that their gradients and tangents have for a user.

    A pytree, so that what `vjp` returns passes through `jit`: of all arrays, which after `outline()` are the other
    arrays of models alone.

    Args:
      api: what to call the transform in an error.
      name: from the position of a primal to what the user's function calls it.
      trees: the primals, with split models.
      integers: whether leaves that are not of floating point are left out.
    """

    def __init__(self, api: str, name: Callable[[int], str], trees: tuple[Any, ...], integers: bool = False) -> None:
        self._api, self._name, self._trees, self._integers = api, name, trees, integers

    @property
    def values(self) -> tuple[Any, ...]:
        """Return what is differentiated: a model's trainable arrays, all of anything else; None for other leaves."""
        return tuple(differentiated(trainable_of(tree), self._integers) for tree in self._trees)

    def outline(self) -> Primals:
        """Return these primals with shapes in place of what is differentiated, to keep no array alive for its form."""
        # Looked up now: the outline outlives the call, and must not keep its arguments alive through a function.
        names = tuple(self._name(i) for i in range(len(self._trees)))
        shapes = jax.tree.map(jax.typeof, self.values)
        return Primals(self._api, names.__getitem__, tuple(map(with_trainable, self._trees, shapes)), self._integers)

    def gradient(self, i: int, values: Any) -> Any:
        """Return `values` for the `i`-th primal in the form of its models: an `nnx.State` for a module."""

        def shape(x: Any, value: Any) -> Any:
            return x.structure.gradient(value, x.rest) if isinstance(x, SplitModel) else value

        return jax.tree.map(shape, self._trees[i], values, is_leaf=is_split)

    def tangents(self, values: Any) -> tuple[Any, ...]:
        """Return `values`, one for each primal, as checked tangents; those of models as trainable arrays."""
        matched = self.matched(values, "tangents", "the tangent")
        return tuple(self._tangent(i, value) for i, value in enumerate(matched))

    def matched(self, values: Any, all_of_them: str, one: str) -> tuple[Any, ...]:
        """Return `values`, one for each primal and of its structure; those of models as trainable arrays.

        Raises:
          TypeError: another number of them, which are `all_of_them` in the error.
          ValueError: another structure; each is `one` of its primal in the error.
        """
        if not isinstance(values, (tuple, list)) or len(values) != len(self._trees):
            got = f"{len(values)} of them" if isinstance(values, (tuple, list)) else describe(values)
            raise TypeError(
                f"{self._api}: {all_of_them} must be a tuple with one for each of the {len(self._trees)} primals, but "
                f"got {got}."
            )
        return tuple(self._matched(i, value, one) for i, value in enumerate(values))

    def _matched(self, i: int, value: Any, one: str) -> Any:
        """Return the value for the `i`-th primal, `nnx.State`s as dicts; raise if it has another structure."""
        name, tree, primal = self._name(i), self._trees[i], self.values[i]
        try:
            value = jax.tree.map(
                lambda x, v: to_pure(v) if isinstance(x, SplitModel) else v, tree, value, is_leaf=is_split
            )
            structure: Any = jax.tree.structure(primal)
            same = structure == jax.tree.structure(value)
        except (ValueError, TypeError, KeyError):
            same = False
        if not same:
            raise ValueError(
                f"{self._api}: {one} of `{name}` has the structure {jax.tree.structure(value)}, but the primal "
                f"has {jax.tree.structure(primal)}; give one array for each of its arrays."
            )
        return value

    def _tangent(self, i: int, value: Any) -> Any:
        """Return a value of the right structure as a tangent; raise if a leaf has another shape or dtype."""
        name, primal = self._name(i), self.values[i]

        def check(path: Any, tangent: Any, leaf: Any) -> Any:
            """Return the tangent of one leaf, checked against it."""
            place = leaf_name(name, path)
            dtype, found = jnp.result_type(leaf), dtype_of(tangent)
            # The tangent space of integers and booleans is empty, which JAX writes as zeros of dtype float0.
            expected = dtype if jnp.issubdtype(dtype, jnp.inexact) else jax.dtypes.float0
            number = (int, float, complex) if jnp.issubdtype(dtype, jnp.complexfloating) else (int, float)
            # A Python number is a tangent of any dtype for a 0-d array, as it is an operand of any dtype in JAX.
            weak = isinstance(tangent, number) and jnp.shape(leaf) == ()
            if expected == jax.dtypes.float0 and found != expected:
                raise TypeError(
                    f"{self._api}: `{place}` is {describe(leaf)}, which has no derivative; convert it to floating "
                    "point, or let fun close over it."
                )
            if found is None or jnp.shape(tangent) != jnp.shape(leaf) or (found != expected and not weak):
                raise ValueError(
                    f"{self._api}: the tangent of `{place}` is {describe(tangent)}, but the primal has shape "
                    f"{jnp.shape(leaf)} and dtype {dtype}; give an array of the same."
                )
            return weak_like(jnp.asarray(tangent, dtype), leaf) if weak else tangent

        return jax.tree.map_with_path(check, value, primal)


# Static data has to be comparable: names instead of the function that finds them.
def _flatten(primals: Primals) -> tuple[list[Any], Any]:
    arrays, rest = HashablePytree.separate(primals._trees)
    names = tuple(primals._name(i) for i in range(len(primals._trees)))
    return arrays, (primals._api, names, primals._integers, rest)


def _unflatten(static: Any, arrays: Any) -> Primals:
    api, names, integers, rest = static
    return Primals(api, names.__getitem__, rest.join(list(arrays)), integers)


register_pytree_node(Primals, _flatten, _unflatten)


def dtype_of(x: Any) -> Any:
    """Return the dtype of an array or a number as JAX takes it, None for anything else."""
    found = getattr(x, "dtype", None)
    if found is None and not isinstance(x, (int, float, complex)):
        return None
    return found if found == jax.dtypes.float0 else jnp.result_type(x)


def trainable_of(tree: Any) -> Any:
    """Return what is differentiated in an argument: a model's trainable arrays, all of anything else."""
    return jax.tree.map(lambda x: x.trainable if isinstance(x, SplitModel) else x, tree, is_leaf=is_split)


def with_trainable(tree: Any, values: Any) -> Any:
    """Return `tree` with `values` in the places of `trainable_of(tree)`; where a value is None, the leaf stays."""

    def put(x: Any, value: Any) -> Any:
        if isinstance(x, SplitModel):
            return SplitModel(x.structure, jax.tree.map(put, x.trainable, value), x.rest)
        return x if value is None else value

    return jax.tree.map(put, tree, values, is_leaf=is_split)

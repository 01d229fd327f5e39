"""Calls that need none of what `Call` does: functions without a model, of floating-point arrays alone.

The checks of a call take as long as JAX takes to differentiate a small function outside `jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._core.arguments import argument_name
from .._core.axes import Axes
from .._models.split_model import bound_model, is_model
from .primals import Primals

# The leaves of a tuple of arguments, and their structure.
Plain = tuple[list[jax.Array], Any]


def plain_arrays(fun: Any, args: Any) -> Plain | None:
    """Return the leaves of a tuple of arguments, and its structure; None if `Call` has to check or prepare the call.

    The leaves are arrays of JAX of real or complex numbers, traced or not, and `fun` is a function that is not bound to
    a model. (Dtypes that NumPy does not have, such as bfloat16, are left to `Call`.)
    """
    if not callable(fun) or not isinstance(args, tuple):
        return None
    leaves, structure = jax.tree.flatten(args, is_leaf=is_model)
    for x in leaves:
        if not isinstance(x, jax.Array) or getattr(x.dtype, "kind", "V") not in "fc":
            return None
    return (leaves, structure) if leaves and bound_model(fun)[0] is None else None


def are_tangents(plain: Plain, tangents: Any) -> bool:
    """Return whether `tangents` are arrays of the structure, shapes and dtypes of these leaves."""
    leaves, structure = plain
    given, same = jax.tree.flatten(tangents)
    return same == structure and all(
        [
            isinstance(t, jax.Array) and t.shape == x.shape and t.dtype == x.dtype
            for t, x in zip(given, leaves, strict=True)
        ]
    )


def plain_size(args: tuple[Any, ...], axes: Sequence[Axes]) -> int | None:
    """Return the common size of the mapped axes of arrays; None if there is anything that `vmap` must check.

    Every leaf is an array of JAX that is not sharded over explicit axes of a mesh, and every argument has one axis,
    not counted from the end, or is shared.
    """
    size = None
    for arg, axis in zip(args, axes, strict=True):
        if axis is not None and (type(axis) is not int or axis < 0):
            return None
        for x in jax.tree.leaves(arg, is_leaf=is_model):
            if not isinstance(x, jax.Array) or any(jax.typeof(x).sharding.spec):
                return None
            if axis is not None:
                if axis >= x.ndim or x.shape[axis] != (x.shape[axis] if size is None else size):
                    return None
                size = x.shape[axis]
    return size


def outline_of(api: str, fun: Callable[..., Any], plain: Plain) -> Primals:
    """Return the primals of a call with shapes in place of arrays, as `Primals.outline` does."""
    leaves, structure = plain
    shapes = jax.tree.unflatten(structure, map(jax.typeof, leaves))
    return Primals(api, tuple(argument_name(fun, shapes, i) for i in range(len(shapes))), shapes)

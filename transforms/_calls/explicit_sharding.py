"""Explicit axes of a mesh: the type of an array contains how it is divided over them.

With them JAX (0.10, 0.11) refuses much of what it does with automatic ones: to map arrays of which some are divided and
others are not, to map a lookup, to contract what is divided. Where the examples of a batch are divided, one example is
not: a function of one example needs no such types, and the axes are made automatic inside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._core.compat import Tracer
from .._models.hashable import Opaque
from .._models.split_model import merge_tree, split_tree


def explicit_spec(x: Any) -> PartitionSpec:
    """Return how an array is divided over explicit axes of a mesh."""
    return jax.typeof(x).sharding.spec if _is_array(x) else PartitionSpec()


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Return how an array is divided, or None if its mesh has no explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def explicit_axes(arrays: Any) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Return how axis 0 is divided over explicit axes of a mesh: in the first array that is, and the axes of all."""
    entries = [explicit_spec(x)[:1] for x in jax.tree.leaves(arrays)]
    entries = [entry for entry in entries if any(entry)]
    names = dict.fromkeys(name for entry in entries for name in axis_names(entry))
    return PartitionSpec(*entries[0]) if entries else PartitionSpec(), tuple(names)


def along(axes: Sequence[str], x: Any) -> PartitionSpec:
    """Return how an array is divided over these explicit axes of a mesh, without the others."""
    entries = (tuple(name for name in axis_names([entry]) if name in axes) for entry in explicit_spec(x))
    return PartitionSpec(*(entry or None for entry in entries))


def divided_as(x: Any, other: Any) -> Any:
    """Return `x`, divided over explicit axes of a mesh as another array of the same shape."""
    sharding = jax.typeof(other).sharding
    return x if jax.typeof(x).sharding.spec == sharding.spec else jax.sharding.reshard(x, sharding)


def divided_alike(leaves: Sequence[Any], axes: Sequence[int | None]) -> tuple[list[Any], int]:
    """Return arrays to be mapped over `axes`, all divided as the first that is divided there, and the number of parts.

    JAX refuses to map arrays that are divided together with others that are not.
    """
    mapped = [(x, axis % x.ndim) for x, axis in zip(leaves, axes, strict=True) if axis is not None]
    entries = [(x, explicit_spec(x)[axis]) for x, axis in mapped if _is_array(x)]
    first, entry = next(((x, entry) for x, entry in entries if entry), (None, None))
    if first is None:
        return list(leaves), 1

    # Of a traced array only the form of the mesh is known, which an array that is not traced could not be moved to.
    mesh = jax.typeof(first).sharding.mesh if isinstance(first, Tracer) else first.sharding.mesh

    def divided(x: Any, axis: int | None) -> Any:
        if axis is None or not _is_array(x) or explicit_spec(x)[axis % x.ndim]:
            return x
        spec = [*explicit_spec(x)]
        spec[axis % x.ndim] = entry
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    parts = math.prod(mesh.shape[name] for name in axis_names([entry]))
    return [divided(x, axis) for x, axis in zip(leaves, axes, strict=True)], parts


def axis_names(spec: Iterable[Any]) -> tuple[str, ...]:
    """Return the axes of a mesh in a partition spec."""
    return tuple(name for entry in spec if entry for name in (entry if isinstance(entry, tuple) else (entry,)))


def with_automatic(
    api: str,
    function: Callable[..., Any],
    arguments: Any,
    axes: Sequence[str],
    place: Callable[[Any], Sequence[PartitionSpec]],
) -> Any:
    """Return `function(*arguments)`, with explicit axes of a mesh made automatic inside, and explicit in the result.

    Args:
      api: what the user called.
      function: of any pytrees, with models in them too; it may return anything.
      arguments: its arguments.
      axes: the axes of the mesh. An array that `function` closes over must not know them.
      place: from the result to partition specs over these axes, one for each of its arrays.
    """
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, split_tree(arguments))
    given = Opaque.of(arrays)
    leaves = given.arrays
    mesh = next(jax.typeof(x).sharding.mesh for x in leaves if set(axes) & set(axis_names(explicit_spec(x))))
    found: list[Any] = []

    def run(leaves: list[Any]) -> list[jax.Array]:
        out = Opaque.of(function(*merge_tree(given.join(leaves))))
        specs = zip(out.arrays, place(out.value), strict=True)
        found[:] = [out, [_merged(jax.typeof(x), spec) for x, spec in specs]]
        return out.arrays

    def run_for_types(leaves: list[Any]) -> jax.Array:
        run(leaves)
        return jnp.zeros(())

    undivided = NamedSharding(mesh, PartitionSpec())  # names the mesh, where none is set
    try:
        # `auto_axes` wants the shardings of the result in advance, but how that is divided over other explicit axes
        # shows only in its type inside: so `run` is traced once for the types, and once more for the result.
        jax.eval_shape(jax.sharding.auto_axes(run_for_types, axes=tuple(axes), out_sharding=undivided), leaves)
    except ValueError as error:
        if "should match the aval mesh" not in str(error):
            raise
        fact = f"fun closes over an array of a mesh with the explicit axes {', '.join(axes)}"
        raise ValueError(f"{api}: {fact}; pass it as an argument, or make them automatic (AxisType.Auto).") from error
    if not found[1]:
        return found[0].value
    shardings = [NamedSharding(mesh, spec) for spec in found[1]]
    arrays = jax.jit(jax.sharding.auto_axes(run, axes=tuple(axes), out_sharding=shardings))(leaves)
    return found[0].join(arrays)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _merged(kind: Any, spec: PartitionSpec) -> PartitionSpec:
    """Return how an array is divided over both the explicit axes in its type and those of `spec`."""
    known, others = ([*x, *[None] * kind.ndim][: kind.ndim] for x in (kind.sharding.spec, spec))
    return PartitionSpec(*(tuple(axis_names([x, y])) or None for x, y in zip(others, known, strict=True)))

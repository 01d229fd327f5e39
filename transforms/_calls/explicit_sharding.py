"""Explicit axes of a mesh: the sharding over them is part of an array's type.

With explicit axes JAX (0.10, 0.11) rejects operations that it allows with automatic ones: mapping over sharded together
with unsharded arrays, mapping an embedding lookup, contracting a sharded axis. If a batch is sharded over its examples,
one example is not sharded: so a function of one example runs with these axes made automatic.
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
    """Return the partition spec of an array over explicit axes of a mesh."""
    return jax.typeof(x).sharding.spec if _is_array(x) else PartitionSpec()


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding of an array, or None if its mesh has no explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def explicit_axes(arrays: Any) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Return the spec of axis 0 in the first array sharded along it, and all mesh axes over which any axis 0 is."""
    entries = [explicit_spec(x)[:1] for x in jax.tree.leaves(arrays)]
    entries = [entry for entry in entries if any(entry)]
    names = dict.fromkeys(name for entry in entries for name in axis_names(entry))
    return PartitionSpec(*entries[0]) if entries else PartitionSpec(), tuple(names)


def along(axes: Sequence[str], x: Any) -> PartitionSpec:
    """Return the partition spec of an array over these explicit axes of a mesh, omitting all others."""
    entries = (tuple(name for name in axis_names([entry]) if name in axes) for entry in explicit_spec(x))
    return PartitionSpec(*(entry or None for entry in entries))


def divided_as(x: Any, other: Any) -> Any:
    """Return `x`, resharded over explicit axes of a mesh like another array of the same shape."""
    sharding = jax.typeof(other).sharding
    return x if jax.typeof(x).sharding.spec == sharding.spec else jax.sharding.reshard(x, sharding)


def divided_alike(leaves: Sequence[Any], axes: Sequence[int | None]) -> tuple[list[Any], int]:
    """Return the arrays, all sharded along their mapped axis like the first such array, and the number of shards.

    JAX refuses to map over sharded arrays together with others that are not sharded.
    """
    mapped = [(x, axis % x.ndim) for x, axis in zip(leaves, axes, strict=True) if axis is not None]
    entries = [(x, explicit_spec(x)[axis]) for x, axis in mapped if _is_array(x)]
    first, entry = next(((x, entry) for x, entry in entries if entry), (None, None))
    if first is None:
        return list(leaves), 1

    # A traced array has only an abstract mesh, to which an array with values could not be moved.
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
      api: the transform's name in errors.
      function: a function of any pytrees, which may contain models; it may return anything.
      arguments: the arguments.
      axes: the axes of the mesh. `function` must not close over an array whose mesh has them.
      place: a function from the result to partition specs over these axes, one for each array of the result.
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

    undivided = NamedSharding(mesh, PartitionSpec())  # passes the mesh, since none may be set
    try:
        # `auto_axes` needs the shardings of the result in advance, but its sharding over other explicit axes is known
        # only inside the traced function. So `run` is traced once for the types and once more for the result.
        jax.eval_shape(jax.sharding.auto_axes(run_for_types, axes=tuple(axes), out_sharding=undivided), leaves)
    except ValueError as error:
        if "should match the aval mesh" not in str(error):
            raise
        fact = f"fun closes over an array of a mesh with the explicit axes {', '.join(axes)}"
        raise ValueError(f"{api}: {fact}; pass it as an argument, or make the axes AxisType.Auto.") from error
    if not found[1]:
        return found[0].value
    shardings = [NamedSharding(mesh, spec) for spec in found[1]]
    arrays = jax.jit(jax.sharding.auto_axes(run, axes=tuple(axes), out_sharding=shardings))(leaves)
    return found[0].join(arrays)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _merged(kind: Any, spec: PartitionSpec) -> PartitionSpec:
    """Return the partition spec of an array over the explicit axes in its type and the axes of `spec` together."""
    known, others = ([*x, *[None] * kind.ndim][: kind.ndim] for x in (kind.sharding.spec, spec))
    return PartitionSpec(*(tuple(axis_names([x, y])) or None for x, y in zip(others, known, strict=True)))

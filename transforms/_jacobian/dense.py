"""Dense Jacobians by columns (unit tangents pushed forward) or rows (unit cotangents pulled back), also in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._calls.call import Call, check_complex, check_dtypes, check_output
from .._calls.explicit_sharding import explicit_spec
from .._core.arguments import Argnums
from .._core.compat import Tracer, inside_a_transform
from .._core.weak_types import weak_like
from .._vmap import vmap

# A function from an index to the unit vector of that index, as arrays.
Basis = Callable[[Any], list[Any]]


def by_columns(api: str, call: Call, chunk_size: int | None) -> tuple[Any, list[list[Any]], Any]:
    """Return the output, its derivatives (for each output array one for each input array), and the call's `rest`."""
    inputs, treedef = jax.tree.flatten(call.primals)
    sizes = sizes_of(inputs)

    def check(out: Any) -> None:
        check_output(api, out)
        if call.holomorphic:
            check_complex(api, out)

    def along(units: list[Any]) -> tuple[list[Any], tuple[Any, Any]]:
        out, column, rest = jax.jvp(call, call.primals, jax.tree.unflatten(treedef, units), has_aux=True)
        check(out)
        return jax.tree.leaves(column), (out, rest)

    def columns(basis: Basis, size: int) -> list[Any]:
        def column(k: Any) -> list[Any]:
            return jax.tree.leaves(push(*jax.tree.unflatten(treedef, basis(k))))

        return map_slices(column, size, -1, chunk_size)

    if (
        chunk_size is None
        and sum(sizes) > 1
        and not inside_a_transform()
        and not any(any(explicit_spec(x)) for x in inputs)
    ):
        # Outside `jit` each operation is dispatched, and this way there are the fewest: half of those below.
        found, (out, rest) = jax.vmap(along, out_axes=(-1, None))(_unit_rows(inputs, sizes))
        parts = _split(found, sizes, -1)
    else:
        # Linearized once; each column is then one evaluation of the linear part.
        out, push, rest = jax.linearize(call, *call.primals, has_aux=True)
        check(out)
        parts = by_array(inputs, columns, -1, chunk_size)
    blocks: list[list[Any]] = [[] for _ in jax.tree.leaves(out)]
    for x, part in zip(inputs, parts, strict=True):
        for row, y, array in zip(blocks, jax.tree.leaves(out), part, strict=True):
            # The columns are stacked along the last axis, which becomes the axes of the input.
            row.append(weak_like(array.reshape(*jnp.shape(y), *jnp.shape(x)), y))
    return out, blocks, rest


def by_rows(api: str, call: Call, chunk_size: int | None, axis: int = 0) -> tuple[Any, list[list[Any]], Any]:
    """Return the same as `by_columns`, in reverse mode; the output's axes come before axis `axis` of the argument."""
    # One forward pass, whose residuals serve all rows.
    out, pull, rest = jax.vjp(call, *call.primals, has_aux=True)
    check_output(api, out)
    (check_complex if call.holomorphic else check_real)(api, out)
    outputs, treedef = jax.tree.flatten(out)
    inputs = jax.tree.leaves(call.primals)
    # The gradients of integers (`allow_int`) are of dtype float0, which cannot be mapped; their blocks are zeros.
    inexact = [i for i, x in enumerate(inputs) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

    def rows(basis: Basis, size: int) -> list[Any]:
        def row(k: Any) -> list[Any]:
            found = jax.tree.leaves(pull(jax.tree.unflatten(treedef, basis(k))))
            return [found[i] for i in inexact]

        return map_slices(row, size, axis, chunk_size)

    def block(y: Any, x: Any, array: Any) -> Any:
        shape = (*jnp.shape(x)[:axis], *jnp.shape(y), *jnp.shape(x)[axis:])
        return weak_like(jnp.zeros(shape, jnp.result_type(x)) if array is None else array.reshape(shape), x)

    blocks = []
    for y, part in zip(outputs, by_array(outputs, rows, axis, chunk_size), strict=True):
        of_input = dict(zip(inexact, part, strict=True))
        blocks.append([block(y, x, of_input.get(i)) for i, x in enumerate(inputs)])
    return out, blocks, rest


DENSE = {"forward": by_columns, "reverse": by_rows}


def in_form(argnums: Argnums, call: Call, arrays: list[Any]) -> Any:
    """Arrange values, one for each array of the primals, as a gradient: a tuple if `argnums` is one."""
    trees = jax.tree.unflatten(jax.tree.structure(call.primals), arrays)
    forms = call.form.gradients(trees)
    return forms if isinstance(argnums, (tuple, list)) else forms[0]


def by_array(
    arrays: list[Any], compute: Callable[[Basis, int], list[Any]], axis: int, chunk_size: int | None
) -> list[list[Any]]:
    """Return for each of `arrays` the result of `compute` for the unit vectors of its space, stacked along `axis`.

    Without chunks there is one map over the unit vectors of all arrays. With chunks there is one map for each array,
    since splitting the result of a single map would hold it twice.
    """
    sizes = sizes_of(arrays)
    if chunk_size is not None:
        return [compute(partial(_unit, arrays, (i,)), size) for i, size in enumerate(sizes)]
    return _split(compute(partial(_unit, arrays, range(len(arrays))), sum(sizes)), sizes, axis)


def _split(results: list[Any], sizes: list[int], axis: int) -> list[list[Any]]:
    """Return, for each of the arrays whose unit vectors are along `axis`, its part of each result."""
    if len(sizes) == 1:
        return [results]
    parts = [jnp.split(result, np.cumsum(sizes)[:-1], axis) for result in results]
    return [[part[i] for part in parts] for i in range(len(sizes))]


def _unit_rows(arrays: Sequence[Any], sizes: list[int]) -> list[Any]:
    """Return the unit vectors of the space of all arrays, along a new axis 0 of each."""
    ends = np.cumsum(sizes)
    rows = np.arange(ends[-1])[:, None]
    return [
        (rows == np.arange(end - size, end)).astype(jnp.result_type(x)).reshape(-1, *jnp.shape(x))
        for x, size, end in zip(arrays, sizes, ends, strict=True)
    ]


def _unit(arrays: Sequence[Any], which: Sequence[int], k: Any) -> list[Any]:
    """Return zeros like `arrays`, with a one at index `k` of the arrays in `which`, flattened and concatenated."""
    units, start = [], 0
    for i, array in enumerate(arrays):
        shape, dtype = jnp.shape(array), jnp.result_type(array)
        unit = jnp.zeros(shape, dtype)
        if i in which:
            size = math.prod(shape)
            # A comparison with `k` that XLA fuses into its use, so that no identity matrix is stored.
            unit = (jnp.arange(start, start + size) == k).astype(dtype).reshape(shape)
            start += size
        units.append(sharded_like(unit, array))
    return units


def sharded_like(x: Any, other: Any) -> Any:
    """Return `x` resharded like another array if that is sharded over explicit axes of a mesh."""
    sharding = jax.typeof(other).sharding
    return jax.sharding.reshard(x, sharding) if any(sharding.spec) else x


def unsharded(x: Any) -> Any:
    """Return `x` replicated if it is sharded over explicit axes of a mesh."""
    sharding = jax.typeof(x).sharding
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if any(sharding.spec) else x


def mesh_of(tree: Any) -> AbstractContextManager[Any]:
    """Return a context that sets the mesh over whose explicit axes an array is sharded, as JAX needs for compilation.

    Inside a transform, or if a mesh is already set, the context does nothing.
    """
    for x in jax.tree.leaves(tree):
        sharded = isinstance(x, jax.Array) and not isinstance(x, Tracer) and any(jax.typeof(x).sharding.spec)
        if sharded and jax.sharding.get_abstract_mesh().empty and not inside_a_transform():
            return jax.set_mesh(x.sharding.mesh)
    return nullcontext()


# Differentiating a computation in chunks recomputes each chunk, instead of keeping the residuals of all of them.
# In a loop XLA cannot undo that by merging common subexpressions, so `prevent_cse` is not needed.
checkpoint = partial(jax.checkpoint, prevent_cse=False)


def map_slices(
    fun: Callable[[Any], list[Any]], slices: int | np.ndarray | jax.Array, axis: int, chunk_size: int | None
) -> list[Any]:
    """Map `fun` over the rows of `slices`, or over `range(slices)`; stack the results along `axis`."""
    fun = fun if chunk_size is None else checkpoint(fun)
    size = slices if isinstance(slices, int) else len(slices)
    if size == 1:  # a single gradient: mapping would add a few operations
        return [jnp.expand_dims(leaf, axis) for leaf in fun(0 if isinstance(slices, int) else slices[0])]
    over = jnp.arange(size) if isinstance(slices, int) else jnp.asarray(slices)
    if size and chunk_size is not None:
        return vmap(fun, out_axes=axis, chunk_size=chunk_size)(over)
    return jax.vmap(fun, out_axes=axis)(over)


def check_real(api: str, out: Any) -> None:
    """Raise if an output is not real, since reverse mode needs real outputs."""
    cure = 'use forward mode (jacfwd, mode="forward" or "fwd_fwd") if the arguments are real'
    fact = f"reverse mode needs real outputs; {cure}, return its real and imaginary parts"
    check_dtypes(api, "output", out, jnp.floating, f"{fact}, or pass holomorphic=True if fun is holomorphic")


def sizes_of(tree: Any) -> list[int]:
    """Return the number of elements of each array of a pytree."""
    return [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]

"""A sparse Jacobian: a few products, the entries read from them, and the `BCOO` that holds these."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._calls.call import Call, check_output
from ..._core.compat import NeedsValues
from ..._core.memory import lower_apart
from ..dense import check_real, map_slices, sharded_like, sizes_of, unsharded
from ..mode import DECISIVE, Compute, Evaluator, ModeChoice, choose_mode, dense_evaluator, output_shapes, possible_modes
from .coloring import Coloring, coloring_of, cost, symmetric_coloring_of
from .pattern import (
    Entries,
    Pattern,
    UnknownPattern,
    blocks_of,
    found_pattern,
    full_pattern,
    given_pattern,
    starts_of,
    strides_of,
)
from .verify import verify

# Up to how many numbers the seeds (the summed unit vectors) are constants of the program, and up to how many XLA may
# compute with while it compiles: it folds a linear function of a constant into a constant, but computes slowly.
_CONSTANT, _FOLDED = 2**24, 2**18


def sparse_evaluator(
    api: str, call: Call, nest: Callable[[Any, Any], Any], sparsity: Any, check: bool, mode: str, symmetric: bool
) -> tuple[Evaluator, ModeChoice]:
    """Return the way to compute a Jacobian as `BCOO`, with the entries of a pattern, and the reason.

    Args:
      api: the transform's name in errors.
      call: the call to differentiate.
      nest: from the output, and one value for each pair of an output and an input array, to the form of the result.
      sparsity: "auto" or a pattern.
      check: whether the result is compared with a product.
      mode: "auto", "forward" or "reverse".
      symmetric: whether the Jacobian is symmetric if it is square, as that of a gradient.
    """
    out = output_shapes(api, call)
    outputs, inputs = jax.tree.leaves(out), jax.tree.leaves(call.primals)
    shape = sum(sizes_of(outputs)), sum(sizes_of(inputs))
    modes = possible_modes(call, out) if mode == "auto" else (mode,)
    checked = partial(verify, modes[0]) if check else None
    choice = partial(ModeChoice, inputs=shape[1], outputs=shape[0], flops=None)

    def dense(pattern: Pattern, why: str) -> tuple[Evaluator, ModeChoice]:
        chosen = choose_mode(api, call).mode if len(modes) == 2 else modes[0]
        evaluator = dense_evaluator(api, call, chosen)
        compute = partial(_sparse, pattern, partial(_of_dense, pattern, evaluator.compute), checked)
        return Evaluator(compute, evaluator.slices), choice(chosen, why=why)

    try:
        if isinstance(sparsity, str):
            pattern = found_pattern(api, call, modes[0])
        else:
            form = jax.tree.structure(nest(out, [[0] * len(inputs)] * len(outputs)))
            pattern = given_pattern(api, sparsity, form, outputs, inputs)
    except UnknownPattern as reason:
        warnings.warn(
            f"{api}: the pattern cannot be found, so every entry is computed, and kept: {reason}. Give the pattern as "
            "sparsity=, or leave sparsity out for a dense array.",
            stacklevel=4,
        )
        return dense(full_pattern(shape), f"the pattern cannot be found: {reason}")
    coloring = (
        symmetric_coloring_of(api, pattern, modes[0])
        if symmetric and shape[0] == shape[1]
        else coloring_of(api, pattern, modes)
    )
    compute = partial(_sparse, pattern, partial(_of_products, pattern, coloring), checked)
    count = coloring.counts
    found = "both" if all(count) else "reverse" if count[1] else "forward"
    why = f"{count[0]} products in forward and {count[1]} in reverse mode give all {len(pattern.rows)} entries"
    evaluator = Evaluator(compute, lambda: max(1, *count)), choice(found, why=why, colors=count)
    # A dense Jacobian costs a product for each input (forward) or each output (reverse); where the colours are far
    # fewer, there is no need to lower both programs to compare them.
    alone = {"forward": cost(shape[1], 0), "reverse": cost(0, shape[0])}
    if DECISIVE * cost(*count) <= min(alone[mode] for mode in modes):
        return evaluator
    other = dense(pattern, f"XLA counts fewer operations and bytes than for {sum(count)} products")
    try:
        return min(other, evaluator, key=lambda evaluator: _work(api, call, evaluator[0]))
    except NeedsValues:
        return evaluator


def _work(api: str, call: Call, evaluator: Evaluator) -> float:
    """Return the operations of a program plus the bytes that it reads and writes, as XLA counts both."""
    analysis = lower_apart(partial(evaluator.compute, api, call, None)).cost_analysis() or {}
    return analysis.get("flops", 0.0) + analysis.get("bytes accessed", 0.0)


def _sparse(
    pattern: Pattern,
    entries_of: Compute,
    check: Callable[..., None] | None,
    api: str,
    call: Call,
    chunk_size: int | None,
) -> tuple[Any, list[list[Any]], Any]:
    """Return what `by_columns` does, with a `BCOO` in place of each array."""
    from jax.experimental.sparse import BCOO

    out, entries, rest = entries_of(api, call, chunk_size)
    outputs, inputs = jax.tree.leaves(out), jax.tree.leaves(call.primals)
    if check is not None:
        check(api, call, out, pattern, entries)
    blocks: list[list[Any]] = [[] for _ in outputs]
    for j, i, _, (rows, cols) in blocks_of(pattern, outputs, inputs):
        shape, data = jnp.shape(outputs[j]) + jnp.shape(inputs[i]), entries[j][i]
        # Where every entry is kept, XLA makes the indices, in place of a constant as long as the data.
        full = 0 < len(data) == math.prod(shape)
        flat = jnp.arange(len(data)) if full else rows * jnp.size(inputs[i]) + cols
        indices = flat[:, None] // strides_of(shape) % np.array(shape, np.int64)
        blocks[j].append(
            BCOO((data, jnp.asarray(indices, np.int32)), shape=shape, indices_sorted=True, unique_indices=True)
        )
    return out, blocks, rest


def _of_dense(
    pattern: Pattern, compute: Compute, api: str, call: Call, chunk_size: int | None
) -> tuple[Any, Entries, Any]:
    """Return the output, the entries of a pattern read from the dense Jacobian, and the rest of the call."""
    out, dense, rest = compute(api, call, chunk_size)
    outputs, inputs = jax.tree.leaves(out), jax.tree.leaves(call.primals)
    entries: Entries = [[] for _ in outputs]
    for j, i, _, (rows, cols) in blocks_of(pattern, outputs, inputs):
        array = dense[j][i]
        if len(rows) == array.size:
            entries[j].append(unsharded(array).reshape(-1))
        else:
            matrix = unsharded(array).reshape(jnp.size(outputs[j]), jnp.size(inputs[i]))
            entries[j].append(matrix.at[rows, cols].get(mode="promise_in_bounds"))
    return out, entries, rest


def _of_products(
    pattern: Pattern, coloring: Coloring, api: str, call: Call, chunk_size: int | None
) -> tuple[Any, Entries, Any]:
    """Return the output, the entries of a pattern read from products, and the rest of the call."""
    count, number = coloring.counts
    push: Any = None
    pull: Any = None
    if count:
        # With products of both kinds the reverse ones transpose the linearization, so that `fun` runs once.
        out, push, rest = jax.linearize(call, *call.primals, has_aux=True)
        pull = jax.linear_transpose(push, *call.primals) if number else None
    elif number:
        out, pull, rest = jax.vjp(call, *call.primals, has_aux=True)
    else:
        out, rest = call(*call.primals)
    check_output(api, out)
    if number:
        check_real(api, out)
    inputs, treedef = jax.tree.flatten(call.primals)
    outputs, form = jax.tree.flatten(out)

    def pushed(seed: list[Any]) -> Any:
        return push(*jax.tree.unflatten(treedef, seed))

    def pulled(seed: list[Any]) -> Any:
        return pull(jax.tree.unflatten(form, seed))

    # One matrix for each array of the output and then of the input, with a product in each row, and where each of these
    # arrays starts: entries of products in reverse mode are numbered after all of those in forward mode.
    matrices = _products(pushed, inputs, coloring.columns, count, chunk_size) or [None] * len(outputs)
    matrices = [*matrices, *_products(pulled, outputs, coloring.rows, number, chunk_size)]
    starts = starts_of([*outputs, *inputs])
    places = coloring.place + np.where(coloring.forward, 0, starts[len(outputs)])

    def read(chosen: np.ndarray, dtype: Any) -> jax.Array:
        """Return these entries, each from the product and the array of it that hold it."""
        if not len(chosen):
            return jnp.zeros(0, dtype)
        parts, order = [], []
        array = np.searchsorted(starts, places[chosen], "right") - 1
        for k in np.flatnonzero(np.bincount(array)):
            these = chosen[array == k]
            parts.append((matrices[k], coloring.product[these], places[these] - starts[k]))
            order.append(these)
        positions = np.argsort(np.concatenate(order)) if len(parts) > 1 else None
        return _gather_entries(parts, positions, dtype=np.dtype(dtype))

    entries: Entries = [[] for _ in outputs]
    for j, i, chosen, _ in blocks_of(pattern, outputs, inputs):
        entries[j].append(read(chosen, jnp.result_type(outputs[j] if count else inputs[i])))
    return out, entries, rest


# One program where values are known, instead of one for each operation.
@partial(jax.jit, static_argnames="dtype", inline=True)
def _gather_entries(parts: list[tuple[Any, Any, Any]], order: Any, dtype: Any) -> jax.Array:
    """Return the entries of matrices, at the rows and columns that come with each, as one array in this order."""
    found = [
        matrix.at[rows, cols].get(mode="promise_in_bounds", wrap_negative_indices=False).astype(dtype)
        for matrix, rows, cols in parts
    ]
    if order is None:
        return found[0]
    return jnp.concatenate(found).at[order].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _products(
    product: Callable[[list[Any]], Any], arrays: list[Any], colors: np.ndarray, count: int, chunk_size: int | None
) -> list[Any]:
    """Return for each output array the products with the sum of the unit vectors of each colour, one in a row."""
    if not count:
        return []
    starts = starts_of(arrays)
    # XLA repeats a comparison with a colour wherever its result is used, which took twice the time of a constant.
    known = count * len(colors) <= _CONSTANT
    seeds: Any = colors == np.arange(count)[:, None] if known else np.arange(count)
    if seeds.size > _FOLDED:
        seeds = jax.lax.optimization_barrier(jnp.asarray(seeds))

    def of_color(seed: Any) -> list[Any]:
        ones, units = seed if known else colors == seed, []
        for start, x in zip(starts, arrays, strict=False):
            part = jnp.asarray(ones[start : start + jnp.size(x)], jnp.result_type(x))
            units.append(sharded_like(part.reshape(jnp.shape(x)), x))
        return [unsharded(leaf).reshape(-1) for leaf in jax.tree.leaves(product(units))]

    return map_slices(of_color, seeds, 0, chunk_size)

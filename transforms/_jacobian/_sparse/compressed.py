"""Compute a sparse Jacobian: a few products, the entries read from them, and the `BCOO` that holds the entries."""

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
from ..._core.compat import sparse_matrix
from ..dense import DENSE, check_real, map_slices, sharded_like, sizes_of, unsharded
from ..mode import Compute, Evaluator, ModeChoice, dense_evaluator, output_shapes, refused_modes
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

# The largest number of elements that XLA may constant-fold: it evaluates linear functions of constants, such as of the
# seeds (sums of unit vectors), while it compiles, but slowly.
_FOLDED = 2**20


def sparse_evaluator(
    api: str, call: Call, nest: Callable[[Any, Any], Any], sparsity: Any, check: bool, mode: str, symmetric: bool
) -> tuple[Evaluator, ModeChoice]:
    """Return the `Evaluator` of a Jacobian as `BCOO`, with the entries of a pattern, and the choice with its reason.

    Args:
      api: the transform's name in errors.
      call: the call to differentiate.
      nest: a function that arranges values, one for each pair of an output and an input array, as the result.
      sparsity: "auto" or a pattern.
      check: whether to compare the result with a product.
      mode: "auto", "forward" or "reverse".
      symmetric: whether the Jacobian is symmetric if it is square, like the Jacobian of a gradient.
    """
    out = output_shapes(api, call)
    outputs, inputs = jax.tree.leaves(out), jax.tree.leaves(call.primals)
    shape = sum(sizes_of(outputs)), sum(sizes_of(inputs))
    modes: tuple[str, ...] = (mode,)
    if mode == "auto":
        refused = refused_modes(call, out)
        modes = tuple(each for each in DENSE if each not in refused)
    checked = partial(verify, modes[0]) if check else None
    choice = partial(ModeChoice, inputs=shape[1], outputs=shape[0], flops=None)
    # A dense Jacobian takes a product for each input (forward) or each output (reverse).
    alone = {"forward": cost(shape[1], 0), "reverse": cost(0, shape[0])}
    cheapest = min(modes, key=alone.__getitem__)

    def dense(pattern: Pattern, why: str) -> tuple[Evaluator, ModeChoice]:
        evaluator = dense_evaluator(api, call, cheapest)
        compute = partial(_sparse, pattern, partial(_of_dense, pattern, evaluator.compute), checked)
        return Evaluator(compute, evaluator.slices), choice(cheapest, why=why)

    try:
        if isinstance(sparsity, str):
            pattern = found_pattern(api, call, modes[0])
        else:
            form = jax.tree.structure(nest(out, [[0] * len(inputs)] * len(outputs)))
            pattern = given_pattern(api, sparsity, form, outputs, inputs)
    except UnknownPattern as reason:
        warnings.warn(
            f"{api}: the pattern cannot be found, so all entries are computed and kept: {reason}. Pass the pattern as "
            "sparsity=, or leave sparsity out for a dense array.",
            stacklevel=4,
        )
        return dense(full_pattern(shape), f"the pattern cannot be found: {reason}")
    if symmetric and shape[0] == shape[1]:
        coloring = symmetric_coloring_of(pattern, modes[0])
    else:
        coloring = coloring_of(pattern, modes)
    count = coloring.counts
    if cost(*count) >= alone[cheapest]:
        return dense(pattern, f"a dense Jacobian takes no more than {sum(count)} products")
    compute = partial(_sparse, pattern, partial(_of_products, pattern, coloring), checked)
    found = "both" if all(count) else "reverse" if count[1] else "forward"
    why = f"{count[0]} products in forward and {count[1]} in reverse mode give all {len(pattern.rows)} entries"
    return Evaluator(compute, lambda: max(1, *count)), choice(found, why=why, colors=count)


def _sparse(
    pattern: Pattern,
    entries_of: Compute,
    check: Callable[..., None] | None,
    api: str,
    call: Call,
    chunk_size: int | None,
) -> tuple[Any, list[list[Any]], Any]:
    """Return the same as `by_columns`, with a `BCOO` in place of each array."""
    out, entries, rest = entries_of(api, call, chunk_size)
    outputs, inputs = jax.tree.leaves(out), jax.tree.leaves(call.primals)
    if check is not None:
        check(api, call, out, pattern, entries)
    blocks: list[list[Any]] = [[] for _ in outputs]
    for j, i, _, (rows, cols) in blocks_of(pattern, outputs, inputs):
        shape, data = jnp.shape(outputs[j]) + jnp.shape(inputs[i]), entries[j][i]
        # If every entry is kept, XLA computes the indices: a constant would be as long as the data.
        full = 0 < len(data) == math.prod(shape)
        flat = jnp.arange(len(data)) if full else rows * jnp.size(inputs[i]) + cols
        indices = flat[:, None] // strides_of(shape) % np.array(shape, np.int64)
        blocks[j].append(sparse_matrix(data, jnp.asarray(indices, np.int32), shape))
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

    pushed = _products(
        lambda seed: push(*jax.tree.unflatten(treedef, seed)), inputs, coloring.columns, count, chunk_size
    )
    pulled = _products(lambda seed: pull(jax.tree.unflatten(form, seed)), outputs, coloring.rows, number, chunk_size)
    entries: Entries = [[] for _ in outputs]
    for j, i, chosen, (rows, cols) in blocks_of(pattern, outputs, inputs):
        by_row, product = coloring.by_row[chosen], coloring.product[chosen]
        dtype = jnp.result_type(outputs[j] if count else inputs[i])
        # A symmetric Jacobian has products of one kind, from which mirror images of entries are read too.
        read_by_row, read_by_column = pushed or pulled, pulled or pushed
        if read_by_row is read_by_column and i == j and read_by_row:
            parts = [(read_by_row[j], product, np.where(by_row, rows, cols))]
        else:
            both = (read_by_row, j, by_row, rows), (read_by_column, i, ~by_row, cols)
            parts = [(matrices[k], product[here], places[here]) for matrices, k, here, places in both if here.any()]
        read = [matrix.at[k, places].get(mode="promise_in_bounds").astype(dtype) for matrix, k, places in parts]
        found = jnp.concatenate(read) if read else jnp.zeros(0, dtype)
        if len(parts) == 2:  # entries read by row come first, so restore the order
            found = found[np.argsort(np.argsort(~by_row, stable=True))]
        entries[j].append(found)
    return out, entries, rest


def _products(
    product: Callable[[list[Any]], Any], arrays: list[Any], colors: np.ndarray, count: int, chunk_size: int | None
) -> list[Any]:
    """Return for each output array its products with the sum of the unit vectors of each color, one per row."""
    if not count:
        return []
    starts = starts_of(arrays)
    known: Any = colors
    if count * len(colors) > _FOLDED:
        known = jax.lax.optimization_barrier(jnp.asarray(colors))
    seeds = known == np.arange(count)[:, None]

    def of_color(ones: Any) -> list[Any]:
        units = []
        for start, x in zip(starts, arrays, strict=False):
            part = ones[start : start + jnp.size(x)].astype(jnp.result_type(x))
            units.append(sharded_like(part.reshape(jnp.shape(x)), x))
        return [unsharded(leaf).reshape(-1) for leaf in jax.tree.leaves(product(units))]

    return map_slices(of_color, seeds, 0, chunk_size)

"""Sums over examples of squares: of the entries of gradients, and of vectors, whose squares are matrices xxᵀ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._statistics.use_gradients import OutputGradients
from ..privacy._per_example.gradient_forms import Dense, OuterProduct, RowSparse, wide, widened

WeightSharing = Literal["expand", "reduce"]
# A larger side of a Kronecker product, such as a vocabulary, is kept as its diagonal.
_LARGEST_SIDE = 4096
# A symmetric product of this size or more is computed in blocks, of which those below the diagonal are transposes.
_IN_BLOCKS = 1024


def sum_of_squares(parts: Sequence[OutputGradients]) -> jax.Array:
    """Return the sum of squared gradients over examples and columns: shape (stack, p, d), or like a materialized one.

    Args:
      parts: gradients of the same parameter, which are added before they are squared.
    """
    first, arrays, mapped = parts[0]
    if isinstance(first, Dense):
        return jnp.square(widened(arrays[0])).sum((0, 1) if mapped[0] else 0)
    if isinstance(first, OuterProduct) and arrays[0].shape[-2] == len(parts) == 1 and not mapped[0]:
        # For one position the squares are (A²)ᵀG².
        left, right = (jnp.square(widened(x)) for x in arrays)
        right = right.sum(1) if mapped[1] else right
        return jnp.einsum("istp,istd->spd", left, right, precision="highest")

    every = [part.arrays for part in parts]
    of_example = partial(_squares_of_example, parts)
    like = jax.eval_shape(of_example, jax.tree.map(lambda x: x[0], every))

    def step(total: jax.Array, own: list[list[jax.Array]]) -> tuple[jax.Array, None]:
        return total + of_example(own), None

    return lax.scan(step, jnp.zeros(like.shape, like.dtype), every)[0]


def weighted_products(parts: Sequence[OutputGradients], weights: jax.Array) -> jax.Array:
    """Return the weighted inner products of each example's gradients for all pairs of columns.

    Args:
      parts: gradients of the same parameter, which are added before they are multiplied.
      weights: a weight for each entry, shape (stack, p, d).

    Returns:
      Shape (examples, columns, columns).
    """
    first, arrays, mapped = parts[0]
    if isinstance(first, OuterProduct) and arrays[0].shape[-2] == len(parts) == 1 and not mapped[0]:
        left, right = (widened(x)[..., 0, :] for x in arrays)
        right = right if mapped[1] else right[:, None]
        of_right = jnp.einsum("isp,spd->isd", jnp.square(left), weights, precision="highest")
        return jnp.einsum("icsd,isd,iesd->ice", right, of_right, right, precision="highest")
    roots = jnp.sqrt(weights)

    def of_example(own: list[list[jax.Array]]) -> jax.Array:
        each = _sum_of_example(parts, own) * roots
        flat = each.reshape(len(each), -1)
        return jnp.matmul(flat, flat.T, precision="highest")

    return lax.map(of_example, [part.arrays for part in parts])


def _squares_of_example(parts: Sequence[OutputGradients], own: list[list[jax.Array]]) -> jax.Array:
    """Return the sum over columns of the squared entries of one example's gradient: shape (stack, p, d)."""
    return jnp.square(_sum_of_example(parts, own)).sum(0)


def _sum_of_example(parts: Sequence[OutputGradients], own: list[list[jax.Array]]) -> jax.Array:
    """Return one example's gradient for each column: shape (columns, stack, p, d)."""
    total: jax.Array = jnp.zeros(())
    for (form, _, mapped), arrays in zip(parts, own, strict=True):
        total = total + _gradients(form, [x if has else x[None] for x, has in zip(arrays, mapped, strict=True)])
    return total


def _gradients(form: OuterProduct | RowSparse | Dense, arrays: list[jax.Array]) -> jax.Array:
    """Return one example's gradients for each column: shape (columns, stack, p, d)."""
    assert not isinstance(form, Dense)
    one, other = arrays
    if isinstance(form, OuterProduct):
        return jnp.einsum("cstp,cstd->cspd", widened(one), widened(other), precision="highest")
    columns, stack = other.shape[:2]
    rows = jnp.broadcast_to(one, other.shape[:3])
    table = jnp.zeros((columns, stack, form.height, other.shape[3]), wide(other.dtype))
    at = jnp.arange(columns)[:, None, None], jnp.arange(stack)[None, :, None], rows
    return table.at[at].add(widened(other))


def second_moments(x: jax.Array, sharing: WeightSharing, *, mean: bool) -> jax.Array:
    """Return the sum of xxᵀ over examples, columns and positions, or its diagonal: shape (stack, size, size).

    Args:
      x: shape (examples, columns, stack, positions, size).
      sharing: as for `kfac`.
      mean: whether to take the mean over positions, as for activations, instead of the sum.
    """
    positions = max(1, x.shape[3])
    if sharing == "reduce":
        x = x.sum(3, keepdims=True) / (positions if mean else 1)
    flat = x.transpose(2, 0, 1, 3, 4).reshape(x.shape[2], -1, x.shape[4])
    if x.shape[4] > _LARGEST_SIDE:
        total = jnp.square(flat).sum(1)
    elif len(flat) == 1:  # a product of matrices: XLA on CPU copies arrays with axes of size 1
        total = _symmetric(flat[0])[None]
    else:
        total = jnp.einsum("snp,snq->spq", flat, flat, precision="highest")
    return total / positions if mean and sharing == "expand" else total


def _symmetric(x: jax.Array) -> jax.Array:
    """Return xᵀx, with the blocks below the diagonal from those above."""
    size = x.shape[1]
    if size < _IN_BLOCKS:
        return jnp.matmul(x.T, x, precision="highest")
    one, other = x[:, : size // 2], x[:, size // 2 :]
    above = jnp.matmul(one.T, other, precision="highest")
    return jnp.block([[_symmetric(one), above], [above.T, _symmetric(other)]])


def one_hot_moments(rows: jax.Array, height: int, sharing: WeightSharing) -> jax.Array:
    """Return the diagonal of the sum of aaᵀ for one-hot a: shape (stack, height).

    Args:
      rows: the row of the table at each position, shape (examples, stack, positions).
      height: the number of rows.
      sharing: as for `kfac`.
    """
    stack = jnp.broadcast_to(jnp.arange(rows.shape[1])[None, :, None], rows.shape)
    dtype = jnp.result_type(float)
    part = jnp.asarray(1 / max(1, rows.shape[2]), dtype)
    if sharing == "reduce":  # the mean of one-hot vectors has the share of each row
        part = (rows[..., :, None] == rows[..., None, :]).sum(-1) * part**2
    return jnp.zeros((rows.shape[1], height), dtype).at[stack, rows].add(part)

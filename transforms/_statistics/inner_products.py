"""Inner products of the gradients at a parameter use, for all pairs of an example of one batch and one of another.

With activations A and cotangents G at T positions, the gradient of an example is AᵀG. Its inner product with that of
another example is computed in the way of fewest operations:

- "positions": ⟨AᵢAⱼᵀ, GᵢGⱼᵀ⟩. With one position these are two small products for all pairs.
- "contraction": (AᵢAⱼᵀ)Gⱼ, and its inner product with Gᵢ; with many outputs it is cheaper than "positions".
- "blocks": AᵢᵀGᵢ, materialized for some rows of the parameter at a time, and the inner products of these.

With several outputs, each output has cotangents of its own, and all share the activations (arXiv 2206.08720).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import varying, varying_axes
from ..privacy._per_example.gradient_forms import Dense, RowSparse, widened
from .use_gradients import OutputGradients

Way = Literal["positions", "contraction", "blocks"]

# The most numbers of a temporary array, unless the activations or cotangents have more.
_TEMPORARY = 2**22


class Factors(NamedTuple):
    """The gradients of a matrix for each example and output.

    Attributes:
      left: the activations, shape (batch, stack, positions, p); or the rows of a table that are read, shape (batch,
        stack, positions).
      right: the cotangents, shape (batch, outputs, stack, positions, d).
      height: the number p of rows of the matrix.
    """

    left: jax.Array
    right: jax.Array
    height: int

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Return some rows of each gradient: shape (batch, outputs, stack, size, d); rows past the last are zero."""
        if self.left.ndim == 4:
            missing = -self.height % size
            left = jnp.pad(self.left, [(0, 0)] * 3 + [(0, missing)]) if missing else self.left
            left = lax.dynamic_slice_in_dim(left, start, size, axis=3) if size < left.shape[3] else left
            if self.right.shape[1] > 1:
                return jnp.einsum("istp,iostd->iospd", left, self.right, precision="highest")
            # XLA on CPU copies arrays with axes of size 1.
            flat = (x.reshape(-1, *x.shape[-2:]) for x in (left, self.right))
            found = jnp.einsum("btp,btd->bpd", *flat, precision="highest")
            return found.reshape(len(left), 1, left.shape[1], *found.shape[1:])

        def added(rows: jax.Array, right: jax.Array) -> jax.Array:
            """Add the cotangents of one example, output and layer of the stack to their rows."""
            return jnp.zeros((size, right.shape[-1]), right.dtype).at[rows].add(right, mode="drop")

        rows = self.left - start
        rows = jnp.where(rows < 0, size, rows)  # a negative index would count from the end
        of_stack = jax.vmap(added)
        return jax.vmap(jax.vmap(of_stack, (None, 0)))(rows, self.right)

    def between_positions(self, other: Factors) -> jax.Array:
        """Return the inner products of activations: shape (stack, batch, positions, other batch, other positions)."""
        if self.left.ndim == 4:
            return jnp.einsum("istp,jsup->sitju", self.left, other.left, precision="highest")
        left, right = self.left.swapaxes(0, 1), other.left.swapaxes(0, 1)
        return (left[..., None, None] == right[:, None, None]).astype(self.right.dtype)


def products(one: OutputGradients, other: OutputGradients | None) -> jax.Array:
    """Return the inner products of the gradients of all pairs of outputs: shape (batch, other batch, outputs, outputs).

    Args:
      one: the gradients at a use for one batch.
      other: those for the other; None if it is the same.
    """
    if isinstance(one.form, Dense):
        held = vectors(one)
        return _of_vectors(held, held if other is None else vectors(other))
    factors = factors_of(one)
    found = _of_factors(factors, None if other is None else factors_of(other))
    if not one.both_have_outputs():
        return found
    # Each output was an example of its own.
    n, m = len(one.arrays[0]), len((other or one).arrays[0])
    return found.reshape(n, one.arrays[0].shape[1], m, one.arrays[0].shape[1]).swapaxes(1, 2)


def traces(one: OutputGradients, other: OutputGradients | None) -> jax.Array:
    """Return the sum over outputs of the inner products of their gradients: shape (batch, other batch)."""
    if one.both_have_outputs():
        return jnp.trace(products(one, other), axis1=2, axis2=3)

    # ΣₒGᵢₒGⱼₒᵀ is a product of matrices that have the cotangents of all outputs side by side.
    def joined(part: OutputGradients) -> Factors:
        factors = factors_of(part)
        n, o, stack, positions, d = factors.right.shape
        right = factors.right.transpose(0, 2, 3, 1, 4).reshape(n, 1, stack, positions, o * d)
        return factors._replace(right=right)

    if isinstance(one.form, Dense):
        held = [vectors(part).reshape(len(part.arrays[0]), 1, -1) for part in (one, other or one)]
        return _of_vectors(*held)[:, :, 0, 0]
    return _of_factors(joined(one), None if other is None else joined(other))[:, :, 0, 0]


def factors_of(part: OutputGradients) -> Factors:
    """Return the factors of gradients that are not materialized, in float32 or wider."""
    form, right = part.form, widened(part.arrays[1])
    has_left, has_right = part.has_outputs
    if isinstance(form, RowSparse):
        return Factors(part.arrays[0], right if has_right else right[:, None], form.height)
    left = widened(part.arrays[0])
    dtype = jnp.promote_types(left.dtype, right.dtype)
    left, right = left.astype(dtype), right.astype(dtype)
    if not has_left:
        return Factors(left, right if has_right else right[:, None], left.shape[-1])
    # Each output is an example of its own.
    right = right if has_right else jnp.broadcast_to(right[:, None], (*left.shape[:2], *right.shape[1:]))
    left = left.reshape(-1, *left.shape[2:])
    return Factors(left, right.reshape(-1, 1, *right.shape[2:]), left.shape[-1])


def vectors(part: OutputGradients) -> jax.Array:
    """Return materialized gradients as real vectors in float32 or wider: shape (batch, outputs, numbers)."""
    x = widened(part.arrays[0])
    x = x if part.has_outputs[0] else x[:, None]
    x = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    return jnp.concatenate([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def _of_vectors(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the inner products of vectors: shape (batch, other batch, outputs, other outputs)."""
    (n, o, _), (m, q, size) = one.shape, other.shape
    found = jnp.matmul(one.reshape(n * o, size), other.reshape(m * q, size).T, precision="highest")
    return found.reshape(n, o, m, q).swapaxes(1, 2)


def _of_factors(one: Factors, other: Factors | None) -> jax.Array:
    """Return the inner products of gradients: shape (batch, other batch, outputs, other outputs).

    Args:
      one: the gradients of one batch.
      other: those of the other; None if it is the same.
    """
    return {"positions": _by_positions, "contraction": _by_contraction, "blocks": _by_blocks}[way(one, other)](
        one, other
    )


def way(one: Factors, other: Factors | None) -> Way:
    """Return the way of fewest multiplications."""
    both = one.right.shape, (one if other is None else other).right.shape
    (n, o, _, t, d), (m, q, _, u, _), p = *both, one.height
    multiplied = p if one.left.ndim == 4 else 0  # rows of a table are compared, or added
    ways: dict[Way, int] = {
        "positions": n * m * t * u * (multiplied + o * q * (d + 1)),
        "contraction": n * m * t * (u * multiplied + q * d * (u + o)),
        "blocks": (n * o * t + (m * q * u if other is not None else 0)) * max(multiplied, 1) * d
        + n * m * o * q * p * d,
    }
    return min(ways, key=ways.__getitem__)


def _by_positions(one: Factors, other: Factors | None) -> jax.Array:
    """Return ⟨AᵢAⱼᵀ, GᵢGⱼᵀ⟩."""
    other = one if other is None else other

    def of_some(some: Factors) -> jax.Array:
        activations = some.between_positions(other)
        if some.right.shape[2:4] == other.right.shape[2:4] == (1, 1):  # products of matrices, without axes of size 1
            cotangents = jnp.einsum(
                "iod,jqd->ijoq", some.right[:, :, 0, 0], other.right[:, :, 0, 0], precision="highest"
            )
            return activations[0, :, 0, :, 0, None, None] * cotangents
        cotangents = jnp.einsum("iostd,jqsud->sitjuoq", some.right, other.right, precision="highest")
        return jnp.einsum("sitju,sitjuoq->ijoq", activations, cotangents, precision="highest")

    (_, o, stack, t, _), (m, q, _, u, _) = one.right.shape, other.right.shape
    return _in_slices(of_some, one, stack * t * m * u * o * q)


def _by_contraction(one: Factors, other: Factors | None) -> jax.Array:
    """Return ⟨(AᵢAⱼᵀ)Gⱼ, Gᵢ⟩."""
    other = one if other is None else other

    def of_some(some: Factors) -> jax.Array:
        moved = jnp.einsum("sitju,jqsud->sijqtd", some.between_positions(other), other.right, precision="highest")
        return jnp.einsum("sijqtd,iostd->ijoq", moved, some.right, precision="highest")

    (_, _, stack, t, d), (m, q, _, u, _) = one.right.shape, other.right.shape
    return _in_slices(of_some, one, stack * t * m * max(u, q * d))


def _in_slices(of_some: Callable[[Factors], jax.Array], one: Factors, numbers: int) -> jax.Array:
    """Compute the inner products for some examples of the first batch at a time.

    Args:
      of_some: returns the inner products of some examples, which are along axis 0.
      one: all examples of the first batch.
      numbers: the size of the temporary arrays for one of them.
    """
    size = len(one.left)
    at_once = max(1, _room(one) // max(1, numbers))
    if at_once >= size:
        return of_some(one)
    while size % at_once:
        at_once -= 1

    def of_slice(arrays: tuple[jax.Array, jax.Array]) -> jax.Array:
        return of_some(one._replace(left=arrays[0], right=arrays[1]))

    split = (x.reshape(size // at_once, at_once, *x.shape[1:]) for x in (one.left, one.right))
    found = lax.map(of_slice, tuple(split))
    return found.reshape(size, *found.shape[2:])


def _by_blocks(one: Factors, other: Factors | None) -> jax.Array:
    """Return the sum over blocks of rows of the inner products of materialized gradients."""
    second = one if other is None else other

    def of_block(start: jax.Array | int) -> jax.Array:
        blocks = [
            x.block(start, size).reshape(*x.right.shape[:2], -1) for x in ((one,) if other is None else (one, other))
        ]
        return _of_vectors(blocks[0], blocks[-1])

    size = block_size(one, second)
    starts = range(0, one.height, size)
    if len(starts) == 1:
        return of_block(0)
    shape = len(one.left), len(second.left), one.right.shape[1], second.right.shape[1]
    axes = frozenset[str]().union(*map(varying_axes, [*one[:2], *second[:2]]))
    zeros = varying(jnp.zeros(shape, one.right.dtype), axes)
    return lax.scan(lambda total, start: (total + of_block(start), None), zeros, jnp.array(starts))[0]


def block_size(*batches: Factors) -> int:
    """Return how many rows of a matrix to materialize at a time for the gradients of all these batches."""
    n, o, stack, _, d = max((x.right.shape for x in batches), key=lambda shape: shape[0] * shape[1])
    size = max(1, _room(*batches) // max(1, n * o * stack * d))
    count = -(-batches[0].height // size)
    return -(-batches[0].height // max(1, count))  # blocks of about equal size


def _room(*batches: Factors) -> int:
    """Return the most numbers of a temporary array."""
    return max(_TEMPORARY, *(x.left.size + x.right.size for x in batches))

"""`ekfac`: Kronecker factors with corrected eigenvalues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core.arguments import Argnums
from .._statistics.statistic import Statistic
from .._statistics.use_gradients import OutputGradients
from ..privacy._per_example.gradient_forms import Dense, OuterProduct, RowSparse, widened
from ._blocks import EigenBlock
from ._kfac import CurvatureReport, Parts, kronecker_factors
from ._outputs import Fisher
from ._reduction import ReductionName
from ._squares import WeightSharing, sum_of_squares


def ekfac(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    fisher: Fisher = "mc",
    weight_sharing: WeightSharing = "expand",
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    check_loss: bool = True,
    reduction: ReductionName = "mean",
) -> Statistic[CurvatureReport]:
    """Compute Kronecker factors with corrected eigenvalues of the Gauss-Newton matrix of a model.

    The eigenvectors of each block are those of A ⊗ G, as `kfac` returns it. The eigenvalues are the diagonal of the
    block itself in the basis of these vectors: the means over examples of the squared coordinates of gradients. So the
    trace is that of the block, and among all matrices with these eigenvectors none is closer to it.

    Args:
      model: as for `ggn_diagonal`.
      loss: as for `ggn_diagonal`.
      argnums: as for `ggn_diagonal`.
      fisher: as for `kfac`.
      weight_sharing: as for `kfac`, for the eigenvectors; the eigenvalues do not depend on it otherwise.
      chunk_size: the number of examples to compute at a time.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.
      check_loss: as for `ggn_diagonal`.
      reduction: as for `ggn_diagonal`.

    Returns:
      A function of (params, x, y, key=None, basis=None) that returns `KroneckerFactors`, as for `kfac`. `basis`, the
      factors that `kfac` or `ekfac` returned for other batches, has the eigenvectors to use instead of the batch's own:
      results with one basis can be averaged exactly. The sum of results with different bases has the eigenvectors of
      the sums of their sides, and keeps the trace. Its `.explain(*args)` reports the blocks.

    Raises:
      TypeError, ValueError: as for `kfac`; a basis of other parameters.

    Cost:
      That of `kfac`, a second pass like the first, an eigendecomposition of each side, and, where a parameter is used
      at several positions, its gradient for one example and all columns at a time. With `basis` there is one pass.

    Source:
      George et al. 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.curvature import ekfac, ggn_diagonal
      >>> model, loss = lambda w, x: jnp.tanh(x @ w), lambda o, y: 0.5 * jnp.mean((o - y) ** 2)
      >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.zeros((2, 1))
      >>> factors = ekfac(model, loss, fisher="exact")(*args)
      >>> print(f"{factors.trace():.6f} {ggn_diagonal(model, loss)(*args).sum():.6f}")
      0.000681 0.000681
    """
    options = fisher, weight_sharing, chunk_size, memory_budget, check_loss, reduction
    return kronecker_factors("ekfac", model, loss, argnums, *options, _values)


def _values(basis: EigenBlock, parts: Parts) -> jax.Array:
    """Return the sums over examples and columns of the squared coordinates of gradients: shape (stack, p, d)."""
    first = parts[0][0]
    if isinstance(first.form, Dense):
        each = widened(first.arrays[0]).reshape(-1, *basis.shape)
        return jnp.square(jax.vmap(lambda x: basis.rotated(basis.split(x)))(each)).sum(0)
    return sum_of_squares([in_basis(basis, part, axes) for part, axes in parts])


def in_basis(basis: EigenBlock, part: OutputGradients, axes: Any) -> OutputGradients:
    """Return gradients in the basis of eigenvectors."""
    form, arrays, mapped = part
    stack, *sides = axes
    if stack != basis.axes[0] or {*sides} != {*basis.axes[1:]}:  # then the gradients are materialized
        raise ValueError("KroneckerFactors: the blocks have other sides than the uses of the parameters in this model.")
    if isinstance(form, RowSparse):
        right = _coordinates(widened(arrays[1]), basis.right)
        if basis.left.ndim == 2:
            return OutputGradients(form, [arrays[0], right], mapped)
        # The coordinates of a unit vector are a row of the matrix of eigenvectors.
        left = basis.left[jnp.arange(len(basis.left))[:, None], arrays[0]]
    else:
        arrays, mapped = (arrays, mapped) if axes == basis.axes else (arrays[::-1], mapped[::-1])
        left, right = (
            _coordinates(widened(x), side) for x, side in zip(arrays, (basis.left, basis.right), strict=True)
        )
    return OutputGradients(OuterProduct(left, right, lambda x: x, None), [left, right], mapped)


def _coordinates(x: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return the coordinates of vectors by eigenvectors: shape (..., stack, positions, size)."""
    return x if vectors.ndim == 2 else jnp.matmul(x, vectors, precision="highest")

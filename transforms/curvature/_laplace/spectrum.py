"""`Spectrum`: a matrix over all parameters together, by its eigenvectors: the Gauss-Newton matrix, or a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.tree_util import register_dataclass

from ..._core.compat import Tracer
from ..._core.eigh import eigh
from ..._curvature.products import gnvp
from ..._models.split_model import is_module
from ...privacy._per_example.gradient_forms import wide
from ...privacy._per_example.loss import PerExample, per_example
from .._outputs import ModelAndLoss

# A matrix over all parameters may have this many rows.
_MOST = 8192


@register_dataclass
@dataclass(frozen=True)
class Spectrum:
    """A symmetric, positive semi-definite matrix D over all parameters, with zero outside of some eigenvectors.

    Vectors are pytrees like the parameters.

    Attributes:
      values: the eigenvalues, shape (rank,).
      vectors: the eigenvectors as rows, shape (rank, numbers), in the order of `jax.flatten_util.ravel_pytree`.
      structure: the tree structure of the parameters.
    """

    values: jax.Array
    vectors: jax.Array
    structure: Any = field(metadata={"static": True})

    def matvec(self, v: Any) -> Any:
        """Return D v."""
        return self._spectral(lambda e: e, v)

    def solve(self, v: Any, damping: Any) -> Any:
        """Return (D + damping I)⁻¹ v."""
        return self._spectral(lambda e: 1 / (e + damping), v)

    def sqrt_solve(self, v: Any, damping: Any) -> Any:
        """Return (D + damping I)^(-1/2) v with the symmetric root."""
        return self._spectral(lambda e: lax.rsqrt(e + damping), v)

    def eigenvalues(self) -> jax.Array:
        """Return all eigenvalues, shape (numbers,)."""
        rank, size = self.vectors.shape
        return jnp.concatenate([self.values, jnp.zeros(size - rank, self.values.dtype)])

    def _spectral(self, fun: Callable[[jax.Array], jax.Array], v: Any) -> Any:
        """Return the product with a function of D, which acts on its eigenvalues."""
        flat, unravel = ravel_pytree(v)
        within = jnp.matmul(self.vectors, flat, precision="highest")
        if self.vectors.shape[0] == self.vectors.shape[1]:
            return unravel(jnp.matmul(fun(self.values) * within, self.vectors, precision="highest"))
        other = fun(jnp.zeros((), self.values.dtype))
        return unravel(
            other * flat + jnp.matmul((fun(self.values) - other) * within, self.vectors, precision="highest")
        )


def whole(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    params: Any,
    batches: Sequence[tuple[Any, Any]],
    *,
    argnums: Any = 0,
) -> Spectrum:
    """Return the Gauss-Newton matrix over all parameters together, for all batches."""
    both = ModelAndLoss("laplace", model, loss, argnums)

    @jax.jit
    def of_batch(params: Any, x: Any, y: Any) -> jax.Array:
        batch, _ = both.of((params, x, y), None, samples=False)
        of, numbers = batch.outputs, numbers_of(batch.outputs)
        columns = jnp.eye(batch.hessian.columns)

        def add(total: jax.Array, example: list[Any]) -> tuple[jax.Array, None]:
            values, pull, _ = jax.vjp(lambda p: of.loss(p, example[: len(of.examples)]), of.parameters, has_aux=True)
            seeds = batch.columns(values, example, columns)
            rows = jax.vmap(lambda seed: _flat(pull(seed.astype(values.dtype))[0], numbers))(seeds)
            return total + jnp.matmul(rows.T, rows, precision="highest"), None

        like = _flat(of.parameters, numbers)
        return lax.scan(add, jnp.zeros((like.size, like.size), like.dtype), batch.examples)[0]

    of, structure = parameters_of("laplace", model, params, batches[0][0], argnums)
    size = sum(x.size for x in of.parameters)
    if size > _MOST:
        fewer = ", or name fewer parameters by wrt" if is_module(params) else ""
        raise ValueError(
            f"laplace: the whole matrix would have {size:,} rows, but at most {_MOST:,} are stored; take another "
            f"structure{fewer}."
        )
    total = sum((of_batch(params, *batch) for batch in batches[1:]), of_batch(params, *batches[0]))
    values, vectors = eigh(total / sum(len(jax.tree.leaves(x)[0]) for x, _ in batches))
    return Spectrum(jnp.maximum(values, 0), vectors.T, structure)


def lanczos(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    params: Any,
    batches: Sequence[tuple[Any, Any]],
    *,
    rank: int,
    key: Any,
    argnums: Any = 0,
) -> Spectrum:
    """Return the largest eigenvalues of the Gauss-Newton matrix of all batches, by products with vectors."""
    try:
        from matfree import decomp, eig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "laplace: structure='ggn_lanczos' needs matfree; install it with: pip install 'plurax[curvature]'"
        ) from error
    of, structure = parameters_of("laplace", model, params, batches[0][0], argnums)
    numbers, total = numbers_of(of), sum(len(jax.tree.leaves(x)[0]) for x, _ in batches)
    of_call = partial(per_example("laplace", model, argnums, 1), scalar=False)
    unflatten = ravel_pytree([of.parameters[i].astype(wide(of.parameters[i].dtype)) for i in numbers])[1]

    @jax.jit
    def of_batch(params: Any, v: jax.Array, x: Any, y: Any) -> jax.Array:
        of = of_call(False, True, None, (params, x), {})
        in_order = dict(zip(numbers, unflatten(v), strict=True))
        tangents = tuple(in_order[i].astype(x.dtype) for i, x in enumerate(of.parameters))

        def outputs(*parameters: Any) -> jax.Array:
            return jax.vmap(lambda example: of.loss(list(parameters), example)[0])(of.examples)

        found = gnvp(outputs, lambda outputs: loss(outputs, y), tuple(of.parameters), tangents)
        return _flat(list(found), numbers) * of.size

    def product(v: jax.Array) -> jax.Array:
        return sum((of_batch(params, v, *batch) for batch in batches), jnp.zeros_like(v)) / total

    size = sum(x.size for x in of.parameters)
    start = jax.random.normal(key, (size,), _flat(of.parameters, numbers).dtype)
    _, vectors = eig.eigh_partial(decomp.tridiag_sym(min(rank, size)))(product, start)
    # If the rank of the matrix is smaller, some of these are not orthogonal. So the matrix is projected to their span.
    basis = jnp.linalg.qr(jnp.nan_to_num(vectors).T)[0]
    projected = jnp.matmul(basis.T, lax.map(product, basis.T).T, precision="highest")
    values, inside = eigh((projected + projected.T) / 2)
    if not isinstance(values, Tracer) and values[0] < -1e-3 * jnp.abs(values).max():
        raise ValueError("laplace: the Hessian of the loss by the outputs is indefinite; pass a convex loss.")
    return Spectrum(jnp.maximum(values, 0), jnp.matmul(basis, inside, precision="highest").T, structure)


def parameters_of(api: str, model: Callable[..., Any], params: Any, x: Any, argnums: Any) -> tuple[PerExample, Any]:
    """Return the model for each example, and the tree structure of gradients by its parameters."""
    of = partial(per_example(api, model, argnums, 1), scalar=False)(False, True, None, (params, x), {})
    return of, jax.tree.structure(tree_of(of, of.parameters))


def tree_of(of: PerExample, leaves: Sequence[Any]) -> Any:
    """Return arrays for the parameters as a pytree like the gradients."""
    return of.gradients(list(leaves), True)


def numbers_of(of: PerExample) -> list[int]:
    """Return the index of the parameter at each leaf of a pytree like the gradients."""
    return jax.tree.leaves(of.numbers(True))


def _flat(leaves: Sequence[jax.Array], numbers: Sequence[int]) -> jax.Array:
    """Return arrays for the parameters as a vector in the order of the gradients, in float32 or wider."""
    return jnp.concatenate([leaves[i].ravel().astype(wide(leaves[i].dtype)) for i in numbers])

"""Eigendecompositions in float64, which do not block a program on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def eigh(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the eigenvalues of one symmetric matrix, shape (size, size), and its eigenvectors as columns.

    The error of each eigenvalue is a rounding error of the largest one. In float32, it would exceed the eigenvalues of
    parameters whose inputs are 3,000 times as small as others. So the decomposition of a float32 matrix is computed in
    float64, except on a TPU, and then rounded. The derivative is computed in the dtype of the matrix.

    For several matrices, map it. On a CPU, `jnp.linalg.eigh` divides a batch among the threads of the pool that runs
    the program, and one of them waits. If as many batches as there are threads are decomposed at the same time, all
    threads wait for ever (seen with jax 0.10.2: two batches, two cores). So they are decomposed one after another.
    """
    return _of_one(matrix)


@eigh.defjvp
def _derivative(primals: Any, tangents: Any) -> Any:
    ((matrix,), (change,)) = primals, tangents
    values, vectors = eigh(matrix)
    inside = jnp.linalg.multi_dot([vectors.T, (change + change.T) / 2, vectors], precision="highest")
    # An eigenvector moves along each other one, by the change between both over the gap of the eigenvalues.
    own = jnp.eye(len(values), dtype=values.dtype)
    moved = inside * (1 / (own + values - values[:, None]) - own)
    return (values, vectors), (jnp.diagonal(inside), jnp.matmul(vectors, moved, precision="highest"))


def _unmapped(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.platform_dependent(matrix, tpu=_in_own_dtype, default=_in_float64)


def _in_own_dtype(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors


def _in_float64(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    with jax.enable_x64(True):
        values, vectors = jnp.linalg.eigh(matrix.astype(jnp.float64))
        return values.astype(matrix.dtype), vectors.astype(matrix.dtype)


@jax.custom_batching.custom_vmap
def _of_one(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _unmapped(matrix)


@_of_one.def_vmap
def _of_several(size: int, batched: Any, matrices: jax.Array) -> Any:
    del size, batched
    found = lax.platform_dependent(matrices, cpu=lambda x: lax.map(_of_one, x), default=_unmapped)
    return found, (True, True)

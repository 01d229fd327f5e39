"""Eigendecompositions that do not block a program on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def eigh(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the eigenvalues of one symmetric matrix, shape (size, size), and its eigenvectors as columns.

    For several matrices, map it. On a CPU, `jnp.linalg.eigh` divides a batch among the threads of the pool that runs
    the program, and one of them waits. If as many batches as there are threads are decomposed at the same time, all
    threads wait for ever (seen with jax 0.10.2: two batches, two cores). So they are decomposed one after another.
    """
    return _of_one(matrix)


@eigh.defjvp
def _derivative(primals: Any, tangents: Any) -> Any:
    return jax.jvp(_unmapped, primals, tangents)


def _unmapped(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors


@jax.custom_batching.custom_vmap
def _of_one(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _unmapped(matrix)


@_of_one.def_vmap
def _of_several(size: int, batched: Any, matrices: jax.Array) -> Any:
    del size, batched
    found = lax.platform_dependent(matrices, cpu=lambda x: lax.map(_of_one, x), default=_unmapped)
    return found, (True, True)

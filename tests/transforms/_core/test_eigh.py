"""`eigh`, against `jnp.linalg.eigh`, and which decompositions a CPU program has."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms._core.eigh import eigh


def matrices(*shape: int) -> jax.Array:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    return x + x.swapaxes(-1, -2)


def test_values_vectors_and_derivatives_are_those_of_jax() -> None:
    with jax.enable_x64(True):
        x = matrices(3, 2, 4, 4)
        for found, expected in zip(jax.vmap(jax.vmap(eigh))(x), jnp.linalg.eigh(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
        loss = lambda of, x: jnp.sum(jnp.sin(of(x)[0])) + jnp.square(of(x)[1]).sum(0) @ jnp.arange(4.0)
        for transform in (jax.grad, jax.jacfwd):
            found, expected = (
                jax.jit(jax.vmap(transform(lambda x, of=of: loss(of, x))))(x[0])
                for of in (eigh, lambda x: tuple(jnp.linalg.eigh(x)))
            )
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 4, 4)])
def test_a_cpu_decomposes_one_matrix_at_a_time(shape: tuple[int, ...]) -> None:
    """Several batches at the same time would block all threads of the pool."""
    mapped = lambda x: eigh(x)[1]
    for _ in shape[:-2]:
        mapped = jax.vmap(mapped)
    text = jax.jit(mapped).lower(jnp.float32(matrices(*shape))).compile().as_text()
    calls = [line for line in text.splitlines() if "lapack_ssyevd" in line]
    assert len(calls) == 1
    assert re.search(r"\(f32\[4,4\]", calls[0]), calls[0]

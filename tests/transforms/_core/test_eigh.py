"""`eigh`, against `jnp.linalg.eigh` in float64, and which decompositions a CPU program has."""

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
        for transform in (jax.grad, jax.jacfwd, jax.hessian):
            found, expected = (
                jax.jit(jax.vmap(transform(lambda x, of=of: loss(of, x))))(x[0])
                for of in (eigh, lambda x: tuple(jnp.linalg.eigh(x)))
            )
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_small_eigenvalues_of_float32_are_right() -> None:
    """Whatever program they are in, and as float32. (Those of `jnp.linalg.eigh` are 2,000 times too large.)"""
    scales = 10.0 ** np.array([-2, 2, 0, 1, -1, -3])
    x = np.random.default_rng(0).normal(size=(3, 20, 6)) * scales
    m = jnp.float32(np.einsum("bni,bnj->bij", x, x))
    expected = np.linalg.eigvalsh(np.float64(m))
    programs = {
        "eager": lambda m: [jnp.stack(of) for of in zip(*map(eigh, m), strict=True)],
        "jit": lambda m: [jnp.stack(of) for of in zip(*map(jax.jit(eigh), m), strict=True)],
        "vmap": jax.vmap(eigh),
        "jit of vmap": jax.jit(jax.vmap(eigh)),
        "scan": jax.jit(lambda m: jax.lax.scan(lambda carry, x: (carry, eigh(x)), 0, m)[1]),
        "chunks": lambda m: jax.lax.map(eigh, m, batch_size=2),
    }
    for name, program in programs.items():
        values, vectors = program(m)
        assert values.dtype == vectors.dtype == jnp.float32
        np.testing.assert_allclose(values, expected, rtol=1e-6, err_msg=name)
    inverse = np.linalg.inv(np.float64(m))
    gradient = jax.jit(jax.vmap(jax.grad(lambda x: jnp.log(eigh(x)[0]).sum())))(m)
    assert gradient.dtype == jnp.float32
    root = np.sqrt(np.einsum("bii->bi", inverse))
    np.testing.assert_allclose(
        gradient / root[:, None] / root[..., None], inverse / root[:, None] / root[..., None], atol=1e-4
    )


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 4, 4)])
def test_a_cpu_decomposes_one_matrix_at_a_time(shape: tuple[int, ...]) -> None:
    """Several batches at the same time would block all threads of the pool."""
    mapped = lambda x: eigh(x)[1]
    for _ in shape[:-2]:
        mapped = jax.vmap(mapped)
    text = jax.jit(mapped).lower(jnp.float32(matrices(*shape))).compile().as_text()
    calls = [line for line in text.splitlines() if "lapack_dsyevd" in line]
    assert len(calls) == 1
    assert re.search(r"\(f64\[4,4\]", calls[0]), calls[0]

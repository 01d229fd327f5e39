"""Compositions of `vmap`, chunked or not, and `grad`, under `jit` and `scan`, against closed forms in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from plurax.ensemble import Ensemble
from plurax.transforms import grad, value_and_grad, vmap

X = np.linspace(-1.0, 1.0, 15).reshape(5, 3)
W = np.linspace(0.5, 1.5, 6).reshape(2, 3)
CHUNKS = pytest.mark.parametrize("chunk_size", [None, 1, 2])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), jnp.ones(2) + 1e-10)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(jnp.ones(2), jnp.ones(2, jnp.float32))


def wave(w: Any, x: Any) -> Any:
    """sin(w·x), with gradients cos(w·x)·x and cos(w·x)·w."""
    return jnp.sin(w @ x)


@CHUNKS
def test_jit_of_vmap_of_grad(chunk_size: int | None) -> None:
    per_sample = jax.jit(vmap(value_and_grad(wave, (0, 1)), (None, 0), chunk_size=chunk_size))
    phase = X @ W[0]
    expected = (np.cos(phase)[:, None] * X, np.cos(phase)[:, None] * W[0])
    assert_close(per_sample(W[0], X), (np.sin(phase), expected))


@CHUNKS
def test_grad_of_vmap_sums_over_the_slices(chunk_size: int | None) -> None:
    gradients = grad(vmap(wave, (None, 1), chunk_size=chunk_size), (0, 1), cotangent=1.0)
    slope = np.cos(X @ W[0])[:, None]
    assert_close(jax.jit(gradients)(W[0], X.T), ((slope * X).sum(0), (slope * W[0]).T))


@pytest.mark.parametrize(("inner", "outer"), [(None, None), (2, None), (None, 1), (3, 1), (2, 2)])
def test_chunks_inside_chunks(inner: int | None, outer: int | None) -> None:
    every = vmap(vmap(grad(wave), (None, 0), chunk_size=inner), (0, None), -1, chunk_size=outer)
    expected = np.cos(X @ W.T)[:, None, :] * X[:, :, None]
    assert_close(jax.jit(every)(W, X), expected)


@pytest.mark.parametrize("remat", [lambda f: f, jax.checkpoint], ids=["", "checkpoint"])
def test_grad_of_a_scan_of_chunks(remat: Any) -> None:
    def total(w: Any, xs: Any) -> Any:
        row = remat(vmap(wave, (None, 0), chunk_size=2))
        return lax.scan(lambda carry, x: (carry + jnp.sum(row(w, x)), None), jnp.zeros(()), xs)[0]

    xs = np.stack([X, 2 * X, -X])
    expected = (np.cos(xs @ W[0])[..., None] * xs).sum((0, 1))
    assert_close(jax.jit(grad(total))(W[0], xs), expected)


@CHUNKS
def test_a_second_derivative_through_chunks(chunk_size: int | None) -> None:
    energy = lambda x: jnp.sum(vmap(jnp.sin, chunk_size=chunk_size)(x))
    diagonal = jax.jit(vmap(grad(grad(jnp.sin)), chunk_size=chunk_size))(X[:, 0])
    assert_close(diagonal, -np.sin(X[:, 0]))
    along = jax.jit(grad(lambda x: jnp.vdot(grad(energy)(x), X)))(X)
    assert_close(along, -np.sin(X) * X)


def test_vmap_over_seeds_gives_a_jacobian() -> None:
    fun = lambda x: jnp.sin(W @ x)
    jacobian = vmap(lambda seed: grad(fun, cotangent=seed)(X[0]), chunk_size=1)(np.eye(2))
    assert_close(jacobian, np.cos(W @ X[0])[:, None] * W)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_members_times_samples(chunk_size: int | None) -> None:
    models = Ensemble.stack([nnx.Linear(3, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(i)) for i in range(2)])
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    every = jax.jit(vmap(vmap(grad(loss), (None, 0), chunk_size=chunk_size), (0, None)))(models, X)
    assert isinstance(every, nnx.State)
    kernel, bias = (np.asarray(models.trainable[name]) for name in ("kernel", "bias"))
    twice = 2 * (X @ kernel + bias[:, None])
    assert_close(every["bias"][...], twice)
    assert_close(every["kernel"][...], X[:, :, None] * twice[:, :, None, :])

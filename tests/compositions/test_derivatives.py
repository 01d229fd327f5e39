"""Compositions of Jacobians, Hessians and products with other transforms, against closed forms in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plurax.transforms import batch_jacobian, gnvp, grad, hessian, hvp, jacfwd, jacobian, jacrev, jvp, vjp, vmap

W = np.linspace(-1.0, 1.5, 15).reshape(5, 3)
X = np.linspace(-1.0, 1.0, 12).reshape(4, 3)
JACOBIANS = pytest.mark.parametrize(
    "transform",
    [
        pytest.param(jacfwd, id="jacfwd"),
        pytest.param(jacrev, id="jacrev"),
        pytest.param(jacobian, id="jacobian"),
        pytest.param(lambda f: jacfwd(f, chunk_size=2), id="jacfwd-chunks"),
        pytest.param(lambda f: jacrev(f, chunk_size=2), id="jacrev-chunks"),
        pytest.param(
            lambda f: jacobian(f, memory_budget="1MB"),
            id="budget",
            marks=pytest.mark.filterwarnings("ignore:jacobian. memory_budget=977 KiB bounds this part:UserWarning"),
        ),
    ],
)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), jnp.ones(2) + 1e-10)


def wave(x: Any) -> Any:
    """sin(W x): Jacobian cos(W x) W."""
    return jnp.sin(W @ x)


def slopes(x: Any) -> Any:
    return np.cos(x @ W.T)[..., None] * W


def energy(x: Any) -> Any:
    """Σ sin(W x): Hessian Wᵀ diag(-sin(W x)) W."""
    return jnp.sum(jnp.sin(W @ x))


def curvature(x: Any) -> Any:
    return np.einsum("...o,oi,oj->...ij", -np.sin(x @ W.T), W, W)


@JACOBIANS
def test_jit_and_vmap_of_a_jacobian(transform: Any) -> None:
    assert_close(jax.jit(vmap(transform(wave)))(X), slopes(X))


@JACOBIANS
def test_the_gradient_of_a_jacobians_norm(transform: Any) -> None:
    """|J|² = Σ cos²(Wx)_o |W_o|², whose gradient is -Σ sin(2 Wx)_o |W_o|² W_o."""
    gradient = jax.jit(grad(lambda x: jnp.sum(transform(wave)(x) ** 2)))(X[0])
    assert_close(gradient, -(np.sin(2 * W @ X[0]) * (W**2).sum(1)) @ W)


@JACOBIANS
def test_a_jacobian_inside_a_scan(transform: Any) -> None:
    total, _ = jax.jit(lambda xs: lax.scan(lambda c, x: (c + transform(wave)(x), x), jnp.zeros((5, 3)), xs))(X)
    assert_close(total, slopes(X).sum(0))


@JACOBIANS
def test_the_jacobian_of_a_scan(transform: Any) -> None:
    decay = lambda x: lax.scan(lambda c, w: (c * w, c * w), x, np.array([0.5, -2.0]))[1]
    expected = np.stack([0.5 * np.eye(3), -np.eye(3)])
    assert_close(jax.jit(transform(decay))(X[0]), expected)


@pytest.mark.parametrize("mode", ["fwd_rev", "rev_rev", "fwd_fwd", "rev_fwd"])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_the_hessian_of_a_vmapped_function(mode: str, chunk_size: Any) -> None:
    total = lambda xs: jnp.sum(vmap(energy, chunk_size=chunk_size)(xs))
    expected = np.einsum("bij,bc->bicj", curvature(X), np.eye(4))
    assert_close(jax.jit(hessian(total, mode=mode, chunk_size=chunk_size))(X), expected)
    assert_close(jax.jit(vmap(hessian(energy, mode=mode)))(X), curvature(X))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fwd_rev", "rev_rev", "rev_fwd"])
def test_products_with_many_vectors_and_points(mode: str) -> None:
    vectors = np.eye(3)[[0, 2]]
    at_point = jax.jit(vmap(lambda v: hvp(energy, X[0], v, mode=mode)))(vectors)
    assert_close(at_point, vectors @ curvature(X[0]))
    assert_close(vmap(lambda x, v: hvp(energy, x, v, mode=mode))(X, X), np.einsum("bij,bj->bi", curvature(X), X))
    third = grad(lambda x: hvp(energy, x, X[1], mode=mode) @ X[2])(X[0])
    assert_close(third, (-np.cos(W @ X[0]) * (W @ X[1]) * (W @ X[2])) @ W)


def test_mapped_linear_maps_build_jacobians() -> None:
    assert_close(vmap(lambda v: jvp(wave, (X[0],), (v,))[1], out_axes=1)(np.eye(3)), slopes(X[0]))
    assert_close(vmap(vjp(wave, X[0])[1])(np.eye(5))[0], slopes(X[0]))
    gauss_newton = jax.jit(vmap(lambda v: gnvp(wave, lambda y: jnp.sum(y**2), X[0], v)))(np.eye(3))
    assert_close(gauss_newton, 2 * slopes(X[0]).T @ slopes(X[0]))


def test_jacobians_of_a_batch_inside_a_gradient() -> None:
    batched = lambda x: jnp.sin(x @ W.T)
    for rows in ("vmap", "independent"):
        norm = lambda x: jnp.sum(batch_jacobian(batched, rows=rows)(x) ** 2)  # noqa: B023 (used at once)
        assert_close(jax.jit(grad(norm))(X), -(np.sin(2 * X @ W.T) * (W**2).sum(1)) @ W)


@pytest.mark.slow
def test_a_jacobian_of_a_gradient_of_a_jacobian() -> None:
    """The third derivative of Σ x⁴: 24 x on the diagonal."""
    third = jacfwd(jacrev(grad(lambda x: jnp.sum(x**4))))(X[0])
    expected = np.zeros((3, 3, 3))
    expected[range(3), range(3), range(3)] = 24 * X[0]
    assert_close(third, expected)

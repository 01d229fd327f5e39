"""`ekfac`: eigenvalues against the dense matrix in float64, the trace, sums over batches, and a given basis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from plurax.transforms.curvature import _squares, ekfac, ggn_diagonal, kfac

from .test_diagonal import MODELS, N, cross_entropy, dense, labels, matrix, normal, square


def eigenvectors(block: Any) -> np.ndarray:
    """Return the eigenvectors of a block as columns, in the order of its eigenvalues."""
    count = block.values.size
    of = lambda one: block.joined(jnp.einsum("spq,sde,sqe->spd", *(full(x) for x in (block.left, block.right)), one))
    units = jnp.eye(count).reshape(count, *block.values.shape)
    return np.reshape(jax.jit(lambda units: jax.lax.map(of, units))(units), (count, -1)).T


def full(side: Any) -> Any:
    return side if side.ndim == 3 else jax.vmap(jnp.diag)(side)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("sharing", "largest"), [("expand", 4096), ("reduce", 3)])
def test_eigenvalues_are_the_diagonal_of_the_true_block(
    name: str, sharing: Any, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_squares, "_LARGEST_SIDE", largest)
    with jax.enable_x64(True):
        model, p, x, y = MODELS[name]()
        options: Any = {"fisher": "exact", "weight_sharing": sharing}
        found = jax.jit(ekfac(model, cross_entropy, **options))(p, x, y)
        expected = dense(model, cross_entropy, p, x, y)
        offset = 0
        for block in found.blocks:
            size = int(np.prod(block.shape))
            true = expected[offset : offset + size, offset : offset + size]
            offset += size
            if not hasattr(block, "values"):
                np.testing.assert_allclose(block.dense(), true, rtol=1e-10, atol=1e-13)
                continue
            vectors = eigenvectors(block)
            np.testing.assert_allclose(vectors.T @ vectors, np.eye(size), atol=1e-12)
            np.testing.assert_allclose(block.values.ravel(), np.diag(vectors.T @ true @ vectors), rtol=1e-9, atol=1e-13)
            np.testing.assert_allclose(block.dense(), vectors * np.ravel(block.values) @ vectors.T, atol=1e-12)
        np.testing.assert_allclose(found.trace(), expected.trace(), rtol=1e-11)
        np.testing.assert_allclose(
            found.trace(), ravel_pytree(jax.jit(ggn_diagonal(model, cross_entropy))(p, x, y))[0].sum(), rtol=1e-11
        )
        plain = jax.jit(kfac(model, cross_entropy, **options))(p, x, y)
        assert np.linalg.norm(matrix(found) - expected) <= np.linalg.norm(matrix(plain) - expected) * (1 + 1e-12)
        # With one basis: eigenvectors of an eigenvalue that several share, such as zero, differ by rounding.
        chunked = jax.jit(ekfac(model, cross_entropy, chunk_size=2, **options))(p, x, y, basis=plain)
        once = jax.jit(ekfac(model, cross_entropy, **options))(p, x, y, basis=plain)
        np.testing.assert_allclose(matrix(chunked), matrix(once), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["perceptron", "tied tokens and a convolution", "a scan over layers"])
def test_methods_agree_with_the_dense_matrix(name: str) -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS[name]()
        found = jax.jit(ekfac(model, cross_entropy, fisher="exact"))(p, x, y)
        d = np.asarray(matrix(found))
        flat, unravel = ravel_pytree(p)
        v, damped = np.asarray(normal(flat.size)), d + 0.1 * np.eye(len(d))
        of = lambda name, *args: np.asarray(ravel_pytree(getattr(found, name)(unravel(v), *args))[0])
        np.testing.assert_allclose(of("matvec"), d @ v, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(of("solve", 0.1), np.linalg.solve(damped, v), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(found.logdet(0.1), np.linalg.slogdet(damped)[1], rtol=1e-11)
        np.testing.assert_allclose(ravel_pytree(found.diagonal())[0], np.diag(d), rtol=1e-11, atol=1e-15)
        np.testing.assert_allclose((3.0 * found).dense(), 3 * d, rtol=1e-12, atol=1e-15)


def test_several_uses_are_added_before_they_are_squared() -> None:
    """A matrix and its transpose, of which one has the other sign."""
    with jax.enable_x64(True):
        p, x, y = {"w": normal(5, 3)}, normal(N, 5), normal(N, 5)
        model = lambda p, x: jnp.tanh(x @ p["w"]) @ (-p["w"]).T
        found = jax.jit(ekfac(model, square, fisher="exact"))(p, x, y)
        np.testing.assert_allclose(found.trace(), dense(model, square, p, x, y).trace(), rtol=1e-11)
        vectors = eigenvectors(found.blocks[0])
        true = np.diag(vectors.T @ dense(model, square, p, x, y) @ vectors)
        np.testing.assert_allclose(found.blocks[0].values.ravel(), true, rtol=1e-9, atol=1e-13)


@pytest.mark.slow
def test_results_with_one_basis_are_averaged_exactly() -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        of = jax.jit(ekfac(model, cross_entropy, fisher="exact"))
        whole = of(p, x, y)
        one, other = (of(p, x[some], y[some], basis=whole) for some in (slice(2), slice(2, None)))
        np.testing.assert_allclose((0.4 * one + 0.6 * other).dense(), matrix(whole), rtol=1e-9, atol=1e-13)
        plain = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, x, y)
        np.testing.assert_allclose(of(p, x, y, basis=plain).dense(), matrix(whole), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_the_sum_of_different_bases_keeps_the_trace() -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        of = ekfac(model, cross_entropy, fisher="exact")
        one, other = of(p, x[:2], y[:2]), of(p, x[2:], y[2:])
        total = one + other
        np.testing.assert_allclose(total.trace(), one.trace() + other.trace(), rtol=1e-12)
        sums = np.asarray(one.dense() + other.dense())
        offset = 0
        for block in total.blocks:
            size = int(np.prod(block.shape))
            true = sums[offset : offset + size, offset : offset + size]
            offset += size
            if hasattr(block, "values"):
                vectors = eigenvectors(block)
                np.testing.assert_allclose(block.values.ravel(), np.diag(vectors.T @ true @ vectors), atol=1e-12)


@pytest.mark.slow
def test_samples_members_and_refusals() -> None:
    """The mean of 4,000 squares, each with a deviation of √2, is off by 12 % with a probability of 10⁻⁷."""
    model, p, x, y = MODELS["perceptron"]()
    exact = jax.jit(ekfac(model, cross_entropy, fisher="exact"))(p, x, y)
    tiled = jnp.tile(x, (1000, 1)), jnp.tile(y, 1000)
    drawn = jax.jit(ekfac(model, cross_entropy))(p, *tiled, jax.random.key(0), basis=exact)
    np.testing.assert_allclose(drawn.trace(), exact.trace(), rtol=0.12)
    members = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
    together = jax.vmap(ekfac(model, cross_entropy, fisher="exact"), (0, None, None))(members, x, y)
    np.testing.assert_allclose(jax.vmap(lambda f: f.trace())(together)[0], exact.trace(), rtol=1e-5)
    assert "eigenvalues of a Kronecker product" in str(ekfac(model, cross_entropy, fisher="exact").explain(p, x, y))
    with pytest.raises(ValueError, match=r"^ekfac: basis must be the KroneckerFactors of the same parameters"):
        ekfac(model, cross_entropy, fisher="exact")(p, x, y, basis=p)
    other = jax.jit(kfac(lambda w, x: x @ w, cross_entropy, fisher="exact"))(normal(4, 3), x, labels(3, N))
    with pytest.raises(ValueError, match=r"^ekfac: basis must be the KroneckerFactors of the same parameters"):
        ekfac(model, cross_entropy, fisher="exact")(p, x, y, basis=other)
    with pytest.raises(TypeError, match=r"^kfac: pass basis to ekfac"):
        kfac(model, cross_entropy, fisher="exact")(p, x, y, basis=exact)


@pytest.mark.slow
def test_a_basis_with_other_sides_takes_the_gradients_themselves() -> None:
    """A weight that is multiplied by a number has an exact block, whose eigenvectors are no products."""
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        scaled = lambda p, x: model({**p, "w": 2.0 * p["w"]}, x)
        basis = jax.jit(ekfac(scaled, cross_entropy, fisher="exact"))(p, x, y).eigen()
        found = jax.jit(ekfac(model, cross_entropy, fisher="exact"))(p, x, y, basis=basis).blocks[3]
        vectors = eigenvectors(found)
        true = dense(model, cross_entropy, p, x, y)[-24:, -24:]
        assert found.axes == ((), (0, 1), ())
        np.testing.assert_allclose(found.values.ravel(), np.diag(vectors.T @ true @ vectors), rtol=1e-9, atol=1e-13)

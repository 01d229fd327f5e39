"""`influence` and `self_influence`, against dense matrices and gradients in float64, and against retraining."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from plurax.transforms.curvature import _influence, ekfac, ggn_diagonal, influence, kfac, self_influence

from .test_diagonal import MODELS, N, cross_entropy, labels, matrix, normal, perceptron

DAMPING = 0.03


def gradients(model: Any, p: Any, x: Any, y: Any) -> np.ndarray:
    """Return the gradient of each example, shape (examples, numbers)."""
    of = jax.jit(jax.grad(lambda p, x, y: cross_entropy(model(p, x[None]), y[None])))
    return np.stack([ravel_pytree(of(p, x[i], y[i]))[0] for i in range(len(x))])


# The models differ in their eigenvectors; the other forms take the same way for all of them.
PAIRS = [*((name, "ekfac") for name in MODELS), ("attention", "kfac"), ("perceptron", "diagonal")]


@pytest.mark.parametrize(("name", "curvature"), PAIRS)
def test_it_is_the_product_with_the_dense_inverse(name: str, curvature: Any) -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS[name]()
        if curvature == "diagonal":
            d = np.diag(ravel_pytree(jax.jit(ggn_diagonal(model, cross_entropy))(p, x, y))[0])
        else:
            of = {"ekfac": ekfac, "kfac": kfac}[curvature](model, cross_entropy, fisher="exact")
            d = matrix(jax.jit(of)(p, x, y))
        g = gradients(model, p, x, y)
        expected = g @ np.linalg.solve(d + DAMPING * np.eye(len(d)), g.T) / N
        options: Any = {"curvature": curvature, "damping": DAMPING}
        found = influence(model, cross_entropy, p, (x, y), **options)(x[:3], y[:3])
        np.testing.assert_allclose(found, expected[:3], rtol=1e-8, atol=1e-12)
        own = self_influence(model, cross_entropy, p, (x, y), **options)
        np.testing.assert_allclose(own, np.diag(expected), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_batches_are_one_dataset(chunk_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["attention"]()
        options: Any = {"curvature": "kfac", "damping": DAMPING}
        whole = influence(model, cross_entropy, p, (x, y), **options)(x, y)
        monkeypatch.setattr(_influence, "_NUMBERS", 2 * ravel_pytree(p)[0].size)  # two test examples at a time
        batches = [(x[:2], y[:2]), (x[2:], y[2:])]
        found = influence(model, cross_entropy, p, iter(batches), chunk_size=chunk_size, **options)(x, y)
        np.testing.assert_allclose(found, whole, rtol=1e-8, atol=1e-12)
        own = self_influence(model, cross_entropy, p, batches, chunk_size=chunk_size, **options)
        np.testing.assert_allclose(own, np.diag(whole), rtol=1e-8, atol=1e-12)
        # The eigenvectors are those of the factors of all batches.
        one, parts = (
            self_influence(model, cross_entropy, p, data, damping=DAMPING) for data in ((x, y), iter(batches))
        )
        np.testing.assert_allclose(parts, one, rtol=1e-7)


@pytest.mark.slow
def test_factors_may_be_given_and_drawn() -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        factors = jax.jit(ekfac(model, cross_entropy, fisher="exact"))(p, x, y)
        given = influence(model, cross_entropy, p, (x, y), curvature=factors, damping=DAMPING)(x, y)
        np.testing.assert_allclose(
            given, influence(model, cross_entropy, p, (x, y), damping=DAMPING)(x, y), rtol=1e-9, atol=1e-13
        )
        drawn = influence(model, cross_entropy, p, (x, y), damping=DAMPING, fisher="mc", key=jax.random.key(0))(x, y)
        assert np.corrcoef(drawn.ravel(), given.ravel())[0, 1] > 0.5
        assert not np.allclose(drawn, given, rtol=1e-3)


@pytest.mark.slow
def test_modules_some_parameters_and_members() -> None:
    x, y = jnp.float32(normal(N, 4)), labels(3, N)
    net = nnx.Sequential(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(6, 3, rngs=nnx.Rngs(1)))
    layers = nnx.to_pure_dict(nnx.state(net, nnx.Param))["layers"]
    p = {"w": layers[0]["kernel"], "b": layers[0]["bias"], "v": layers[2]["kernel"], "c": layers[2]["bias"]}
    plain = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]
    of = lambda model, p: influence(model, cross_entropy, p, (x, y), damping=DAMPING)(x[:2], y[:2])
    one = of(plain, p)
    np.testing.assert_allclose(of(lambda net, x: net(x), net), one, rtol=1e-3, atol=1e-5)
    last = nnx.All(nnx.Param, lambda path, _: 2 in path)
    some = influence(
        lambda net, x: net(x), cross_entropy, net, (x, y), damping=DAMPING, argnums=nnx.DiffState(0, last)
    )(x[:2], y[:2])
    hidden = jnp.tanh(x @ p["w"] + p["b"])
    expected = influence(
        lambda p, h: h @ p["v"] + p["c"], cross_entropy, {"v": p["v"], "c": p["c"]}, (hidden, y), damping=DAMPING
    )(hidden[:2], y[:2])
    np.testing.assert_allclose(some, expected, rtol=1e-3, atol=1e-5)
    members = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
    together = jax.vmap(lambda p: of(plain, p))(members)
    scores = influence(lambda net, x: net(x), cross_entropy, net, (x, y), damping=DAMPING)
    before = scores(x[:2], y[:2])
    nnx.update(net, jax.tree.map(jnp.zeros_like, nnx.state(net, nnx.Param)))
    np.testing.assert_array_equal(scores(x[:2], y[:2]), before)
    np.testing.assert_allclose(together[0], one, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(together[1], of(plain, jax.tree.map(lambda a: 2 * a, p)), rtol=1e-3, atol=1e-5)


def test_it_predicts_the_loss_after_retraining_without_an_example() -> None:
    """Linear regression, for which the factors are the Hessian."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, x_test = rng.normal(size=(60, 3)), rng.normal(size=(4, 3))
        labels_of = lambda x: x @ np.array([1.0, -1.0, 0.5]) + rng.normal(size=len(x))
        y, y_test = labels_of(x), labels_of(x_test)
        trained = lambda x, y: np.linalg.lstsq(x, y)[0]
        losses = lambda w: 0.5 * np.square(x_test @ w - y_test)
        w = trained(x, y)
        rises = [losses(trained(np.delete(x, j, 0), np.delete(y, j))) - losses(w) for j in range(len(x))]
        loss = lambda o, y: 0.5 * jnp.mean((o - y) ** 2)
        found = influence(lambda w, x: x @ w, loss, jnp.asarray(w), (x, y), damping=1e-9)(x_test, y_test)
        expected = np.stack(rises, axis=1)
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.98
        slope = (found * expected).sum() / np.square(found).sum()
        assert 0.9 < slope < 1.2


def test_what_does_not_fit_is_refused() -> None:
    _, p, x, y = MODELS["perceptron"]()
    of = lambda **options: influence(perceptron, cross_entropy, p, **({"data": (x, y), "damping": 0.1} | options))
    with pytest.raises(ValueError, match=r"^influence: damping must be a positive number, but got 0"):
        of(damping=0.0)
    with pytest.raises(ValueError, match=r"^influence: curvature must be"):
        of(curvature="hessian")
    with pytest.raises(ValueError, match=r"^influence: data has no batches"):
        of(data=[])
    with pytest.raises(TypeError, match=r"^influence: data must be a tuple \(x, y\) or an iterable of such tuples"):
        of(data=[x])
    with pytest.raises(TypeError, match=r"^influence: data must be a tuple \(x, y\)"):
        of(data=3)
    with pytest.raises(TypeError, match=r"^influence: data must be a tuple .*, but has a tuple of 3"):
        of(data=(x, y, y))
    with pytest.raises(ValueError, match=r"the Hessian of the loss by the outputs is indefinite"):
        influence(perceptron, lambda o, y: -jnp.mean(o**2) + 0 * y.sum(), p, (x, y), damping=0.1)
    factors = jax.jit(kfac(lambda w, x: x @ w, cross_entropy, fisher="exact"))(normal(4, 3), x, y)
    with pytest.raises(ValueError, match=r"^influence: curvature has the factors of other parameters"):
        of(curvature=factors)
    with pytest.raises(TypeError, match=r"^kfac: key must be one key"):
        of(fisher="mc")

"""`laplace`, against dense matrices and Bayesian linear regression in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from plurax.ensemble import Ensemble, Prediction
from plurax.transforms.curvature import Laplace, ekfac, ggn_diagonal, kfac, laplace
from plurax.transforms.curvature._laplace import spectrum

from .test_diagonal import MODELS, N, cross_entropy, dense, labels, matrix, normal, perceptron

pytestmark = pytest.mark.smoke

STRUCTURES: Any = ["kfac", "ekfac", "diagonal", "full", "ggn_lanczos"]
PRIOR = 0.7


def curvature_of(structure: str, model: Any, p: Any, x: Any, y: Any) -> np.ndarray:
    """Return the curvature as a matrix."""
    if structure == "diagonal":
        return np.diag(ravel_pytree(jax.jit(ggn_diagonal(model, cross_entropy))(p, x, y))[0])
    if structure in ("kfac", "ekfac"):
        of = {"ekfac": ekfac, "kfac": kfac}[structure](model, cross_entropy, fisher="exact")
        return matrix(jax.jit(of)(p, x, y))
    return dense(model, cross_entropy, p, x, y)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["perceptron", "attention"])
def test_predictions_and_evidence_are_those_of_the_dense_precision(structure: Any, name: str) -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS[name]()
        theta, unravel = ravel_pytree(p)
        of = laplace(model, cross_entropy, p, (x, y), structure=structure, prior_precision=PRIOR, rank=theta.size)
        precision = N * curvature_of(structure, model, p, x, y) + PRIOR * np.eye(theta.size)
        found = of.predict(x, kind="regression", samples=4)
        outputs = model(p, x)
        j = np.asarray(jax.jacobian(lambda t: model(unravel(t), x))(theta)).reshape(outputs.size, -1)
        variance = np.diag(j @ np.linalg.solve(precision, j.T)).reshape(outputs.shape)
        np.testing.assert_allclose(found.mean, outputs, rtol=1e-12)
        np.testing.assert_allclose(found.variance, variance, rtol=1e-7, atol=1e-12)
        assert found.members.shape == (4, *outputs.shape)
        evidence = -N * cross_entropy(outputs, y) - 0.5 * PRIOR * theta @ theta
        evidence += 0.5 * theta.size * np.log(PRIOR) - 0.5 * np.linalg.slogdet(precision)[1]
        np.testing.assert_allclose(of.log_marginal_likelihood(), evidence, rtol=1e-9)
        batches = iter([(x[:2], y[:2]), (x[2:], y[2:])])
        again = laplace(model, cross_entropy, p, batches, structure=structure, prior_precision=PRIOR, rank=theta.size)
        np.testing.assert_allclose(again.predict(x, kind="regression").variance, variance, rtol=1e-7, atol=1e-12)
        np.testing.assert_allclose(again.log_marginal_likelihood(), evidence, rtol=1e-9)


def test_bayesian_linear_regression_is_exact() -> None:
    """With the constant of the likelihood in the loss, the evidence is the density of y."""
    with jax.enable_x64(True):
        x, y, x_test, noise = normal(9, 3), normal(9), normal(5, 3), 0.3
        loss = lambda o, y: jnp.mean(0.5 * (o - y) ** 2 / noise + 0.5 * jnp.log(2 * jnp.pi * noise))
        precision = x.T @ x / noise + PRIOR * np.eye(3)
        mode = jnp.linalg.solve(precision, x.T @ y / noise)
        model = lambda w, x: x @ w
        of = laplace(model, loss, mode, (x, y), prior_precision=PRIOR)
        expected = np.einsum("ip,pq,iq->i", x_test, np.linalg.inv(precision), x_test)
        np.testing.assert_allclose(of.predict(x_test, kind="regression").variance, expected, rtol=1e-10)
        covariance = x @ x.T / PRIOR + noise * np.eye(9)
        log_density = -0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(2 * np.pi * covariance)[1])
        np.testing.assert_allclose(of.log_marginal_likelihood(), log_density, rtol=1e-10)


@pytest.mark.parametrize("structure", ["kfac", "full"])
def test_the_prior_has_the_largest_evidence(structure: Any) -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        of = laplace(model, cross_entropy, p, (x, y), structure=structure)
        evidence = lambda log: replace(of, prior_precision=jnp.exp(log)).log_marginal_likelihood()
        log = jnp.log(of.prior_precision)
        assert abs(jax.grad(evidence)(log)) < 1e-8
        assert evidence(log) > max(evidence(log - 1), evidence(log + 1))


@pytest.mark.parametrize("structure", ["kfac", "full", "ggn_lanczos"])
def test_samples_have_the_covariance(structure: Any) -> None:
    """The variance of 4,000 draws is off by more than 15 % (6.7 deviations) with a probability below 10⁻¹⁰ each."""
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        theta, _ = ravel_pytree(p)
        of = laplace(model, cross_entropy, p, (x, y), structure=structure, prior_precision=PRIOR, rank=theta.size)
        assert repr(of).startswith(f"Laplace({theta.size} parameters, ")
        members = of.sample(jax.random.key(0), 4000)
        assert isinstance(members, Ensemble)
        draws = np.asarray(jax.vmap(lambda v: ravel_pytree(v)[0])(members.trainable)) - theta
        covariance = np.cov(draws.T)
        precision = N * curvature_of(structure, model, p, x, y) + PRIOR * np.eye(theta.size)
        np.testing.assert_allclose(np.diag(covariance), np.diag(np.linalg.inv(precision)), rtol=0.15)
        assert np.abs(draws.mean(0)).max() < 6 * np.sqrt(np.diag(covariance).max() / 4000)


@pytest.mark.slow
def test_kinds_of_predictions() -> None:
    model, p, x, y = MODELS["perceptron"]()
    of = laplace(model, cross_entropy, p, (x, y))
    classes = of.predict(x, samples=50, kind="classification")
    assert isinstance(classes, Prediction)
    assert classes.mean.shape == (N, 3)
    assert classes.members.shape == (50, N, 3)
    np.testing.assert_allclose(classes.mean.sum(-1), 1, rtol=1e-5)
    assert (classes.mutual_information >= 0).all()
    np.testing.assert_array_equal(of.predict(x, samples=50, kind="classification").mean, classes.mean)
    assert not np.allclose(
        of.predict(x, samples=50, key=jax.random.key(1), kind="classification").mean, classes.mean, rtol=1e-6
    )
    sure = laplace(model, cross_entropy, p, (x, y), prior_precision=1e12).predict(x, kind="classification")
    np.testing.assert_allclose(sure.mean, jax.nn.softmax(model(p, x)), rtol=1e-3)
    logistic = lambda o, y: jnp.mean(jnp.logaddexp(0, o) - y * o)
    w = jnp.float32(normal(4))
    binary = laplace(lambda w, x: x @ w, logistic, w, (x, jnp.float32(y > 0))).predict(x, kind="binary")
    assert binary.mean.shape == (N, 2)
    with pytest.raises(ValueError, match=r"^Laplace.predict: kind must be"):
        of.predict(x, kind="logits")


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.tanh(self.first(x))))


def network(net: Any, x: Any) -> Any:
    return net(x)


@pytest.mark.slow
def test_the_last_layer_of_a_module() -> None:
    x, y = jnp.float32(normal(N, 4)), labels(3, N)
    net = Net(nnx.Rngs(0))
    last = nnx.All(nnx.Param, nnx.PathContains("last"))
    of = laplace(network, cross_entropy, net, (x, y), structure="last_layer", wrt=last, prior_precision=PRIOR)
    p = {"b": jnp.asarray(net.last.bias), "w": net.last.kernel[...]}
    hidden = nnx.tanh(net.first(x))
    expected = laplace(
        lambda p, h: h @ p["w"] + p["b"], cross_entropy, p, (hidden, y), structure="full", prior_precision=PRIOR
    )
    np.testing.assert_allclose(
        of.predict(x, kind="classification").mean,
        expected.predict(hidden, kind="classification").mean,
        rtol=1e-3,
        atol=1e-4,
    )
    np.testing.assert_allclose(of.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=1e-4)
    members = of.sample(jax.random.key(0), 3)
    assert isinstance(members[0], Net)
    np.testing.assert_array_equal(members[1].first.kernel[...], net.first.kernel[...])
    assert not np.array_equal(members[1].last.kernel[...], members[2].last.kernel[...])
    assert members.predict(x, kind="classification").mean.shape == (N, 3)
    with pytest.raises(ValueError, match=r"^laplace: structure='last_layer' needs wrt"):
        laplace(network, cross_entropy, net, (x, y), structure="last_layer")


def test_later_training_does_not_change_the_distribution() -> None:
    x, y = jnp.float32(normal(N, 4)), labels(3, N)
    net = Net(nnx.Rngs(0))
    of = laplace(network, cross_entropy, net, (x, y))
    before = of.predict(x, kind="classification").mean
    net.last.kernel[...] = 0.0
    np.testing.assert_array_equal(of.predict(x, kind="classification").mean, before)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_file_gives_the_same_distribution(structure: Any, tmp_path: Path) -> None:
    x, y = jnp.float32(normal(N, 4)), labels(3, N)
    net = Net(nnx.Rngs(0))
    of = laplace(network, cross_entropy, net, (x, y), structure=structure)
    of.save(f"{tmp_path}/laplace.safetensors")
    again = Laplace.load(f"{tmp_path}/laplace.safetensors", network, Net(nnx.Rngs(1)))
    np.testing.assert_array_equal(
        again.predict(x, kind="classification").mean, of.predict(x, kind="classification").mean
    )
    np.testing.assert_array_equal(again.log_marginal_likelihood(), of.log_marginal_likelihood())
    np.testing.assert_array_equal(again.fit_prior().prior_precision, of.fit_prior().prior_precision)
    one, other = (each.sample(jax.random.key(2), 2)[1].last.kernel[...] for each in (of, again))
    np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"^Laplace.load: .* has \d+ arrays of parameters, but params has 2"):
        Laplace.load(f"{tmp_path}/laplace.safetensors", network, nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    damaged = (tmp_path / "laplace.safetensors").read_bytes()
    (tmp_path / "laplace.safetensors").write_bytes(damaged[:-4] + b"abcd")
    with pytest.raises(Exception, match="Laplace.load: .*its bytes are not those that were saved"):
        Laplace.load(f"{tmp_path}/laplace.safetensors", network, Net(nnx.Rngs(1)))


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal", "full"])
def test_an_ensemble_of_distributions_is_one_map(structure: Any) -> None:
    model, p, x, y = MODELS["perceptron"]()
    members = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
    of = lambda p: laplace(model, cross_entropy, p, (x, y), structure=structure)
    many = jax.vmap(of)(members)
    found = jax.vmap(lambda one: one.predict(x, kind="classification"))(many)
    for i in range(2):
        one = of(jax.tree.map(lambda a, i=i: a[i], members))
        np.testing.assert_allclose(many.prior_precision[i], one.prior_precision, rtol=1e-3)
        np.testing.assert_allclose(found.mean[i], one.predict(x, kind="classification").mean, rtol=0.05, atol=1e-2)
        evidence = jax.vmap(lambda one: one.log_marginal_likelihood())(many)[i]
        np.testing.assert_allclose(evidence, one.log_marginal_likelihood(), rtol=1e-3)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, p, x, y = MODELS["perceptron"]()
    of = lambda **options: laplace(perceptron, cross_entropy, p, (x, y), **options)
    with pytest.raises(ValueError, match=r"^laplace: structure must be"):
        of(structure="dense")
    with pytest.raises(ValueError, match=r"^laplace: prior_precision must be a positive number, but got -1"):
        of(prior_precision=-1.0)
    with pytest.raises(TypeError, match=r"^laplace: wrt selects variables of an NNX module"):
        of(wrt=nnx.Param)
    for structure in ("full", "ggn_lanczos"):
        with pytest.raises(ValueError, match=f"^laplace: structure='{structure}' has products with the exact matrix"):
            of(structure=structure, fisher="mc", key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"^laplace: key must be one key"):
        of(structure="full", key=3.0)
    one, other = (of(structure="full", **options).prior_precision for options in ({}, {"key": jax.random.key(0)}))
    assert one == other  # a key that is not needed is accepted
    with pytest.raises(ValueError, match=r"^laplace: the diagonal has no empirical form"):
        of(structure="diagonal", fisher="empirical")
    with pytest.raises(ValueError, match=r"^laplace: rank must be"):
        of(structure="ggn_lanczos", rank=0)
    concave = lambda o, y: -jnp.mean(jnp.square(o)) + 0 * y.sum()
    for structure in STRUCTURES:
        with pytest.raises(ValueError, match=r"the Hessian of the loss by the outputs is indefinite"):
            laplace(perceptron, concave, p, (x, y), structure=structure)
    zero = jax.tree.map(jnp.zeros_like, p)
    with pytest.raises(ValueError, match=r"^Laplace.fit_prior: all parameters are zero"):
        laplace(perceptron, cross_entropy, zero, (x, y))
    monkeypatch.setattr(spectrum, "_MOST", 10)
    with pytest.raises(ValueError, match=r"^laplace: the whole matrix would have .* rows, but at most 10 are stored"):
        of(structure="full")


def half_square(o: Any, y: Any) -> Any:
    return 0.5 * jnp.mean(jnp.square(o - y).sum(-1))


def linear(w: Any, x: Any) -> Any:
    return x @ w


def regression(spread: float, n: int = 60, p: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return correlated features of scales from 10^-spread to 10^spread, as float32, to fit and to predict at."""
    generator = np.random.default_rng(3)
    scales = generator.permutation(10.0 ** np.linspace(-spread, spread, p))
    mixed = generator.normal(size=(n, p)) @ (np.eye(p) + 0.3 * generator.normal(size=(p, p)))
    return (mixed * scales).astype(np.float32), (generator.normal(size=(5, p)) * scales).astype(np.float32)


@pytest.mark.parametrize("structure", ["full", "kfac", "ekfac"])
@pytest.mark.parametrize("spread", [0, 1.5, 3])
def test_badly_scaled_inputs_do_not_spoil_float32(structure: Any, spread: float) -> None:
    """Against float64 in NumPy; all these matrices are exact for a linear model. (It was up to 120 times too large.)"""
    x, x_test = regression(spread)
    w, y = np.float32(normal(6, 2)), np.float32(normal(60, 2))
    for prior in (1e-2, 1.0):
        of = laplace(linear, half_square, w, (x, y), structure=structure, prior_precision=prior)
        precision = x.T.astype(np.float64) @ x + prior * np.eye(6)
        expected = np.einsum("ip,pq,iq->i", x_test, np.linalg.inv(precision), x_test.astype(np.float64))
        found = of.predict(x_test, kind="regression", samples=2).variance
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, np.stack([expected, expected], -1), rtol=1e-4)
        log_det = 2 * (np.linalg.slogdet(precision)[1] - 6 * np.log(prior))
        loss, square = half_square(x @ w, y), np.square(w, dtype=np.float64).sum()
        evidence = -60 * float(loss) - 0.5 * (prior * square + log_det)
        np.testing.assert_allclose(of.log_marginal_likelihood(), evidence, rtol=1e-4)
        draws = np.asarray(of.sample(jax.random.key(0), 2000).trainable, np.float64) - w
        # 2,000 draws are off by more than 20 % (6 deviations) with a probability below 1e-8 each.
        np.testing.assert_allclose(draws.var(0)[:, 0], np.diag(np.linalg.inv(precision)), rtol=0.2)


@pytest.mark.parametrize("structure", ["full", "kfac"])
def test_the_prior_of_badly_scaled_inputs_is_that_of_float64(structure: Any) -> None:
    x, _ = regression(3)
    w, y = np.float32(normal(6, 2)), np.float32(normal(60, 2))
    found = laplace(linear, half_square, w, (x, y), structure=structure).prior_precision
    with jax.enable_x64(True):
        data = np.float64(x), np.float64(y)
        expected = laplace(linear, half_square, np.float64(w), data, structure=structure).prior_precision
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("structure", ["full", "kfac", "ekfac"])
def test_what_float32_cannot_say_is_warned_of(structure: Any) -> None:
    """Two equal inputs leave a direction without curvature, which rounding fills."""
    x: Any
    w: Any
    y: Any
    x, _ = regression(0)
    x = np.concatenate([x, x[:, :1]], axis=1)
    w, y = np.float32(normal(7, 2)), np.float32(normal(60, 2))
    of = lambda prior: laplace(linear, half_square, w, (x, y), structure=structure, prior_precision=prior)
    with pytest.warns(
        UserWarning, match=r"^laplace: rounding may change variances by .*, and prior_precision=1e-06 is small"
    ) as caught:
        of(1e-6)
    assert caught[0].filename == __file__
    of(1.0)  # the first remedy
    with jax.enable_x64(True):  # the second
        x, w, y = np.float64(x), np.float64(w), np.float64(y)
        variance = of(1e-6).predict(np.float64(x[:3]), kind="regression", samples=2).variance[:, 0]
        precision = x.T @ x + 1e-6 * np.eye(7)
        np.testing.assert_allclose(variance, np.diag(x[:3] @ np.linalg.solve(precision, x[:3].T)), rtol=1e-6)
    wide = 10.0 ** np.linspace(-7, 7, 7)  # too wide for float64
    x, w, y = np.float32(normal(60, 7) * wide), np.float32(w), np.float32(y)
    with pytest.warns(UserWarning, match="^laplace: rounding may change variances by"):
        of(1e-3)


def test_a_diagonal_needs_no_warning() -> None:
    x, x_test = regression(3)
    w, y = np.float32(normal(6, 2)), np.float32(normal(60, 2))
    of = laplace(linear, half_square, w, (x, y), structure="diagonal", prior_precision=1e-3)
    expected = np.square(x_test, dtype=np.float64) @ (1 / (np.square(x, dtype=np.float64).sum(0) + 1e-3))
    np.testing.assert_allclose(of.predict(x_test, kind="regression", samples=2).variance[:, 0], expected, rtol=1e-5)

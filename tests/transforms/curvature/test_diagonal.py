"""`ggn_diagonal`, against the dense Gauss-Newton matrix in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree

from plurax.transforms.curvature import ggn_diagonal

pytestmark = pytest.mark.smoke

N = 5


def cross_entropy(outputs: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


def square(outputs: Any, targets: Any) -> Any:
    return jnp.mean((outputs - targets) ** 2)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def labels(count: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(count).integers(0, count, shape))


def perceptron(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] * p["s"]


def tied(p: Any, tokens: Any) -> Any:
    h = p["table"][tokens]
    h = h + jnp.tanh(h @ p["w"])
    numbers = ("NWC", "WIO", "NWC")
    h = lax.conv_general_dilated(h, p["kernel"], (1,), "SAME", dimension_numbers=numbers)
    return h @ p["table"].T


def stacked(p: Any, x: Any) -> Any:
    def layer(h: Any, weights: Any) -> Any:
        w, b = weights
        return jnp.tanh(h @ w + b), None

    return lax.scan(layer, x, (p["w"], p["b"]))[0]


def repeated(p: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        return jnp.tanh(h @ p["u"] + x @ p["w"]), None

    return lax.scan(step, jnp.zeros((len(x), 3)), x.swapaxes(0, 1))[0] @ p["out"]


def attention(p: Any, x: Any) -> Any:
    q, k, v = jnp.einsum("ntd,sdhe->snthe", x, p["qkv"])
    weights = jax.nn.softmax(jnp.einsum("nthe,nuhe->nhtu", q, k))
    return jnp.einsum("nhtu,nuhe,hed->ntd", weights, v, p["out"])


# Parameters, inputs, and labels or targets of each model.
MODELS: dict[str, Any] = {
    "perceptron": lambda: (
        perceptron,
        {"w": normal(4, 6), "b": normal(6), "v": normal(6, 3), "s": jnp.asarray(1.3)},
        normal(N, 4),
        labels(3, N),
    ),
    "tied tokens and a convolution": lambda: (
        tied,
        {"table": normal(7, 4), "w": normal(4, 4), "kernel": normal(3, 4, 4)},
        labels(7, N, 6),
        labels(7, N, 6),
    ),
    "attention": lambda: (
        attention,
        {"qkv": normal(3, 4, 2, 3), "out": normal(2, 3, 4)},
        normal(N, 5, 4),
        labels(4, N, 5),
    ),
    "weights shared over time": lambda: (
        repeated,
        {"u": normal(3, 3), "w": normal(2, 3), "out": normal(3, 4)},
        normal(N, 4, 2),
        labels(4, N),
    ),
    "a scan over layers": lambda: (stacked, {"w": normal(2, 3, 3), "b": normal(2, 3)}, normal(N, 3), labels(3, N)),
}


def dense(model: Any, loss: Any, p: Any, x: Any, y: Any) -> np.ndarray:
    """Return the Gauss-Newton matrix."""
    flat, unravel = ravel_pytree(p)
    of = lambda flat: model(unravel(flat), x)

    @jax.jit
    def parts(flat: Any) -> Any:
        outputs = of(flat)
        return jax.jacobian(of)(flat), jax.hessian(lambda o: loss(o, y))(outputs)

    j, h = parts(flat)
    size = j.size // flat.size
    j, h = np.reshape(j, (size, -1)), np.reshape(h, (size, size))
    return j.T @ h @ j


def matrix(factors: Any) -> np.ndarray:
    """Return factors as a matrix, by one program."""
    return np.asarray(jax.jit(lambda factors: factors.dense())(factors))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}])
def test_the_diagonal_is_that_of_the_dense_matrix(name: str, options: Any) -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS[name]()
        expected = np.diag(dense(model, cross_entropy, p, x, y))
        found = jax.jit(ggn_diagonal(model, cross_entropy, **options))(p, x, y)
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, p)
        np.testing.assert_allclose(ravel_pytree(found)[0], expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("loss", ["square", "penalty", "of no known form", "linear", "a dict of labels"])
def test_other_losses(loss: str) -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        targets: Any = normal(N, 3)
        of: Any = {
            "square": square,
            "penalty": lambda o, y: cross_entropy(o, y) + jnp.mean(o**2),
            "of no known form": lambda o, y: jnp.mean(jnp.sqrt(1 + jnp.sum((o - y) ** 2, axis=1))),
            "linear": lambda o, y: jnp.mean(o * y),
            "a dict of labels": lambda o, y: jnp.mean(y["weight"] * jnp.sum((o - y["to"]) ** 2, axis=1)),
        }[loss]
        if loss == "penalty":
            targets = y
        if loss == "a dict of labels":
            targets = {"to": targets, "weight": jnp.arange(1.0, N + 1)}
        expected = np.diag(dense(model, of, p, x, targets))
        found = jax.jit(ggn_diagonal(model, of))(p, x, targets)
        np.testing.assert_allclose(ravel_pytree(found)[0], expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["perceptron", "tied tokens and a convolution"])
def test_samples_have_the_diagonal_as_their_mean(name: str) -> None:
    """A mean of k squares of a normal variable has the standard deviation √(2 / k), for each of N independent examples.

    The largest of 92 entries exceeds six of these with a probability of less than 10⁻⁶.
    """
    with jax.enable_x64(True):
        model, p, x, y = MODELS[name]()
        exact = ravel_pytree(jax.jit(ggn_diagonal(model, cross_entropy))(p, x, y))[0]
        found = jax.jit(ggn_diagonal(model, cross_entropy, samples=4000))(p, x, y, jax.random.key(0))
        ratio = np.asarray(ravel_pytree(found)[0]) / np.asarray(exact)
    assert np.abs(ratio - 1).max() < 6 * np.sqrt(2 / 4000)
    assert np.abs(ratio - 1).max() > 1e-4


def test_samples_do_not_depend_on_the_chunks() -> None:
    model, p, x, y = MODELS["perceptron"]()
    key = jax.random.key(3)
    one, two = (
        jax.jit(ggn_diagonal(model, cross_entropy, samples=2, chunk_size=c))(p, x, y, key=key) for c in (None, 2)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)


def test_modules_and_several_arguments() -> None:
    net = nnx.Sequential(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(6, 3, rngs=nnx.Rngs(1)))
    x, y = jnp.float32(normal(N, 4)), labels(3, N)
    structure, state = nnx.split(net)
    found = jax.jit(ggn_diagonal(lambda net, x: net(x), cross_entropy))(net, x, y)
    expected = np.diag(dense(lambda state, x: nnx.merge(structure, state)(x), cross_entropy, state, x, y))
    np.testing.assert_allclose(ravel_pytree(found)[0], expected, rtol=2e-4, atol=1e-6)
    w, b = jnp.ones((4, 3)), jnp.zeros(3)
    both = jax.jit(ggn_diagonal(lambda w, b, x: x @ w + b, cross_entropy, argnums=(0, 1)))(w, b, x, y)
    only = jax.jit(ggn_diagonal(lambda w, b, x: x @ w + b, cross_entropy, argnums=1))(w, b, x, y)
    assert both[0].shape == (4, 3)
    np.testing.assert_allclose(both[1], only, rtol=1e-6)


@pytest.mark.slow
def test_it_maps_over_models_and_is_differentiable() -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        of = ggn_diagonal(model, cross_entropy)
        members = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
        together = jax.vmap(of, (0, None, None))(members, x, y)
        alone = [of(jax.tree.map(lambda a, i=i: a[i], members), x, y) for i in range(2)]
        jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), rtol=1e-10), together, *alone)
        trace = lambda s: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(of(p | {"s": s}, x, y)))
        slope = (trace(p["s"] + 1e-6) - trace(p["s"] - 1e-6)) / 2e-6
        np.testing.assert_allclose(jax.grad(trace)(p["s"]), slope, rtol=1e-6)


@pytest.mark.slow
def test_half_precision_is_summed_in_float32() -> None:
    model, p, x, y = MODELS["perceptron"]()
    p, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))
    found = jax.jit(ggn_diagonal(model, cross_entropy))(p, x, y)
    exact = jax.jit(ggn_diagonal(model, cross_entropy))(*jax.tree.map(lambda a: a.astype(jnp.float32), (p, x)), y)
    assert {a.dtype for a in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    one, two = ravel_pytree(found)[0], ravel_pytree(exact)[0]
    assert np.linalg.norm(one - two) < 0.03 * np.linalg.norm(two)


def test_arguments_that_do_not_fit_are_refused() -> None:
    model, p, x, y = MODELS["perceptron"]()
    of = ggn_diagonal(model, cross_entropy)
    with pytest.raises(ValueError, match=r"^ggn_diagonal: `y` is .*, but x has 5 examples; y must have as many"):
        of(p, x, y[:4])
    losses: list[Any] = [optax.softmax_cross_entropy_with_integer_labels, lambda o, y: None, lambda o, y: {}]
    for loss in losses:
        with pytest.raises(TypeError, match=r"^ggn_diagonal: loss must return the mean over the examples, a real "):
            ggn_diagonal(model, loss)(p, x, y)
    with pytest.raises(TypeError, match=r"^ggn_diagonal: key must be one key"):
        ggn_diagonal(model, cross_entropy, samples=2)(p, x, y)
    with pytest.raises(TypeError, match=r"^ggn_diagonal: key must be one key"):
        of(p, x, y, 3.0)
    with pytest.raises(ValueError, match=r"^ggn_diagonal: the Hessian of the loss by the outputs is indefinite"):
        ggn_diagonal(model, lambda o, y: -square(o, y))(p, x, jnp.zeros((N, 3)))
    with pytest.raises(ValueError, match=r"^ggn_diagonal: the Hessian of the loss by the outputs is indefinite"):
        ggn_diagonal(model, lambda o, y: -square(o, y), chunk_size=2)(p, x, jnp.zeros((N, 3)))
    with pytest.raises(TypeError, match=r"^ggn_diagonal: `p` is .*; pass its real and imaginary parts"):
        ggn_diagonal(lambda p, x: (x @ p).real, cross_entropy)(jnp.ones((4, 3), jnp.complex64), x, y)
    broken = ggn_diagonal(model, cross_entropy)(p | {"s": jnp.nan * p["s"]}, x, y)
    assert jnp.isnan(broken["w"]).all()
    with pytest.raises(TypeError, match=r"^ggn_diagonal: pass the parameters, a batch x and labels y"):
        of(p, x)
    with pytest.raises(TypeError, match=r"^ggn_diagonal: samples must be"):
        ggn_diagonal(model, cross_entropy, samples=1.5)

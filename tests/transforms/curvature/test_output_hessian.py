"""Square roots of the Hessian of a loss by the outputs, against the dense Hessian."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.transforms.curvature._output_hessian import OutputHessian

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
LABELS, TARGETS = np.array([0, 2, 1]), np.random.default_rng(1).normal(size=(3, 4))
MASK, MIXED = np.array([0.3, 0.0, 1.2]), np.random.default_rng(2).normal(size=(4, 6))


def log_probability(outputs: Any, labels: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(outputs / 2.0), labels[:, None], 1)


@jax.custom_jvp
def softened(x: Any) -> Any:
    return jnp.sqrt(1 + jnp.square(x))


softened.defjvps(lambda t, out, x: t * x / out)


@jax.custom_jvp
def rounded(x: Any) -> Any:
    return jnp.round(x)


rounded.defjvps(lambda t, out, x: t)


@jax.custom_vjp
def squared(x: Any) -> Any:
    return jnp.square(x)


squared.defvjp(lambda x: (jnp.square(x), x), lambda x, g: (2 * x * g,))


# The loss of outputs (3, 4) and one more array, that array, and the form of the Hessian.
LOSSES: dict[str, tuple[Callable[[Any, Any], Any], Any, str]] = {
    "cross-entropy": (lambda o, y: cross_entropy(o, y).mean(), LABELS, "softmax"),
    "of a batch of one": (lambda o, y: cross_entropy(o[None], y[None]).mean(), LABELS, "softmax"),
    "masked": (lambda o, m: (cross_entropy(o, jnp.asarray(LABELS)) * m).sum() / m.sum(), MASK, "softmax"),
    "log_softmax with a temperature": (lambda o, y: -log_probability(o, y).sum(), LABELS, "softmax"),
    "of distributions": (lambda o, t: optax.softmax_cross_entropy(o, jax.nn.softmax(t)).mean(), TARGETS, "softmax"),
    "mapped": (lambda o, y: jax.vmap(cross_entropy)(o, y).mean(), LABELS, "softmax"),
    "over other axes": (
        lambda o, _: jax.nn.logsumexp(o.T, axis=0).sum() + jax.nn.logsumexp(o, axis=(0, 1)),
        LABELS,
        "softmax",
    ),
    "of mixed outputs": (lambda o, y: cross_entropy(o @ MIXED, y).sum(), LABELS, "softmax"),
    "of some outputs": (lambda o, _: jax.nn.logsumexp(o[:, 1:3], axis=1).sum(), LABELS, "softmax"),
    "square": (lambda o, t: jnp.mean((o - t) ** 2), TARGETS, "diagonal"),
    "weighted square": (lambda o, t: jnp.sum(t**2 * jnp.square(o - t)), TARGETS, "diagonal"),
    "logistic": (lambda o, t: optax.sigmoid_binary_cross_entropy(o, (t > 0) * 1.0).mean(), TARGETS, "diagonal"),
    "Huber": (lambda o, t: optax.huber_loss(o, t).sum(), TARGETS, "diagonal"),
    "Poisson": (lambda o, t: jnp.mean(jnp.exp(o) - o * t), TARGETS, "diagonal"),
    "a rule of its own": (lambda o, t: softened(o - t).sum(), TARGETS, "diagonal"),
    "a rule of another function": (lambda o, t: jnp.sum((rounded(o) - t) ** 2), TARGETS, "dense"),
    "beside a backward rule": (
        lambda o, t: jax.nn.logsumexp(o, axis=-1).sum() + squared(o - t).sum(),
        TARGETS,
        "diagonal + softmax",
    ),
    "piecewise": (lambda o, t: jnp.where(o > t, o**2, 0).sum(), TARGETS, "diagonal"),
    "moved": (lambda o, t: jnp.sum(jnp.exp(o.T[::-1]) * t.T), np.abs(TARGETS), "diagonal"),
    "a penalty": (lambda o, y: cross_entropy(o, y).mean() + 0.1 * jnp.sum(o**2), LABELS, "diagonal + softmax"),
    "parts": (
        lambda o, _: jnp.exp(o[:, :2]).mean() + jax.nn.logsumexp(o[:, 2:], axis=1).sum(),
        LABELS,
        "diagonal + softmax",
    ),
    "linear": (lambda o, t: jnp.mean(o * t), TARGETS, "zero"),
    "absolute": (lambda o, t: jnp.abs(o - t).sum(), TARGETS, "diagonal"),
    "constant": (lambda o, t: t.mean() + 0 * jax.lax.stop_gradient(o).sum(), TARGETS, "zero"),
    "square of a logsumexp": (lambda o, _: (jax.nn.logsumexp(o, axis=-1) ** 2).sum(), LABELS, "dense"),
    "norm": (lambda o, _: jnp.sqrt(1 + jnp.sum(o**2)), LABELS, "dense"),
    "sum of mixed exponentials": (lambda o, _: jnp.exp(o @ MIXED).sum(), LABELS, "dense"),
    "products of outputs": (lambda o, _: jnp.sum((o[:, 0] + o[:, 1]) ** 2), LABELS, "dense"),
    "a matrix": (lambda o, _: jnp.square(o @ MIXED).sum(), LABELS, "dense"),
    "log of a softmax": (lambda o, _: -jnp.log(jax.nn.softmax(o))[:, 0].sum(), LABELS, "dense"),
    "in a scan": (
        lambda o, _: jax.lax.scan(lambda c, row: (c + jax.nn.logsumexp(row), None), jnp.zeros((), o.dtype), o)[0],
        LABELS,
        "dense",
    ),
}


def root(loss: Any, other: Any, outputs: Any) -> tuple[OutputHessian, np.ndarray]:
    """Return the object, and R with its columns computed one by one."""
    found = OutputHessian("test", lambda o, others: loss(o, others[0]), outputs, [other])
    prepared = jax.jit(found.prepare)(outputs, [other])
    columns = []
    for number in range(found.columns):
        vector = jax.nn.one_hot(number, found.columns, dtype=outputs.dtype)
        ends = np.cumsum([math.prod(shape) for shape in found.shapes])[:-1]
        noises = [x.reshape(s) for x, s in zip(jnp.split(vector, ends), found.shapes, strict=True)]
        columns.append(np.ravel(found.apply(prepared, outputs, [other], noises)))
    return found, np.reshape(columns, (-1, outputs.size)).T


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [0.3, 30.0])
def test_a_root_times_its_transpose_is_the_hessian(name: str, size: float) -> None:
    loss, other, form = LOSSES[name]
    with jax.enable_x64(True):
        outputs = jnp.asarray(size * np.random.default_rng(0).normal(size=(3, 4)))
        if size > 1 and name in ("Poisson", "moved", "parts", "sum of mixed exponentials"):
            outputs = outputs / 10
        other = jnp.asarray(other)
        expected = np.reshape(jax.hessian(lambda o: loss(o, other))(outputs), (12, 12))
        found, r = root(loss, other, outputs)
    assert found.form == form
    np.testing.assert_allclose(r @ r.T, expected, rtol=0, atol=1e-11 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize(
    "loss", [lambda o, y: -cross_entropy(o, y).mean(), lambda o, _: jnp.sin(o).sum(), lambda o, _: o[0, 0] * o[1, 1]]
)
def test_an_indefinite_hessian_gives_nan(loss: Any) -> None:
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    assert np.isnan(root(loss, jnp.asarray(LABELS), outputs)[1]).any()


@pytest.mark.slow
def test_negative_by_rounding_is_not_indefinite() -> None:
    """Next to the softmax of many tokens, a diagonal that is zero or tiny is a difference of larger numbers."""
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(256, 8)), jnp.float32)
    tokens = jnp.zeros(256, int)
    for penalty in (lambda o: 1e-3 * jax.nn.relu(o - 3).mean(), lambda o: 1e-8 * jnp.square(o).mean()):
        of = lambda o, others, penalty=penalty: cross_entropy(o, others[0]).mean() + penalty(o)
        found = OutputHessian("test", of, outputs, [tokens])
        assert found.form == "diagonal + softmax"
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(found.prepare(outputs, [tokens])))
    saddle = lambda o, _: o.sum() + 1e-3 * o[0, 0] * o[0, 1] + 0 * jnp.linalg.norm(o)
    found = OutputHessian("test", saddle, outputs[:64], [tokens])
    assert found.form == "dense"
    assert jnp.isnan(found.prepare(outputs[:64], [tokens])[0]).any()


@pytest.mark.slow
def test_a_cast_to_half_precision_keeps_the_form() -> None:
    outputs, labels = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32), jnp.asarray(LABELS)
    loss = lambda o, y: cross_entropy(o.astype(jnp.bfloat16), y).mean()
    found, r = root(loss, labels, outputs)
    assert found.form == "softmax"
    expected = np.reshape(jax.hessian(lambda o: cross_entropy(o, labels).mean())(outputs), (12, 12))
    np.testing.assert_allclose(r @ r.T, expected, atol=2e-3)


def test_many_outputs_need_a_known_form() -> None:
    outputs = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    found = OutputHessian("test", lambda o, others: cross_entropy(o, others[0]).mean(), outputs, [labels])
    assert found.columns == 64 * 4096
    with pytest.raises(ValueError, match=r"^test: the loss has a Hessian of no known form by the 262,144 "):
        OutputHessian("test", lambda o, _: jnp.linalg.norm(o), outputs, [labels])

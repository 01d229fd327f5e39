"""NNX transforms inside a model: arrays that they return unchanged are not assigned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.transforms import clipped_grad, grad, jvp, per_sample_grad, per_sample_norm, vmap
from plurax.transforms.privacy import DPSGD

DEPTH, WIDTH = 3, 4
X = np.sin(np.arange(20.0, dtype=np.float32)).reshape(5, WIDTH)
Y = np.cos(np.arange(10.0, dtype=np.float32)).reshape(5, 2)
METHODS = ("auto", "vmap", "ghost", "book_keeping")


class Layer(nnx.Module):
    """A residual layer; `norm` selects BatchNorm, `lora` adds a low-rank product."""

    def __init__(self, rngs: nnx.Rngs, norm: bool = False, lora: bool = False) -> None:
        self.dense: Any = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        if lora:
            self.dense = nnx.LoRA(WIDTH, 2, WIDTH, base_module=self.dense, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if norm else nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(self.dense(self.norm(x)))


def apply(layer: Any, x: Any) -> Any:
    return layer(x)


def scanned(apply: Callable[..., Any], axis: int = 0) -> Callable[..., Any]:
    over = nnx.scan(lambda x, layer: apply(layer, x), in_axes=(nnx.Carry, axis), out_axes=nnx.Carry)
    return lambda layers, x: over(x, layers)


def added(apply: Callable[..., Any], axis: int = 0) -> Callable[..., Any]:
    over = nnx.vmap(apply, in_axes=(axis, None))
    return lambda layers, x: over(layers, x).sum(0)


def branched(layer: Any, x: Any) -> Any:
    return nnx.cond(x.sum() > 0, nnx.remat(apply), lambda layer, x: nnx.jit(apply)(layer, 2 * x), layer, x)


def repeated(layers: Any, x: Any) -> Any:
    def body(_: Any, carry: Any) -> Any:
        layers, x = carry
        return layers, added(nnx.remat(apply))(layers, x)

    return nnx.fori_loop(0, 2, body, (layers, x))[1]


def with_outputs(layers: Any, x: Any) -> Any:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    @nnx.remat
    def over(x: Any, layer: Any) -> Any:
        return layer(x), x

    x, between = over(x, layers)
    return x + between.mean(0)


# The function that applies a stack of layers, and the axis of the stack.
WAYS: dict[str, tuple[Callable[..., Any], int]] = {
    "scan-of-remat": (scanned(nnx.remat(apply)), 0),
    "scan-of-jit": (scanned(nnx.jit(apply)), 0),
    "remat-of-scan": (nnx.remat(scanned(apply)), 0),
    "jit-of-scan-of-remat": (nnx.jit(scanned(nnx.remat(apply))), 0),
    "scan-with-outputs": (with_outputs, 0),
    "scan-of-remat-along-axis-1": (scanned(nnx.remat(apply), 1), 1),
    "scan-of-cond": (scanned(branched), 0),
    "vmap-of-remat": (added(nnx.remat(apply)), 0),
    "vmap-of-remat-along-axis-1": (added(nnx.remat(apply), 1), 1),
    "loop": (repeated, 0),
}


class Deep(nnx.Module):
    """A stack of layers."""

    def __init__(self, run: Callable[..., Any], axis: int = 0, **options: Any) -> None:
        make = nnx.vmap(lambda rngs: Layer(rngs, **options), out_axes=axis)
        self.layers = make(nnx.Rngs(0).split(DEPTH))
        self.out = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(1))
        self.run = run

    def __call__(self, x: Any) -> Any:
        return self.out(self.run(self.layers, x))


def loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def pure(model: Any) -> tuple[Callable[..., Any], Any]:
    """Return the loss as a pure function of the parameters, and the parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x, y: loss(nnx.merge(graphdef, params, rest), x, y), params


PER_SAMPLE: dict[str, Any] = {"batch_argnums": (1, 2)}


def clipped(method: str = "auto") -> Callable[..., Any]:
    return clipped_grad(loss, **PER_SAMPLE, l2_clip_norm=0.5, method=method)


@cache
def ours_and_expected(way: str) -> Any:
    """Return what the transforms of a model give and what those of its pure function give, from one program."""

    @nnx.jit
    def both(model: Any, x: Any, y: Any) -> Any:
        plain, params = pure(model)
        gradient = jax.grad(plain)(params, x, y)
        each = jax.vmap(jax.grad(plain), (None, 0, 0))(params, x[:, None], y[:, None])
        norms = jax.vmap(optax.tree.norm)(each)
        total = jax.tree.map(lambda x: jnp.tensordot(jnp.minimum(1, 0.5 / norms), x, 1), each)
        graphdef, state = nnx.split(model)
        expected = {
            "gradient": gradient,
            "slope": optax.tree.norm(gradient) ** 2,
            "outputs": jax.lax.scan(lambda state, row: (state, nnx.merge(graphdef, state)(row)), state, x)[1],
            "each": each,
        }
        ours = {
            "gradient": grad(loss)(model, x, y),
            "slope": jvp(lambda model: loss(model, x, y), (model,), (gradient,))[1],
            "outputs": vmap(model, chunk_size=2)(x),
            "each": per_sample_grad(loss, **PER_SAMPLE)(model, x, y),
        }
        for method in METHODS if way == "scan-of-remat" else ("auto",):
            expected |= {f"norms, {method}": norms, f"sum, {method}": total}
            ours[f"norms, {method}"] = per_sample_norm(loss, **PER_SAMPLE, method=method)(model, x, y)
            ours[f"sum, {method}"] = clipped(method)(model, x, y)
        return ours, expected

    return both(Deep(*WAYS[way]), X, Y)


def assert_close(actual: Any, expected: Any) -> None:
    actual, expected = (
        jax.tree.leaves(nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x) for x in (actual, expected)
    )
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_differentiated_and_mapped_as_its_pure_function(way: str) -> None:
    ours, expected = ours_and_expected(way)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(ours[name], value)
    np.testing.assert_allclose(ours["slope"], expected["slope"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["scan-of-remat", "jit-of-scan-of-remat", "scan-of-cond", "loop"])
def test_gradients_of_a_model_outside_of_jit(way: str) -> None:
    assert_close(grad(loss)(Deep(*WAYS[way]), X, Y), ours_and_expected(way)[1]["gradient"])


@pytest.mark.slow
def test_gradients_of_each_sample_outside_of_jit() -> None:
    model, (_, expected) = Deep(*WAYS["scan-of-remat"]), ours_and_expected("scan-of-remat")
    assert_close(per_sample_grad(loss, **PER_SAMPLE)(model, X, Y), expected["each"])
    assert_close(clipped()(model, X, Y), expected["sum, auto"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["scan-of-remat", "scan-of-jit", "scan-of-remat-along-axis-1"])
def test_a_private_step(way: str) -> None:
    model, total = Deep(*WAYS[way]), ours_and_expected(way)[1]["sum, auto"]
    options: dict[str, Any] = {"num_examples": 5, "expected_batch_size": 5, "num_steps": 1}
    dp = DPSGD(loss, optax.sgd(1.0), l2_clip_norm=0.5, noise_multiplier=0.0, target_delta=0.1, **options)
    state = dp.init(model, key=jax.random.key(0))
    (batch,) = dp.batches((X, Y), state)
    after = dp.step(state, batch)[0].model
    params = (nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (model, after))
    assert_close(jax.tree.map(lambda x, y: (x - y) * 5, *params), total)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["scan-of-remat", "scan-of-jit", "scan-of-remat-along-axis-1", "scan-of-cond"])
def test_updated_statistics_are_kept_but_refused_per_sample(way: str) -> None:
    model, twin = (Deep(*WAYS[way], norm=True) for _ in range(2))

    def compare(model: Any, twin: Any) -> Any:
        gradients = grad(loss)(model, X, Y), nnx.grad(loss)(twin, X, Y)
        evaluated = nnx.view(model, use_running_average=True)
        each = per_sample_grad(loss, **PER_SAMPLE)(evaluated, X[:1], Y[:1])
        return gradients, (jax.tree.map(lambda x: x[0], each), grad(loss)(evaluated, X[:1], Y[:1]))

    for ours, expected in (compare if way == "scan-of-remat" else nnx.jit(compare))(model, twin):
        assert_close(ours, expected)
    assert_close(nnx.state(model, nnx.BatchStat), nnx.state(twin, nnx.BatchStat))
    with pytest.raises(ValueError, match=r"clipped_grad: fun changes the state of Deep \(`layers.norm.mean`\)"):
        clipped()(model, X, Y)
    with pytest.raises(ValueError, match=r"vmap: the mapped function changes the state of Deep"):
        vmap(model)(X)


def test_parameters_that_are_assigned_in_a_loop_are_refused() -> None:
    def halve(layer: Any, x: Any) -> Any:
        layer.dense.bias[...] /= 2
        return layer(x)

    for run in (scanned(nnx.remat(halve)), scanned(halve), nnx.jit(scanned(halve))):
        with pytest.raises(ValueError, match=r"grad: fun assigns the parameter `layers.dense.bias`"):
            grad(loss)(Deep(run), X, Y)


@pytest.mark.slow
def test_low_rank_additions_in_a_rematerialized_stack() -> None:
    @nnx.jit
    def compare(model: Any) -> Any:
        plain, params = pure(model)
        each = jax.vmap(jax.grad(plain), (None, 0, 0))(params, X[:, None], Y[:, None])
        norms = per_sample_norm(loss, **PER_SAMPLE)(model, X, Y)
        return (grad(loss)(model, X, Y), nnx.grad(loss)(model, X, Y)), (norms, jax.vmap(optax.tree.norm)(each))

    for ours, expected in compare(Deep(*WAYS["scan-of-remat"], lora=True)):
        assert_close(ours, expected)

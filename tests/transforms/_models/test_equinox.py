"""Equinox modules as arguments: differentiated as by `eqx.filter_grad`, wherever parameters are."""

from __future__ import annotations

from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.transforms import (
    clipped_grad,
    grad,
    hessian_diagonal,
    hvp,
    jacrev,
    jvp,
    per_sample_grad,
    per_sample_norm,
    value_and_grad,
    vjp,
)
from plurax.transforms._models.equinox import differentiated, held, released
from plurax.transforms.privacy import DPSGD

pytestmark = pytest.mark.smoke

X = np.sin(np.arange(20.0, dtype=np.float32)).reshape(5, 4)
Y = np.cos(np.arange(10.0, dtype=np.float32)).reshape(5, 2)
BATCHED: dict[str, Any] = {"batch_argnums": (1, 2)}


class Net(eqx.Module):
    """A network with functions, numbers, text, a table of integers and a flag among its leaves."""

    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout
    table: jax.Array
    scale: float
    name: str

    def __call__(self, x: Any) -> Any:
        return self.mlp(self.drop(x)[self.table]) * self.scale


@pytest.fixture(scope="module")
def net() -> Net:
    mlp = eqx.nn.MLP(4, 2, 5, 1, key=jax.random.key(0))
    return Net(mlp, eqx.nn.Dropout(0.5, inference=True), jnp.array([3, 1, 2, 0]), 1.5, "net")


def loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def of_net(model: Any) -> Any:
    return loss(model, X, Y)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    chex.assert_trees_all_close(jax.tree.leaves(actual), jax.tree.leaves(expected), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def each(net: Net) -> Any:
    """Return per-sample gradients and their norms."""
    gradients = [eqx.filter_jit(eqx.filter_grad(loss))(net, X[i : i + 1], Y[i : i + 1]) for i in range(5)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *gradients)
    return stacked, jax.vmap(optax.tree.norm)(stacked)


@pytest.mark.slow
def test_gradients_have_none_for_other_leaves(net: Net) -> None:
    expected = eqx.filter_grad(loss)(net, X, Y)
    assert_same(grad(loss)(net, X, Y), expected)
    assert_same(eqx.filter_jit(grad(loss))(net, X, Y), expected)
    assert_same(grad(lambda tree, x: loss(tree["net"], x, Y))({"net": net}, X), {"net": expected})
    assert_same(value_and_grad(loss, argnums=(0, 1))(net, X, Y)[1][0], expected)
    assert_same(vjp(of_net, net)[1](1.0), (expected,))
    slope = jvp(of_net, (net,), (expected,))[1]
    np.testing.assert_allclose(slope, optax.tree.norm(expected) ** 2, rtol=1e-5)
    assert jax.tree.structure(hvp(of_net, net, expected)) == jax.tree.structure(expected)
    assert jax.tree.structure(hessian_diagonal(of_net)(net)) == jax.tree.structure(expected)
    arrays, rest = eqx.partition(net, eqx.is_inexact_array)
    assert_same(jacrev(lambda net: net(X[0]))(net), jax.jacrev(lambda arrays: eqx.combine(arrays, rest)(X[0]))(arrays))
    updates = optax.sgd(0.1).update(grad(loss)(net, X, Y), optax.sgd(0.1).init(arrays))[0]
    assert float(of_net(eqx.apply_updates(net, updates))) < float(of_net(net))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
def test_each_sample(method: str, net: Net, each: Any) -> None:
    gradients, norms = each
    assert_same(per_sample_grad(loss, **BATCHED)(net, X, Y), gradients)
    assert_same(per_sample_norm(loss, **BATCHED, method=method)(net, X, Y), norms)
    weights = jnp.minimum(1, 0.5 / norms)
    expected = jax.tree.map(lambda x: jnp.tensordot(weights, x, 1), gradients)
    assert_same(clipped_grad(loss, **BATCHED, l2_clip_norm=0.5, method=method)(net, X, Y), expected)


def test_private_steps(net: Net, each: Any) -> None:
    gradients, norms = each
    options: dict[str, Any] = {"num_examples": 5, "expected_batch_size": 5, "num_steps": 2, "target_delta": 0.1}
    dp = DPSGD(loss, optax.sgd(1.0), l2_clip_norm=0.5, noise_multiplier=0.0, **options)
    state = dp.init(net, key=jax.random.key(0))
    assert eqx.tree_equal(state.model, net)
    (first, second) = dp.batches((X, Y), state)
    state, _ = dp.step(state, first)
    weights = jnp.minimum(1, 0.5 / norms)
    step = jax.tree.map(lambda x: -jnp.tensordot(weights, x, 1) / 5, gradients)
    after = eqx.filter((state.model, eqx.apply_updates(net, step)), eqx.is_inexact_array)
    assert_same(*after)
    assert state.model.name == "net"
    after, _ = dp.step(state, second)
    np.testing.assert_array_equal(after.model.table, net.table)


@pytest.mark.slow
def test_private_steps_are_resumed_from_a_checkpoint(net: Net, tmp_path: Any) -> None:
    options: dict[str, Any] = {"num_examples": 5, "expected_batch_size": 3, "num_steps": 4, "target_delta": 0.1}
    dp = DPSGD(loss, optax.adam(0.1), l2_clip_norm=0.5, noise_multiplier=1.0, **options)
    state = dp.init(net, key=jax.random.key(0))
    whole, _ = dp.fit(state, (X, Y), progress=False)
    dp.fit(state, (X, Y), steps=2, progress=False, checkpoint_dir=tmp_path)
    resumed, _ = dp.fit(state, (X, Y), progress=False, checkpoint_dir=tmp_path)
    assert int(resumed.step) == 4
    assert eqx.tree_equal(resumed.model, whole.model)


def test_the_differentiated_leaves(net: Net) -> None:
    tree = {"net": net, "count": jnp.int32(3), "rate": 0.5, "flag": True, "act": jnp.tanh, "w": np.ones(2)}
    kept = differentiated(tree)
    assert kept["act"] is None
    assert (kept["count"], kept["rate"], kept["flag"]) == (3, 0.5, True)
    assert kept["net"].scale is None
    assert_same(kept["net"], eqx.filter(net, eqx.is_inexact_array))
    fewer = differentiated(tree, integers=True)
    assert [name for name in fewer if fewer[name] is not None] == ["net", "rate", "w"]


def test_a_module_is_held_as_its_arrays(net: Net) -> None:
    tree = held({"net": net, "w": X})
    assert all(eqx.is_array(x) for x in jax.tree.leaves(tree))
    assert "mlp.layers.0.weight" in jax.tree_util.keystr(jax.tree.leaves_with_path(tree)[0][0])
    doubled = released(jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(tree))["net"]
    np.testing.assert_array_equal(doubled.table, 2 * net.table)
    assert doubled.mlp.activation is net.mlp.activation
    assert (doubled.scale, doubled.name) == (1.5, "net")


def test_models_without_differentiable_leaves_are_refused(net: Net) -> None:
    for api in (grad, per_sample_grad):
        with pytest.raises(TypeError, match=r"argument `act` is .* of type \w+, but only .*floating-point arrays"):
            api(lambda act, x: x.sum())(jnp.tanh, X)
    with pytest.raises(TypeError, match=r"grad: argument `p\['n'\]` is 3 of type int"):
        grad(lambda p: p["w"].sum())({"w": X, "n": 3})

"""Where an operation has no rule, `jax.grad` is taken one example at a time, and `explain` reports it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plurax.transforms import clipped_grad, per_sample_grad, per_sample_norm

METHODS = pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
X = np.sin(np.arange(15.0)).reshape(5, 3).astype(np.float32)
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(3, 4).astype(np.float32), "b": np.float32([0.1, -0.2, 0.3, 0.4])}


def in_groups(params: Any, x: Any) -> Any:
    """A mixture of experts with an operation that JAX cannot map."""
    experts = jnp.stack([params["w"], jnp.sin(params["w"])])
    sizes = jnp.stack([x[0, 0] > 0, x[0, 0] <= 0]).astype(jnp.int32)
    return jnp.sum((lax.ragged_dot(x, experts, sizes) + params["b"]) ** 2)


def behind_a_loop(params: Any, x: Any) -> Any:
    """A loop over parameters and data that has no derivative and needs none."""
    hidden = x[0] @ params["w"] + params["b"]
    grown = lax.while_loop(lambda h: jnp.sum(h**2) < 50, lambda h: 1.5 * h + params["b"] ** 2, hidden)
    return jnp.sum(hidden * lax.stop_gradient(grown))


def through_a_reference(params: Any, x: Any) -> Any:
    """Values read from a mutable array depend on earlier writes."""
    hidden = jax.new_ref(jnp.ones(4))
    hidden[...] = x[0] @ params["w"]
    for _ in range(2):
        hidden[1] += hidden[0] * params["b"][2]
    return jnp.sum(jnp.sin(hidden[...] * params["b"]))


@functools.cache
def one_by_one(loss: Any, bound: float) -> tuple[Any, np.ndarray, Any]:
    gradient = jax.jit(jax.grad(loss))
    gradients = [gradient(PARAMS, x[None]) for x in X]
    norms = np.array([np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(g))) for g in gradients])
    weights = np.minimum(1, bound / norms)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)
    return jax.tree.map(lambda x: np.tensordot(weights, x, 1), stacked), norms, stacked


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual, expected)


@METHODS
@pytest.mark.parametrize("microbatch_size", [None, 1])
@pytest.mark.parametrize("loss", [in_groups, behind_a_loop, through_a_reference])
def test_unsupported_operations_run_one_example_at_a_time(loss: Any, microbatch_size: Any, method: str) -> None:
    total, norms, _ = one_by_one(loss, 1.5)
    assert (norms > 1.5).any()
    options = {"l2_clip_norm": 1.5, "method": method, "microbatch_size": microbatch_size}
    of = clipped_grad(loss, **options, return_grad_norms=True)
    together = jax.jit(lambda params, x: (of(params, x), per_sample_norm(loss, method=method)(params, x)))
    (found, aux), norms_alone = together(PARAMS, X)
    assert_close((found, aux.grad_norms, norms_alone), (total, norms, norms))
    if method == "auto":
        found, aux = of(PARAMS, X)
        assert_close((found, aux.grad_norms), (total, norms))
    report = of.explain(PARAMS, X)
    if loss is in_groups or method != "vmap":  # JAX can map the other losses
        assert (report.method, report.examples) == ("vmap", 1)
    if microbatch_size is None and report.examples == 1:
        assert report.why.startswith("one example at a time; method=")
        assert "failed (" in report.why
    assert {use.parameter for use in report.uses} == {"params['w']", "params['b']"}


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"memory_budget": "1MiB"}])
def test_gradients_of_operations_without_batching(options: Any) -> None:
    _, _, gradients = one_by_one(in_groups, 1.0)
    assert_close(jax.jit(per_sample_grad(in_groups, **options))(PARAMS, X), gradients)


def test_a_transform_without_batching() -> None:
    def transform(gradients: Any) -> Any:
        return lax.ragged_dot(gradients["w"], jnp.ones((2, 4, 2)), jnp.array([1, 2], jnp.int32))

    of = clipped_grad(lambda p, x: jnp.sum(x @ p["w"]), l2_clip_norm=1e3, pre_clipping_transform=transform)
    expected = sum(np.tile(x.reshape(3, 1) * 4, 2) for x in X)
    np.testing.assert_allclose(of(PARAMS, X), expected, rtol=1e-5, atol=1e-5)


@METHODS
def test_an_error_of_the_loss_is_raised_unchanged(method: str) -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(x @ params["w"].T)

    with pytest.raises(TypeError, match=r"dot_general requires contracting dimensions to have the same shape"):
        clipped_grad(loss, l2_clip_norm=1.0, method=method)(PARAMS, X)


@METHODS
def test_an_error_of_a_backward_rule_is_raised_unchanged(method: str) -> None:
    @jax.custom_vjp
    def rule(x: Any) -> Any:
        return x

    def backward(_: None, g: Any) -> Any:
        raise RuntimeError("there is no way back")

    rule.defvjp(lambda x: (x, None), backward)
    with pytest.raises(RuntimeError, match="there is no way back"):
        clipped_grad(lambda p, x: jnp.sum(rule(x @ p["w"])), l2_clip_norm=1.0, method=method)(PARAMS, X)

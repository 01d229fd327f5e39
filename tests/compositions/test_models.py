"""Compositions of transforms with stateful models and ensembles."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import (
    Dual,
    batch_jacobian,
    derivative,
    dual,
    gnvp,
    grad,
    hessian,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    value_and_grad,
    vmap,
)

X = np.array([0.5, -1.0, 2.0], np.float32)


class Cube(nnx.Module):
    """w x³, with a count of its calls."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array([1.0, 2.0, 3.0]))
        self.count = nnx.BatchStat(jnp.zeros((), int))

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        return self.w * x**3

    def total(self, x: Any) -> Any:
        return jnp.sum(self(x))

    def scaled(self, scale: float, x: Any) -> Any:
        return scale * self.total(x)

    def still(self, x: Any) -> Any:
        return jnp.sum(self.w * x**3)


W = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda m: jacfwd(grad(m.total)), np.diag(6 * W * X), id="jacfwd-grad"),
        pytest.param(lambda m: jacfwd(jacrev(m.total)), np.diag(6 * W * X), id="jacfwd-jacrev"),
        pytest.param(lambda m: hessian(m.total, mode="rev_fwd"), np.diag(6 * W * X), id="hessian"),
        pytest.param(lambda m: grad(grad(m.total), cotangent=1.0), 6 * W * X, id="grad-grad"),
        pytest.param(lambda m: jacfwd(grad(functools.partial(m.scaled, 2.0))), np.diag(12 * W * X), id="partial"),
        pytest.param(lambda m: grad(lambda x: value_and_grad(m.still)(x)[0]), 3 * W * X**2, id="a-function"),
        pytest.param(
            lambda m: lambda x: vmap(jacrev(grad(m.still)))(x[None])[0], np.diag(6 * W * X), id="vmap-jacrev-grad"
        ),
    ],
)
def test_a_method_under_several_transforms_runs_once(make: Any, expected: Any) -> None:
    model = Cube()
    chex.assert_trees_all_close(make(model)(X), jnp.asarray(expected), rtol=1e-6)
    assert int(model.count[...]) in (0, 1)
    runs = int(model.count[...])
    chex.assert_trees_all_close(nnx.jit(lambda model, x: make(model)(x))(model, X), jnp.asarray(expected), rtol=1e-6)
    assert int(model.count[...]) == 2 * runs


def test_a_model_under_several_transforms_runs_once() -> None:
    model = Cube()
    rows = jacfwd(jacobian(model))(X)
    assert rows.shape == (3, 3, 3)
    np.testing.assert_allclose(rows[np.arange(3), np.arange(3), np.arange(3)], 6 * W * X, rtol=1e-6)
    assert int(model.count[...]) == 1
    assert jacfwd(jacrev(model)).__name__ == "jacfwd(jacrev(Cube))"


def test_a_decorated_transform_keeps_its_decorator() -> None:
    transformed = grad(Cube().still)

    @functools.wraps(transformed)
    def twice(x: Any) -> Any:
        return 2 * transformed(x)

    chex.assert_trees_all_close(jacfwd(twice)(X), jnp.diag(12 * W * X), rtol=1e-6)
    chex.assert_trees_all_close(jacfwd(jax.jit(transformed))(X), jnp.diag(6 * W * X), rtol=1e-6)


@pytest.mark.parametrize(
    ("outer", "match"),
    [(lambda f: vmap(grad(f)), "vmap: the mapped function changes"), (lambda f: derivative(f, 2), "derivative: fun")],
)
def test_state_that_would_be_lost_is_refused(outer: Any, match: str) -> None:
    model = Cube()
    with pytest.raises(ValueError, match=rf"^{match}.* the state of Cube \(`count`\), which would be lost"):
        outer(model.total)(X[None])
    assert int(model.count[...]) == 0


def test_modules_of_a_derivative_that_share_a_variable_are_refused() -> None:
    first, second = Cube(), Cube()
    second.w = first.w
    with pytest.raises(ValueError, match=r"^derivative: `a` and `b` share the variable `w`"):
        derivative(lambda x, a, b: a.still(x) + b.still(x), 1)(X, first, second)


@pytest.mark.slow
def test_derivatives_of_an_ensemble() -> None:
    """As an argument, an ensemble gives its stacked trainable arrays; as a function, it is all members at once."""
    ens = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 4, seed=0)
    for transform in (jacfwd, jacrev, jacobian):
        by_input = transform(ens)(X)
        chex.assert_trees_all_close(by_input, jnp.swapaxes(ens.trainable["kernel"], 1, 2), rtol=1e-6)
        rows = vmap(lambda member, x: transform(lambda m: m(x))(member), (0, None))(ens, X)  # noqa: B023 (used at once)
        by_kernel = np.broadcast_to(np.einsum("i,op->oip", X, np.eye(2)), (4, 2, 3, 2))
        chex.assert_trees_all_close(rows["kernel"][...], jnp.asarray(by_kernel, jnp.float32), rtol=1e-6)
        whole = transform(lambda ens: ens(X))(ens)
        diagonal = np.asarray(nnx.to_pure_dict(whole)["bias"] if isinstance(whole, nnx.State) else whole["bias"])
        chex.assert_trees_all_close(diagonal, np.einsum("mn,op->monp", np.eye(4), np.eye(2)), rtol=1e-6)
    along_ones = jnp.sum(ens.trainable["kernel"], 1)
    chex.assert_trees_all_close(derivative(ens, 1)(X), along_ones, rtol=1e-6)
    chex.assert_trees_all_close(dual(ens)(Dual(X, np.ones(3, np.float32))).tangent, along_ones, rtol=1e-6)


def test_models_shared_by_a_batch() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    batch = np.stack([X, 2 * X, -X, X + 1])
    for rows in ("vmap", "independent"):
        by_input = batch_jacobian(lambda model, x: jnp.tanh(model(x)), 1, in_axes=(None, 0), rows=rows)(model, batch)
        slope = 1 - np.tanh(np.asarray(model(batch))) ** 2
        expected = np.einsum("bo,io->boi", slope, np.asarray(model.kernel[...]))
        chex.assert_trees_all_close(by_input, jnp.asarray(expected), rtol=1e-5, atol=1e-6)
    by_model = batch_jacobian(lambda model, x: jnp.tanh(model(x)), in_axes=(None, 0))(model, batch)
    expected = np.einsum("bo,bi,op->boip", slope, batch, np.eye(2))
    chex.assert_trees_all_close(by_model["kernel"][...], jnp.asarray(expected, jnp.float32), rtol=1e-5, atol=1e-6)


def test_products_at_complex_points() -> None:
    """As in `jax`: real functions of complex numbers, with its gradient convention."""
    z = np.array([1 + 2j, -0.5j, 3.0], np.complex64)
    v = np.array([1j, 2.0, 1 - 1j], np.complex64)
    energy = lambda z: jnp.sum(jnp.abs(z) ** 2 + jnp.real(z**3))
    expected = jax.jvp(jax.grad(energy), (z,), (v,))[1]
    chex.assert_trees_all_close(hvp(energy, z, v), expected, rtol=1e-6)
    loss = lambda y: jnp.sum(jnp.real(y) ** 2 + jnp.imag(y) ** 4)
    pushed = jax.jvp(jnp.square, (z,), (v,))[1]
    curved = jax.jvp(jax.grad(loss), (jnp.square(z),), (pushed,))[1]
    pulled = jax.vjp(jnp.square, z)[1](curved)[0]
    chex.assert_trees_all_close(gnvp(jnp.square, loss, z, v), pulled, rtol=1e-5)


def test_a_dual_of_a_gradient_of_a_method() -> None:
    model = Cube()
    out = dual(grad(model.total))(Dual(X, np.ones(3, np.float32)))
    chex.assert_trees_all_close(out.tangent, jnp.asarray(6 * W * X), rtol=1e-6)
    assert int(model.count[...]) == 1

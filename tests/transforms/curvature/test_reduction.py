"""Curvature refuses a loss that is not what it is said to be: a mean, or a sum, over the examples of a batch."""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from plurax.transforms.curvature import ekfac, ggn_diagonal, influence, kfac, laplace, self_influence

if __name__ != "__main__":  # the processes run this file as a script
    from ..._processes import Process, ended, free_port

RNG = np.random.default_rng(0)
X, Y, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((8, 3), (8, 2), (3, 2)))
SIZE = len(X)


def model(w: Any, x: Any) -> Any:
    return x @ w


def mean(o: Any, y: Any) -> Any:
    return 0.5 * jnp.mean(jnp.sum((o - y) ** 2, axis=-1))


def total(o: Any, y: Any) -> Any:
    return len(o) * mean(o, y)


def coupled(o: Any, y: Any) -> Any:
    return jnp.sqrt(mean(o, y))


def hessian(loss: Any) -> jax.Array:
    """Return the Hessian of a squared error of all examples, which is its Gauss-Newton matrix, by JAX."""
    return jax.hessian(lambda w: loss(model(w, X), Y))(W).reshape(W.size, W.size)


CALLS = {
    "ggn_diagonal": lambda loss, **options: ggn_diagonal(model, loss, **options)(W, X, Y),
    "kfac": lambda loss, **options: kfac(model, loss, fisher="exact", **options)(W, X, Y).dense(),
    "ekfac": lambda loss, **options: ekfac(model, loss, fisher="exact", **options)(W, X, Y).dense(),
    "laplace": lambda loss, **options: laplace(model, loss, W, (X, Y), prior_precision=1.0, **options).mean_loss,
    "influence": lambda loss, **options: influence(model, loss, W, (X, Y), damping=0.5, **options)(X[:2], Y[:2]),
    "self_influence": lambda loss, **options: self_influence(model, loss, W, (X, Y), damping=0.5, **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_loss_that_is_not_what_it_is_said_to_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'^{name}: the loss of a batch is the sum .*; pass reduction="sum", or'):
        CALLS[name](total)
    with pytest.raises(ValueError, match=f'^{name}: the loss of a batch is the mean .*; pass reduction="mean", or'):
        CALLS[name](mean, reduction="sum")
    with pytest.raises(ValueError, match=f"^{name}: the loss of a batch is neither .* check_loss=False if the losses"):
        CALLS[name](coupled)
    with pytest.raises(ValueError, match=f"^{name}: reduction must be one of 'mean', 'sum', but got 'max'"):
        CALLS[name](mean, reduction="max")
    # It is as if the loss were the mean of the losses of single examples.
    expected = CALLS[name](mean)
    if name != "laplace":
        np.testing.assert_array_equal(CALLS[name](total, check_loss=False), expected)


@pytest.mark.parametrize("name", ["kfac", "ekfac"])
@pytest.mark.parametrize(("loss", "reduction"), [(mean, "mean"), (total, "sum")])
def test_the_factors_are_those_of_the_loss_of_the_batch(name: str, loss: Any, reduction: str) -> None:
    found = CALLS[name](loss, reduction=reduction)
    np.testing.assert_allclose(found, hessian(loss), rtol=1e-4, atol=1e-5)
    diagonal = CALLS["ggn_diagonal"](loss, reduction=reduction)
    np.testing.assert_allclose(diagonal.ravel(), jnp.diag(hessian(loss)), rtol=1e-5)


def test_the_influence_of_a_sum_has_the_inverse_of_its_hessian() -> None:
    gradients = jax.vmap(lambda x, y: jax.grad(lambda w: mean(model(w, x[None]), y[None]))(W).ravel())(X, Y)
    expected = gradients @ jnp.linalg.solve(hessian(total) + 0.5 * jnp.eye(W.size), gradients.T)
    batches = [(X[:3], Y[:3]), (X[3:], Y[3:])]
    options: Any = {"curvature": "kfac", "damping": 0.5, "reduction": "sum"}
    found = influence(model, total, W, batches, **options)(X, Y)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    alone = self_influence(model, total, W, batches, **options)
    np.testing.assert_allclose(alone, jnp.diag(expected), rtol=1e-3, atol=1e-4)


def test_the_posterior_of_a_sum_is_that_of_the_mean() -> None:
    batches = [(X[:3], Y[:3]), (X[3:], Y[3:])]
    of_sum = laplace(model, total, W, batches, reduction="sum")
    of_mean = laplace(model, mean, W, batches)
    assert jax.tree.structure(of_sum) == jax.tree.structure(of_mean)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), of_sum, of_mean)
    np.testing.assert_allclose(of_sum.mean_loss, total(model(W, X), Y) / SIZE, rtol=1e-5)


def test_a_model_that_couples_examples_is_refused() -> None:
    def normalized(w: Any, x: Any) -> Any:
        return (x - x.mean(0)) @ w

    with pytest.raises(ValueError, match="^kfac: the loss of a batch is neither"):
        kfac(normalized, mean, fisher="exact")(W, X, Y)


def test_losses_are_compared_once_for_shapes_and_never_in_a_trace() -> None:
    sizes = []

    def counted(o: Any, y: Any) -> Any:
        sizes.append(len(o))
        return mean(o, y)

    factors = kfac(model, counted, fisher="exact")
    jax.jit(factors)(W, X, Y)
    assert set(sizes) == {1}
    for _ in range(3):
        factors(W, X, Y)
    assert sizes.count(SIZE) == 1
    factors(W, X[:5], Y[:5])
    assert sizes.count(5) == 1
    assert set(sizes) == {1, 5, SIZE}


def test_the_report_says_what_was_found() -> None:
    for of in (kfac(model, mean, fisher="exact"), ggn_diagonal(model, mean)):
        report = of.explain(W, X, Y)
        assert report.loss.kind == "mean"
        assert str(report).endswith("loss of a batch: the mean over its examples")
    one = ggn_diagonal(model, mean).explain(W, X[:1], Y[:1])
    assert str(one).endswith("loss of a batch: unknown: there are fewer than two examples to compare")
    assert "loss of a batch" not in str(ggn_diagonal(model, mean, check_loss=False).explain(W, X, Y))
    with pytest.raises(ValueError, match="^ggn_diagonal: the loss of a batch is the sum"):
        ggn_diagonal(model, total).explain(W, X, Y)


# Two processes with two devices each.


def whole(x: jax.Array) -> np.ndarray:
    """Return an array that is sharded over the devices of both processes."""
    assert isinstance(x.sharding, NamedSharding)
    return np.asarray(jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec())))


def on_meshes() -> None:
    """Check that examples that are sharded over all devices are compared; called in each process."""
    alone = {name: np.asarray(CALLS[name](mean)) for name in ("influence", "self_influence")}
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
        x, y = jax.device_put((X, Y), NamedSharding(mesh, PartitionSpec("data")))
        report = ggn_diagonal(model, mean).explain(w, x, y)
        assert report.loss is not None
        assert report.loss.kind == "mean", report.loss
        with pytest.raises(ValueError, match="^ggn_diagonal: the loss of a batch is neither"):
            ggn_diagonal(model, coupled)(w, x, y)
        found = ggn_diagonal(model, total, reduction="sum")(w, x, y)
        np.testing.assert_allclose(found.ravel(), jnp.diag(hessian(total)), rtol=1e-5)
        factors = kfac(model, total, fisher="exact", reduction="sum")(w, x, y)
        np.testing.assert_allclose(factors.dense(), hessian(total), rtol=1e-4, atol=1e-5)
        of = influence(model, mean, w, (x, y), damping=0.5)
        np.testing.assert_allclose(whole(of(x, y))[:2], alone["influence"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            whole(self_influence(model, mean, w, (x, y), damping=0.5)), alone["self_influence"], rtol=1e-4
        )


@pytest.mark.slow
def test_examples_on_a_mesh_are_compared() -> None:
    environment, port = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}, str(free_port())
    found = ended([Process([sys.executable, __file__, str(i), port], env=environment) for i in range(2)], 300)
    assert [code for code, *_ in found] == [0, 0], found


if __name__ == "__main__":
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
    on_meshes()

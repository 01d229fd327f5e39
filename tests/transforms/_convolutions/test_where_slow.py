"""Convolutions with few channels as products, and all others as they were."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from plurax.ensemble import Ensemble
from plurax.transforms._convolutions.as_products import products_unless_differentiated, run_where_slow


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rewritten(fun: Callable[..., Any]) -> Callable[..., Any]:
    return products_unless_differentiated(fun, run_where_slow)


def convolutions(fun: Callable[..., Any], *args: Any) -> int:
    """Return how many convolutions the compiled program has."""
    return jax.jit(fun).lower(*args).as_text().count("stablehlo.convolution")


def convolve(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


@pytest.mark.parametrize(
    ("channels", "features", "window", "groups", "stay"),
    [
        (1, 6, 5, 1, 0),
        (6, 16, 3, 1, 0),
        (3, 32, 3, 1, 0),
        (32, 32, 3, 32, 0),
        (1, 32, 3, 1, 1),
        (16, 6, 3, 1, 0),
        (16, 16, 3, 1, 1),
        (1, 6, 1, 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_those_that_xla_is_slow_at(channels, features, window, groups, stay, dtype):
    x, w = (
        normal(0, 3, 9, 7, channels, dtype=dtype),
        normal(1, window, window, channels // groups, features, dtype=dtype),
    )

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        return nnx.max_pool(nnx.relu(convolve(x, w, 2, groups)), (2, 2), (1, 2)).sum(0)

    assert convolutions(rewritten(fun), x, w) == stay
    ours, theirs = jax.jit(rewritten(fun))(x, w), jax.jit(fun)(x, w)
    assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(ours, float), np.asarray(theirs, float), rtol=tolerance, atol=tolerance)


def narrow_and_wide(x: jax.Array, few: jax.Array, many: jax.Array) -> jax.Array:
    """Return a program with convolutions of both kinds in a scan, a branch, a call and rematerialization."""
    block = lambda x, w: (nnx.gelu(convolve(x, w)), None)
    x = lax.scan(block, x, few)[0]
    x = lax.cond(x.sum() > 0, lambda x: convolve(x, few[0]), lambda x: x, x)
    x = jax.checkpoint(lambda x: jax.jit(convolve)(x, many))(x)
    return nnx.avg_pool(x, (3, 3), (2, 2)) + jnp.sin(x[:, :3, :2].mean())


def test_programs_with_both_kinds_and_their_derivatives():
    args = normal(0, 2, 8, 7, 4), normal(1, 3, 3, 3, 4, 4), normal(2, 3, 3, 4, 20)
    assert (convolutions(narrow_and_wide, *args), convolutions(rewritten(narrow_and_wide), *args)) == (3, 1)
    ours, theirs = (
        jax.jit(
            lambda *args, fun=fun: (fun(*args), jax.grad(lambda *args: jnp.sin(fun(*args)).sum(), (0, 1, 2))(*args))
        )
        for fun in (rewritten(narrow_and_wide), narrow_and_wide)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours(*args), theirs(*args))


class LeNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Conv(1, 3, (3, 3), rngs=rngs), nnx.Conv(3, 5, (3, 3), strides=2, rngs=rngs)
        self.out = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))
        return self.out(nnx.relu(self.second(x)).mean((1, 2)))


@pytest.mark.slow
def test_an_ensemble_calls_its_members_with_products_and_has_their_derivatives():
    ens, x = Ensemble.create(LeNet, 3, seed=0), normal(0, 4, 10, 8, 1)
    assert convolutions(lambda ens, x: ens(x), ens, x) == 0
    np.testing.assert_allclose(ens(x), jnp.stack([member(x) for member in ens]), rtol=1e-5, atol=1e-6)

    def loss(x: jax.Array, call: Any) -> jax.Array:
        return jnp.sin(jnp.stack(call(x))).sum()

    derivatives = [
        (
            jax.jit(jax.grad(loss), static_argnums=1)(x, call),
            jax.jvp(lambda x, c=call: loss(x, c), (x,), (jnp.cos(x),))[1],
        )
        for call in (ens, lambda x: [member(x) for member in ens])
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *derivatives)

"""Types of transformed functions: `make types` checks the assertions, this runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest

from plurax.transforms import derivative, grad, hessian_trace, jacfwd, jacrev, laplacian, value_and_grad, vmap


def scaled(x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return (scale * x**2).sum()


def pair(x: jax.Array, y: int) -> jax.Array:
    return x * y


def test_transforms_keep_the_parameters_of_a_function() -> None:
    x = jnp.ones(3)
    for transform in (grad, jacfwd, jacrev, hessian_trace, laplacian):
        assert transform(scaled)(x, scale=2.0) is not None
    kept: Callable[[jax.Array, int], Any] = grad(pair, cotangent=1.0)
    assert_type(kept(x, 2), Any)
    assert_type(vmap(pair, in_axes=(0, None))(x, 2), jax.Array)
    assert_type(value_and_grad(scaled)(x), tuple[jax.Array, Any])
    assert_type(vmap(vmap(pair, in_axes=(0, None)), in_axes=(0, None))(jnp.ones((2, 3)), 2), jax.Array)
    assert derivative(lambda x: x**3, 2)(1.0) == 6


def test_a_wrong_argument_is_an_error_for_the_checker_and_python() -> None:
    with pytest.raises(TypeError):
        grad(scaled)(jnp.ones(3), scle=2.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        vmap(pair)(jnp.ones(3))  # type: ignore[call-arg]

"""Order between computations that share no data, in the compiled program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms.program import depend

pytestmark = pytest.mark.smoke


def compiled(fun: Callable[..., Any], *args: Any) -> str:
    return jax.jit(fun).lower(*args).compile().as_text() or ""


X = jnp.arange(5.0)


def test_both_stay_in_the_program_when_both_are_used() -> None:
    text = compiled(lambda x: depend(jnp.cos(x), jnp.sinh(x).sum()), X)
    assert "cosine" in text
    assert "exponential" in text


def test_one_alone_drops_the_other() -> None:
    text = compiled(lambda x: depend(jnp.cos(x), jnp.sinh(x).sum())[0], X)
    assert "cosine" in text
    assert "exponential" not in text


def test_values_before_and_after_are_not_merged() -> None:
    def twice(x: jax.Array, hold: bool) -> jax.Array:
        y = jnp.sin(x)
        x, y = depend(x, y) if hold else (x, y)
        return y + jnp.sin(x)

    assert compiled(lambda x: twice(x, False), X).count(" sine(") == 1
    lowered = jax.jit(lambda x: twice(x, True)).lower(X).as_text()
    assert lowered.count("stablehlo.sine") == 2
    assert "stablehlo.optimization_barrier" in lowered


def test_values_are_unchanged_in_any_pytree_and_transform() -> None:
    def fun(x: jax.Array) -> Any:
        return depend({"y": x * 2.0, "n": 3}, (x.sum(), [x > 1.0]))

    for transform in (lambda f: f, jax.jit):
        y, a = transform(fun)(X)
        np.testing.assert_array_equal(y["y"], X * 2.0)
        assert (int(y["n"]), float(a[0])) == (3, 10.0)
    y, (total, _) = jax.vmap(fun)(jnp.stack([X, 2.0 * X, X]))
    assert (y["y"].shape, total.shape) == ((3, 5), (3,))
    gradient = jax.grad(lambda x: sum(jax.tree.leaves(depend(jnp.sin(x).sum(), (x**2).sum()))))(X)
    np.testing.assert_allclose(gradient, jnp.cos(X) + 2 * X, rtol=1e-6)


def test_ordered_callbacks_run_in_the_order_they_are_written_in() -> None:
    seen: list[int] = []

    @jax.jit
    def fun(x: jax.Array) -> jax.Array:
        for i in (3, 1, 2):
            jax.debug.callback(lambda i: seen.append(int(i)), i, ordered=True)
        return x

    for _ in range(3):
        fun(X)
    jax.effects_barrier()
    assert seen == [3, 1, 2] * 3

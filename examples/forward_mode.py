"""Forward-mode differentiation with dual numbers: values that carry their tangents.

    python examples/forward_mode.py

The steps follow PyTorch's tutorial "Forward-mode Automatic Differentiation": dual tensors, a module with tangents on
its parameters, the functional `jvp`, and a custom rule. Every printed array is checked first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.test_util import check_grads

from plurax.transforms import Dual, derivative, dual, grad, jvp


def show(title: str, got: Any, expected: Any) -> None:
    """Check an array against the expected one, and print it."""
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    text = np.array2string(np.asarray(got), separator=", ", formatter={"float": "{:.3g}".format}).replace("\n", "")
    print(f"  {title:45}  {text}")


def fn(x: jax.Array, y: jax.Array) -> jax.Array:
    return x**2 + y**2


def naive(x: jax.Array) -> jax.Array:
    return jnp.log(1 + jnp.exp(x))


@jax.custom_jvp
def log1pexp(x: jax.Array) -> jax.Array:
    """Compute log(1 + eˣ) = max(x, 0) + log(1 + exp(−|x|)), without overflow."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@log1pexp.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return log1pexp(x), jax.nn.sigmoid(x) * t


def main() -> None:
    rng = np.random.default_rng(0)
    primal, tangent = (jnp.asarray(rng.normal(size=(2, 3)), jnp.float32) for _ in range(2))
    y = jnp.ones((2, 3))

    print("1. Dual numbers: a value and its tangent, computed in one pass")
    out = dual(fn)(Dual(primal, tangent), y)
    show("fn(x, y) = x² + y²: the value", out.primal, primal**2 + 1)
    show("its tangent 2·x·t: y is held constant", out.tangent, 2 * primal * tangent)
    both = dual(fn)(Dual(primal, tangent), Dual(y, y))
    show("a tangent for y, too: 2·x·t + 2·y", both.tangent, 2 * primal * tangent + 2)
    jitted = jax.jit(dual(fn))(Dual(primal, tangent), y)
    show("a Dual is a pytree: the same under jit", jitted.tangent, out.tangent)
    basis = jnp.eye(3)
    columns = jax.vmap(lambda t: dual(jnp.sin)(Dual(primal[0], t)).tangent)(basis)
    show("vmap: columns of the Jacobian of sin", columns, jnp.diag(jnp.cos(primal[0])))

    print("\n2. A module: tangents on its parameters")
    model, x = nnx.Linear(5, 4, rngs=nnx.Rngs(0)), jnp.asarray(rng.normal(size=(16, 5)), jnp.float32)
    direction = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), nnx.state(model, nnx.Param))
    out = dual(lambda model: jnp.sum(model(x)))(Dual(model, direction))
    gradient = grad(lambda model: jnp.sum(model(x)))(model)
    product = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))
    show("tangent of the loss along a direction", out.tangent, product)
    show("reverse mode: gradient · direction", product, out.tangent)

    print("\n3. The functional API: jvp")
    value, slope = jvp(fn, (primal, y), (tangent, y))
    show("jvp(fn, primals, tangents): the value", value, both.primal)
    show("its tangent, as above", slope, both.tangent)
    held = jvp(lambda x: fn(x, y), (primal,), (tangent,))[1]
    show("y held constant by a closure", held, 2 * primal * tangent)

    print("\n4. A custom rule")
    check_grads(log1pexp, (primal,), order=2, atol=1e-2, rtol=1e-2)
    far = Dual(jnp.array([-100.0, 0.0, 100.0]), jnp.ones(3))
    show("tangents of log(1 + eˣ): eˣ overflows at 100", dual(naive)(far).tangent,
         [0, 0.5, np.nan])  # fmt: skip
    out = dual(log1pexp)(far)
    show("a version without overflow: the value", out.primal, [0, np.log(2), 100])
    show("its derivative by the custom rule", out.tangent, [0, 0.5, 1])

    print("\n5. Higher orders: nested duals, or derivative")
    slope_of = lambda x: dual(jnp.sin)(Dual(x, jnp.ones_like(x))).tangent  # noqa: E731 (a formula)
    second = dual(slope_of)(Dual(primal, jnp.ones_like(primal)))
    show("sin″ by nested duals", second.tangent, -jnp.sin(primal))
    show("sin‴ by Taylor mode", derivative(jnp.sin, 3)(primal), -jnp.cos(primal))


if __name__ == "__main__":
    main()

"""A tour of `vmap`: apply one function to many inputs.

    python examples/vmap_tour.py

The steps follow MindSpore's tutorial on `vmap`. Every printed array is checked against a plain Python loop.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plurax.transforms import grad, vmap


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the dot products of `w` (3,) with the windows of `x` (5,)."""
    return jnp.array([jnp.dot(x[i - 1 : i + 2], w) for i in range(1, len(x) - 1)])


def show(title: str, got: Any, expected: Any) -> None:
    """Check an array against the expected one, and print it, or the shape of a large one."""
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    text = np.array2string(np.asarray(got), separator=", ", formatter={"float": "{:.3g}".format}).replace("\n", "")
    print(f"  {title:42}  {text if got.size < 10 else f'an array of shape {got.shape}'}")


def refused(title: str, call: Callable[[], Any]) -> None:
    """Print the error of a call that must fail."""
    try:
        call()
    except (TypeError, ValueError) as error:
        print(f"  {title}")
        print(textwrap.fill(f"{type(error).__name__}: {error}", 96, initial_indent="    ", subsequent_indent="    "))
    else:
        raise AssertionError(f"{title}: no error was raised")


def main() -> None:
    x, w = jnp.arange(5.0), jnp.array([1.0, 2.0, 3.0])
    xs, ws = jnp.stack([x, x + 1, x + 2]), jnp.stack([w, 2 * w, 3 * w])
    loop = jnp.stack([convolve(a, b) for a, b in zip(xs, ws, strict=True)])

    print("1. One function, many inputs")
    show("convolve(x, w): one input", convolve(x, w), [8, 14, 20])
    show("vmap(convolve)(xs, ws): slice i of each", vmap(convolve)(xs, ws), loop)
    by_columns = vmap(convolve, in_axes=(0, 1), out_axes=1)(xs, ws.T)
    show("in_axes=(0, 1), out_axes=1: by columns", by_columns, loop.T)
    one_w = vmap(convolve, in_axes=(0, None))(xs, w)
    show("in_axes=(0, None): one w for all", one_w, jnp.stack([convolve(a, w) for a in xs]))

    print("\n2. Errors for arguments that cannot be mapped, raised before tracing")
    refused("different sizes", lambda: vmap(convolve)(xs, ws[:2]))
    refused("an axis out of range", lambda: vmap(convolve, in_axes=(0, 2))(xs, ws))
    refused("a different structure", lambda: vmap(lambda p: p["x"], in_axes=({"y": 0},))({"x": xs}))
    refused("nothing mapped", lambda: vmap(convolve, in_axes=None)(xs, ws))

    print("\n3. Nested, and composed with grad")
    every_pair = vmap(vmap(convolve, in_axes=[None, 0]), in_axes=[0, None])
    show("every x with every w", every_pair(xs, ws), [[convolve(a, b) for b in ws] for a in xs])

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x + 2 * y).sum()

    a, b = jnp.array([[1.0, 2, 3], [2, 3, 4]]), jnp.array([[2.0, 3, 4], [3, 4, 5]])
    of_mapped = grad(vmap(f), argnums=(0, 1), cotangent=1.0)(a, b)
    mapped_grad = vmap(grad(f, argnums=(0, 1)))(a, b)
    show("grad(vmap(f), cotangent=1.0), w.r.t. x", of_mapped[0], jnp.cos(a + 2 * b))
    show("vmap(grad(f)), w.r.t. y", mapped_grad[1], 2 * jnp.cos(a + 2 * b))

    print("\n4. A module: its parameters are not mapped")
    dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    images = jnp.arange(18.0).reshape(3, 2, 3)
    show("vmap(dense)(images), of shape (3, 2, 3)", vmap(dense)(images), jnp.stack([dense(i) for i in images]))
    refused("a module that changes its own state",
            lambda: vmap(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))(images))  # fmt: skip

    print("\n5. Less memory: chunks of the inputs")
    show("vmap(convolve, chunk_size=2)(xs, ws)", vmap(convolve, chunk_size=2)(xs, ws), loop)


if __name__ == "__main__":
    main()

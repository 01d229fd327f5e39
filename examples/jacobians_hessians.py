"""Jacobians and Hessians, and products with them without forming the matrix.

    python examples/jacobians_hessians.py

The steps follow PyTorch's tutorial "Jacobians, Hessians, hvp, vhp, and more: composing function transforms", with its
sizes. Every result is checked against another method before it is printed. Times are the best of several calls of
compiled programs.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plurax.transforms import batch_jacobian, hessian, hvp, jacfwd, jacobian, jacrev, value_grad_and_hvp, vhp, vjp, vmap


def predict(weight: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(weight @ x + bias)


def layer(inputs: int, outputs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return weights, biases and an input, drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    shapes = ((outputs, inputs), (outputs,), (inputs,))
    weight, bias, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return weight / inputs**0.5, bias, x


def check(got: Any, expected: Any) -> None:
    """Raise unless two trees of arrays are equal to the accuracy of float32."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), (got, expected)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5), got, expected)


def timed(fun: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Compile and call `fun`; return its result, and the milliseconds of a call."""
    run = jax.jit(fun).lower(*args).compile()
    result, times = None, []
    while len(times) < 5 and sum(times) < 0.5:
        start = time.perf_counter()
        result = jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return result, min(times) * 1e3


def main() -> None:
    print("1. The Jacobian of tanh(Wx + b), 16 inputs and 16 outputs")
    weight, bias, x = layer(16, 16)
    slope = 1 - predict(weight, bias, x) ** 2
    expected = slope[:, None] * weight
    _, pull = vjp(lambda x: predict(weight, bias, x), x)
    check(jnp.stack([pull(row)[0] for row in jnp.eye(16)]), expected)
    print(f"   a vjp for each row, in a loop     {expected.shape}")
    check(vmap(pull)(jnp.eye(16))[0], expected)
    print("   one vjp, mapped over the rows")
    for transform in (jacrev, jacfwd, jacobian):
        check(transform(predict, argnums=2)(weight, bias, x), expected)
    print("   jacrev, jacfwd, jacobian: one call")

    print("\n2. With respect to several arguments, or to the parameters of a module")
    by_weight, by_bias = jacrev(predict, argnums=(0, 1))(weight, bias, x)
    check(by_bias, jnp.diag(slope))
    check(by_weight, jnp.einsum("o,op,i->opi", slope, jnp.eye(16), x))
    print(f"   weight and bias                   {by_weight.shape}, {by_bias.shape}")
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    model.kernel[...], model.bias[...] = weight.T, bias
    of_module = jacrev(lambda model, x: jnp.tanh(model(x)))(model, x)
    check(of_module["bias"][...], by_bias)
    check(of_module["kernel"][...], jnp.swapaxes(by_weight, 1, 2))
    print(f"   parameters of a Flax module       {of_module['kernel'].shape}, {of_module['bias'].shape}")

    print("\n3. Columns or rows? jacobian picks the cheaper mode, without running either")
    for inputs, outputs in ((32, 2048), (2048, 32)):
        arguments = layer(inputs, outputs)
        forward, columns = timed(jacfwd(predict, 2), *arguments)
        reverse, rows = timed(jacrev(predict, 2), *arguments)
        chosen, taken = timed(jacobian(predict, 2), *arguments)
        check(forward, reverse)
        check(chosen, reverse)
        choice = jacobian(predict, 2).explain(*arguments)
        print(
            f"   {inputs:4} to {outputs:4}: jacfwd {columns:6.2f} ms, jacrev {rows:6.2f} ms, jacobian {taken:6.2f} ms\n"
            f"                 {choice.mode} mode: {choice.why}"
        )

    print("\n4. Less memory: columns in chunks of a given size, or as many as fit")
    arguments = layer(512, 512)
    dense, _ = timed(jacfwd(predict, 2), *arguments)
    for options in ({}, {"chunk_size": 16}, {"memory_budget": "128KiB"}):
        compiled = jax.jit(jacfwd(predict, 2, **options)).lower(*arguments).compile()
        check(compiled(*arguments), dense)
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        print(f"   {options or 'all at once'!s:30} {temporaries / 2**10:7.1f} KiB of temporaries")

    print("\n5. The Hessian for 512 inputs and 32 outputs, by pairs of modes")
    weight, bias, x = layer(512, 32)
    t = predict(weight, bias, x)
    expected = jnp.einsum("o,oi,oj->oij", -2 * t * (1 - t**2), weight, weight)
    for mode in ("fwd_rev", "rev_rev", "fwd_fwd"):
        found, took = timed(hessian(predict, 2, mode=mode), weight, bias, x)
        check(found, expected)
        print(f"   {mode}  {found.shape}  {took:7.1f} ms")

    print("\n6. A Jacobian and a Hessian for each sample of a batch: 64 samples, 31 inputs, 33 outputs")
    weight, bias, _ = layer(31, 33)
    batch = jnp.asarray(np.random.default_rng(1).normal(size=(64, 31)), jnp.float32)
    expected = (1 - jnp.tanh(batch @ weight.T + bias) ** 2)[:, :, None] * weight
    check(vmap(jacrev(predict, 2), in_axes=(None, None, 0))(weight, bias, batch), expected)
    print(f"   vmap of jacrev                    {expected.shape}")

    def of_batch(batch: jax.Array) -> jax.Array:
        return jnp.tanh(batch @ weight.T + bias)

    check(batch_jacobian(of_batch, rows="independent", check=True)(batch), expected)
    print('   batch_jacobian, rows="independent": sums over the batch, since no row depends on another')
    try:
        batch_jacobian(lambda batch: of_batch(batch - batch.mean(0)), rows="independent", check=True)(batch)
    except ValueError as error:
        print(textwrap.fill(f"if rows depend on others: {error}", 96, initial_indent="   ", subsequent_indent="   "))
    else:
        raise AssertionError("dependent rows were accepted")
    curvature = vmap(hessian(predict, 2), in_axes=(None, None, 0))(weight, bias, batch)
    check(curvature[5], hessian(predict, 2)(weight, bias, batch[5]))
    print(f"   vmap of hessian                   {curvature.shape}")

    print("\n7. Products with the Hessian of sum(sin x), 2048 inputs, without forming it")
    rng = np.random.default_rng(2)
    x, v = (jnp.asarray(rng.normal(size=2048), jnp.float32) for _ in range(2))

    def energy(x: jax.Array) -> jax.Array:
        return jnp.sin(x).sum()

    for mode in ("fwd_rev", "rev_rev"):
        product, took = timed(lambda x, v, mode=mode: hvp(energy, x, v, mode=mode), x, v)
        check(product, -jnp.sin(x) * v)
        print(f"   hvp, {mode}                      {took:.3f} ms")
    check(vhp(energy, x, v), product)
    value, gradient, product = value_grad_and_hvp(energy, x, v)
    check((value, gradient, product), (energy(x), jnp.cos(x), -jnp.sin(x) * v))
    print("   value_grad_and_hvp: value, gradient and product in one pass")
    many = vmap(lambda v: hvp(energy, x, v))(jnp.stack([v, 2 * v, 3 * v]))
    check(many, jnp.stack([product, 2 * product, 3 * product]))
    print(f"   three vectors, by vmap            {many.shape}")


if __name__ == "__main__":
    main()

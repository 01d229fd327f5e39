"""Random programs of parameters and data: no gradient is lost on any way from a parameter to the loss."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from jax import lax

from plurax.transforms.privacy._gradients import ExampleGradients
from plurax.transforms.privacy._pieces import Factors
from plurax.transforms.privacy._program import Program

N, BATCH = 3, 4


@jax.jit
def by_factor(a: Any, b: Any, factor: Any) -> Any:
    return a @ (factor * b)


# Each takes two values of shape (N, N), from parameters, data or both, and gives one.
STEPS: dict[str, Any] = {
    "product": lambda a, b: a @ b,
    "product of a transpose": lambda a, b: a.T @ b,
    "product with a transpose": lambda a, b: a @ b.T,
    "outer": lambda a, b: jnp.einsum("ij,kj->ik", a, b),
    "diagonal product": lambda a, b: jnp.einsum("ij,ij->i", a, b)[:, None] * b,
    "one matrix a row": lambda a, b: jnp.einsum("ij,ijk->ik", a, jnp.stack([b, b.T, b[::-1]])),
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "scale": lambda a, b: a * b,
    "row scale": lambda a, b: a * b[0],
    "row shift": lambda a, b: a + b[:, :1],
    "quotient": lambda a, b: a / (2 + b**2),
    "tanh": lambda a, b: jnp.tanh(a),
    "normalised": lambda a, b: a / jnp.sqrt(1 + jnp.sum(b**2)),
    "reshape": lambda a, b: a.T.reshape(N, N) + b.reshape(N * N)[::-1].reshape(N, N),
    "concatenate": lambda a, b: jnp.concatenate([a[:1], b[1:]]),
    "wide product": lambda a, b: jnp.concatenate([a, b], 1) @ jnp.concatenate([b, a]),
    "choice": lambda a, b: jnp.where(a > b, a, 2 * b),
    "rows": lambda a, b: a[jnp.array([2, 0, 2])] * b,
    "rows by data": lambda a, b: a[jnp.argsort(b[0])],
    "half": lambda a, b: (0.5 * a) @ b,
    "divided": lambda a, b: (a / jnp.sqrt(3.0)) @ b.T,
    "by a jitted factor": lambda a, b: by_factor(by_factor(a, b, jnp.sqrt(2.0)), b, jnp.sqrt(3.0)),
    "parts": lambda a, b: jnp.concatenate([a[:2] @ b, b[2:] @ a]),
    "parts with numbers in common": lambda a, b: (a[:, :2] @ b[:2]) * (a[:, 1:] @ b[1:]),
    "split": lambda a, b: jnp.split(a, [1], 1)[0] * b + jnp.split(a, [1], 1)[1] @ b[:2],
    "decay": lambda a, b: a + 0.1 * jnp.sum(b**2),
    "times a norm": lambda a, b: a * jnp.linalg.norm(b),
    "stop": lambda a, b: a * lax.stop_gradient(b),
    "cast": lambda a, b: a.astype(jnp.float32).astype(jnp.float64) + b,
    "jitted": jax.jit(lambda a, b: jnp.sin(a) @ b),
    "jitted pair": lambda a, b: jnp.matmul(*jax.jit(lambda a, b: (jnp.cos(a), b * a[0, 0]))(a, b)),
    "relu": lambda a, b: jax.nn.relu(a) - jax.nn.softplus(b),
    "checkpoint": jax.checkpoint(lambda a, b: jnp.tanh(a @ b)),
    "convolution": lambda a, b: lax.conv_general_dilated(
        a[None, :, :, None], b[:2, :2, None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )[0, :, :, 0],
    "scan over rows": lambda a, b: lax.scan(lambda h, row: (jnp.tanh(h @ a + row), h), b[0], b)[1],
    "scan over a stack": lambda a, b: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), a, jnp.stack([b, b.T]))[0],
    "scan that carries": lambda a, b: lax.scan(lambda c, _: ((c[0] @ b, c[1] + c[0]), None), (a, b), None, 2)[0][1],
    "branch": lambda a, b: lax.cond(a[0, 0] > b[0, 0], lambda: a @ b, lambda: a * b),
}


@pytest.mark.hypothesis
@pytest.mark.parametrize("part", range(4))  # which run side by side
def test_every_way_of_a_parameter_to_the_loss_counts(part: int) -> None:
    program = given(data=st.data())(a_program_counts_every_way)
    seed(part)(settings(max_examples=max(13, settings().max_examples // 4))(program))()


def a_program_counts_every_way(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7), label="steps")
    steps = [
        (data.draw(st.sampled_from(sorted(STEPS))), data.draw(st.integers(0, 3 + i)), data.draw(st.integers(0, 3 + i)))
        for i in range(count)
    ]
    generator = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    parameters = [generator.normal(size=(N, N)) for _ in range(2)]
    examples = [generator.normal(size=(BATCH, N, N)) for _ in range(2)]
    weights = generator.normal(size=BATCH)
    # Of matrices as small as these the gradients would be held otherwise.
    factors = mock.patch.object(Factors, "smaller", return_value=True) if data.draw(st.booleans()) else nullcontext()

    def loss(parameters: Any, example: Any) -> Any:
        values = [*parameters, *example]
        for name, i, j in steps:
            values.append(STEPS[name](values[i], values[j]))
        return sum(jnp.sum(jnp.sin(value)) for value in values[4:]), None

    @jax.jit
    def both(parameters: Any, examples: Any) -> Any:
        found = ExampleGradients(Program(loss, parameters, examples), examples)
        _, gradients = jax.vmap(jax.value_and_grad(loss, has_aux=True), (None, 0))(parameters, examples)
        squares = sum(jnp.square(x).sum((1, 2)) for x in gradients)
        sums = [jnp.tensordot(weights, x, 1) for x in gradients]
        return (found.squared_norms, found.weighted_sum(weights)), (squares, sums)

    with jax.enable_x64(True), factors:
        actual, expected = both(parameters, examples)
        tolerance = 1e-5 if any(name == "cast" for name, *_ in steps) else 1e-9
        scale = 1 + max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
        chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance * scale)

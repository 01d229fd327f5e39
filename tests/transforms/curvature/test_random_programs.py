"""Curvature of random programs and losses, against dense Jacobians of one example at a time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

from plurax.transforms.curvature import ekfac, ggn_diagonal, influence, kfac, laplace, self_influence
from plurax.transforms.privacy._per_example.gradient_forms import OuterProduct

from ..privacy._per_example.test_random_programs import BATCH, FAR, ROUGH, STEPS, N
from .test_ekfac import eigenvectors

pytestmark = pytest.mark.slow

# Backward rules that are not linear, so that there is no Jacobian; and random numbers that differ under `vmap`.
NO_JACOBIAN = {
    "own cotangent",
    "clipped cotangent",
    "clipped cotangent of one",
    "scan with a rule",
    "scan with a rounding",
    "dropped",
}
MIXED = np.random.default_rng(0).normal(size=(N, 5))
LOSSES: dict[str, Any] = {
    "cross-entropy": lambda o, y: optax.softmax_cross_entropy_with_integer_labels(o, y).mean(),
    "square": lambda o, y: 0.5 * jnp.mean((o - y[..., None]) ** 2),
    "logistic": lambda o, y: optax.sigmoid_binary_cross_entropy(o, (y > 0)[..., None] * 1.0).sum(-1).mean(),
    "with a penalty": lambda o, y: LOSSES["cross-entropy"](o, y) + 0.1 * jnp.mean(o**2),
    "of mixed outputs": lambda o, y: LOSSES["cross-entropy"](o @ MIXED, y),
    "dense": lambda o, y: jnp.sqrt(1 + jnp.sum(o**2, -1)).mean(),
}
CHECKS = ("diagonal", "kfac", "ekfac", "influence", "laplace")


@pytest.mark.hypothesis
@pytest.mark.parametrize("part", range(2))  # run in parallel
def test_curvature_of_random_programs(part: int) -> None:
    left = 10 if settings().max_examples < 100 else 1000  # more under `make fuzz`
    for turn in range(-(-left // 250)):
        program = given(data=st.data())(curvature_of_a_program)
        seed(part + 2 * turn)(settings(max_examples=min(250, left - 250 * turn))(program))()
        jax.clear_caches()  # release the compiled programs


def curvature_of_a_program(data: st.DataObject) -> None:
    usable = sorted({*STEPS} - {*FAR} - NO_JACOBIAN)
    names = data.draw(st.lists(st.sampled_from(usable), min_size=1, max_size=5), label="steps")
    rough = max((ROUGH.get(name, 0) for name in names), default=0)
    names = names[:2] if rough else names
    steps = [(name, data.draw(st.integers(0, 3 + i)), data.draw(st.integers(0, 3 + i))) for i, name in enumerate(names)]
    generator = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    positions = data.draw(st.booleans(), label="a matrix of outputs")
    loss = LOSSES[data.draw(st.sampled_from(sorted(LOSSES)), label="loss")]
    check = data.draw(st.sampled_from(CHECKS), label="check")
    sharing = data.draw(st.sampled_from(["expand", "reduce"]), label="weight sharing")
    fisher = data.draw(st.sampled_from(["exact", "empirical"]), label="fisher")
    chunk = data.draw(st.sampled_from([None, 1, 2]), label="chunk")

    def of_example(parameters: Any, example: Any) -> Any:
        values = [*parameters, *example]
        for name, i, j in steps:
            values.append(STEPS[name](values[i], values[j]))
        total: Any = sum(jnp.sin(value) for value in values[4:])
        return total if positions else total[0]

    def model(parameters: Any, x: Any) -> Any:
        return jnp.stack([of_example(parameters, [a[i] for a in x]) for i in range(len(x[0]))])

    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        if data.draw(st.booleans(), label="factors"):  # gradients this small would otherwise be materialized
            stack.enter_context(mock.patch.object(OuterProduct, "smaller", return_value=True))
        parameters = [generator.normal(size=(N, N)) for _ in range(2)]
        x = [generator.normal(size=(BATCH, N, N)) for _ in range(2)]
        y = generator.integers(0, N, (BATCH, N) if positions else BATCH)
        jacobians, hessians, gradients = dense(of_example, loss, parameters, x, y)
        assume(all(np.isfinite(a).all() for a in (jacobians, hessians, gradients)))
        exact = np.einsum("bop,boq,bqr->pr", jacobians, hessians, jacobians) / BATCH
        empirical = gradients.T @ gradients / BATCH
        size = 1 + max(np.linalg.norm(jacobians, axis=(1, 2)).max() ** 2 * np.abs(hessians).sum(-1).max(), 0)
        size = max(size, 1 + np.linalg.norm(gradients, axis=1).max() ** 2)
        error = (rough or 1e-6) * size  # long programs amplify rounding, and terms may cancel
        call = lambda f: f if data.draw(st.integers(0, 7), label="eager") == 7 else jax.jit(f)
        options: Any = {"fisher": fisher, "weight_sharing": sharing, "chunk_size": chunk}
        if check == "diagonal":
            found = call(ggn_diagonal(model, loss, chunk_size=chunk))(parameters, x, y)
            near(np.ravel(found), np.diag(exact), error)
            return
        if check == "laplace":
            structure: Any = data.draw(st.sampled_from(["full", "kfac", "ekfac", "diagonal"]), label="structure")
            of = laplace(model, loss, parameters, (x, y), structure=structure, prior_precision=1.0)
            found = of.predict(x, kind="regression").variance.reshape(BATCH, -1)
            matrix = exact if structure == "full" else np.asarray(of.curvature.dense())
            inverse = np.linalg.inv(BATCH * matrix + np.eye(len(exact)))
            near(found, np.einsum("bop,pq,boq->bo", jacobians, inverse, jacobians), BATCH * error * size)
            if structure != "kfac":
                near(of.curvature.eigenvalues().sum(), exact.trace(), len(exact) * error)
            return
        true = empirical if fisher == "empirical" else exact
        found = call({"kfac": kfac, "ekfac": ekfac}.get(check, kfac)(model, loss, **options))(parameters, x, y)
        matrix = np.asarray(found.dense())
        assert np.linalg.eigvalsh(matrix).min() > -error
        assert not matrix[: N * N, N * N :].any()
        for i, block in enumerate(found.blocks):
            rows = slice(i * N * N, (i + 1) * N * N)
            near(matrix[rows, rows], matrix[rows, rows].T, error)
            if hasattr(block, "values"):
                vectors = eigenvectors(block)
                near(vectors.T @ vectors, np.eye(N * N), 1e-9)
                near(block.values.ravel(), np.diag(vectors.T @ true[rows, rows] @ vectors), error)
            elif block.exact:
                near(matrix[rows, rows], true[rows, rows], error)
            if hasattr(block, "values") or block.exact:
                near(matrix[rows, rows].trace(), true[rows, rows].trace(), N * N * error)
        v = generator.normal(size=len(matrix))
        unraveled = [jnp.asarray(part.reshape(N, N)) for part in np.split(v, 2)]
        damped = matrix + 0.5 * np.eye(len(matrix))
        near(np.ravel(found.matvec(unraveled)), matrix @ v, error)
        near(np.ravel(found.solve(unraveled, 0.5)), np.linalg.solve(damped, v), error)
        near(found.logdet(0.5), np.linalg.slogdet(damped)[1], len(matrix) * error)
        if check == "influence":
            inverse = np.linalg.inv(damped)
            given_factors: Any = {"curvature": found, "damping": 0.5, "chunk_size": chunk}
            scores = influence(model, loss, parameters, (x, y), **given_factors)(x, y)
            near(scores, gradients @ inverse @ gradients.T / BATCH, error)
            own = self_influence(model, loss, parameters, (x, y), **given_factors)
            near(own, np.diag(gradients @ inverse @ gradients.T) / BATCH, error)


def dense(of_example: Any, loss: Any, parameters: Any, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the Jacobian, the Hessian of the loss and its gradient of each example."""

    @jax.jit
    def of(parameters: Any, example: Any, y: Any, number: Any) -> Any:
        outputs, pull = jax.vjp(lambda p: of_example(p, example), parameters)
        seed = jax.nn.one_hot(number, outputs.size, dtype=outputs.dtype).reshape(outputs.shape)
        gradient, hessian = (d(lambda o: loss(o[None], y[None]))(outputs) for d in (jax.grad, jax.hessian))
        ravel = lambda p: jnp.stack(p).ravel()
        return ravel(pull(seed)[0]), hessian.reshape(outputs.size, outputs.size), ravel(pull(gradient)[0])

    found = []
    for i, label in enumerate(y):
        each = [of(parameters, [a[i] for a in x], label, number) for number in range(N * label.size)]
        found.append((np.stack([row for row, _, _ in each]), *each[0][1:]))
    jacobians, hessians, gradients = (np.stack(parts) for parts in zip(*found, strict=True))
    return jacobians, hessians, gradients


def near(found: Any, expected: Any, error: Any) -> None:
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_array_less(np.abs(found - expected), error)

"""Statistics of random programs, against gradients of one example at a time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

from plurax.transforms import (
    empirical_ntk,
    gradient_noise_scale,
    per_sample_gram,
    per_sample_moments,
    per_sample_projection,
)
from plurax.transforms.privacy._per_example.gradient_forms import OuterProduct

from ..privacy._per_example.test_random_programs import BATCH, FAR, ROUGH, STEPS, N

pytestmark = pytest.mark.slow

WAYS = ("positions", "contraction", "blocks")


@pytest.mark.hypothesis
@pytest.mark.parametrize("part", range(2))  # run in parallel
def test_statistics_of_random_programs(part: int) -> None:
    left = 13 if settings().max_examples < 100 else 1000  # more under `make fuzz`
    for turn in range(-(-left // 250)):
        program = given(data=st.data())(statistics_of_a_program)
        seed(part + 2 * turn)(settings(max_examples=min(250, left - 250 * turn))(program))()
        jax.clear_caches()  # release the compiled programs


def statistics_of_a_program(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted({*STEPS} - {*FAR})), min_size=1, max_size=5), label="steps")
    rough = max((ROUGH.get(name, 0) for name in names), default=0)
    names = names[:2] if rough else names
    steps = [(name, data.draw(st.integers(0, 3 + i)), data.draw(st.integers(0, 3 + i))) for i, name in enumerate(names)]
    generator = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    which = data.draw(
        st.sampled_from(["gram", "gram per leaf", "moments", "noise", "projection", "kernel"]), label="statistic"
    )
    chunk = data.draw(st.sampled_from([None, 1, 2]), label="chunk")
    options: Any = {"keep_batch_dim": False, "chunk_size": chunk}

    def loss(parameters: Any, example: Any) -> Any:
        values = [*parameters, *example]
        for name, i, j in steps:
            values.append(STEPS[name](values[i], values[j]))
        return sum(jnp.sum(jnp.sin(value)) for value in values[4:])

    def outputs(parameters: Any, example: Any) -> Any:
        values = [*parameters, *example]
        for name, i, j in steps:
            values.append(STEPS[name](values[i], values[j]))
        return sum(jnp.sin(value)[0] for value in values[4:])  # one row

    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        if data.draw(st.booleans(), label="factors"):  # gradients this small would otherwise be materialized
            stack.enter_context(mock.patch.object(OuterProduct, "smaller", return_value=True))
            way = data.draw(st.sampled_from(WAYS), label="way")
            stack.enter_context(mock.patch("plurax.transforms._statistics.inner_products.way", return_value=way))
            stack.enter_context(mock.patch("plurax.transforms._statistics.inner_products._room", return_value=20))
            folded = data.draw(st.booleans(), label="folded")
            stack.enter_context(mock.patch("plurax.transforms._statistics.noise_scale._is_folded", return_value=folded))
        parameters = [generator.normal(size=(N, N)) for _ in range(2)]
        examples = [generator.normal(size=(BATCH, N, N)) for _ in range(2)]
        other = [generator.normal(size=(2, N, N)) for _ in range(2)]
        gradient = jax.jit(jax.grad(loss))

        def held(batch: Any) -> Any:
            return np.array([gradient(parameters, [x[i] for x in batch]) for i in range(len(batch[0]))])

        each = held(examples)  # (example, parameter, N, N)
        rows = each.reshape(BATCH, -1)
        assume(np.isfinite(rows).all())  # the square of a number may underflow, whose root has no derivative
        norms = np.linalg.norm(rows, axis=1)
        error = (rough or 1e-6) * (1 + norms.max()) ** 2  # long programs amplify rounding, and terms may cancel
        call = lambda f: f if data.draw(st.integers(0, 7), label="eager") == 7 else jax.jit(f)
        if which == "gram":
            gram = call(per_sample_gram(loss, **options))
            assert_near(gram(parameters, examples), rows @ rows.T, error)
            second = held(other).reshape(2, -1)
            assume(np.isfinite(second).all())
            error = error + (rough or 1e-6) * np.linalg.norm(second, axis=1).max() * (1 + norms.max())
            assert_near(gram(parameters, examples, other=(other,)), rows @ second.T, error)
        elif which == "gram per leaf":
            found = call(per_sample_gram(loss, per_leaf=True, **options))(parameters, examples)
            for i, leaf in enumerate(found):
                own = each[:, i].reshape(BATCH, -1)
                assert_near(leaf, own @ own.T, error)
        elif which == "moments":
            found = call(per_sample_moments(loss, **options))(parameters, examples)
            assert_near(np.array(found.mean), each.mean(0), (rough or 1e-6) * (1 + norms.max()))
            assert_near(np.array(found.second_moment), np.square(each).mean(0), error)
            assert_near(np.array(found.variance), each.var(0, ddof=1), 2 * error)
        elif which == "noise":
            found = call(gradient_noise_scale(loss, **options))(parameters, examples)
            assert_near(found.noise, rows.var(0, ddof=1).sum(), 2 * error)
            assert_near(found.signal, np.square(rows.mean(0)).sum() - found.noise / BATCH, 2 * error)
        elif which == "kernel":
            of_one = jax.jit(jax.grad(lambda parameters, example, k: outputs(parameters, example)[k]))
            of_example = lambda i: np.array([of_one(parameters, [x[i] for x in examples], k) for k in range(N)])
            rows = np.array([of_example(i) for i in range(BATCH)]).reshape(BATCH, N, -1)
            assume(np.isfinite(rows).all())
            error = (rough or 1e-6) * (1 + np.linalg.norm(rows, axis=-1).max()) ** 2
            given = data.draw(st.sampled_from([{}, {"trace": True}, {"diagonal_axes": 0}]), label="axes")
            indices = "iap,jap->ij" if "trace" in given else "iap,jap->ija" if given else "iap,jbp->ijab"
            expected = np.einsum(indices, rows, rows) / (N if "trace" in given else 1)
            found = call(empirical_ntk(outputs, **given, **options))(parameters, examples)
            assert_near(found, expected, error)
        else:
            key = jax.random.key(0)
            found = call(per_sample_projection(loss, 3, **options))(key, parameters, examples)
            linear = lambda p, g: jnp.vdot(p[0], g[0]) + jnp.vdot(p[1], g[1])
            expected = per_sample_projection(linear, 3, keep_batch_dim=False)(
                key, parameters, list(each.swapaxes(0, 1))
            )
            assert_near(found, expected, (rough or 1e-6) * (1 + np.abs(rows).sum(1).max()))


def assert_near(found: Any, expected: Any, error: Any) -> None:
    assert found.shape == expected.shape
    np.testing.assert_array_less(np.abs(found - expected), error)

"""Order, memory, comparison, profile, layout and fusion of programs from MindSpore's and PyTorch's tutorials."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import grad
from plurax.transforms.program import assert_donated, depend, fold_bn, profile, trace_diff


def test_an_assignment_in_a_loop_is_a_carry_with_gradient_three():
    def assigned(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, parameter: parameter + x, jnp.float32(2.0))

    assert float(assigned(jnp.float32(5.0))) == 17.0
    assert float(grad(assigned)(jnp.float32(5.0))) == 3.0


def test_a_carried_parameter_is_written_in_place():
    def step(parameter: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, parameter: parameter + x, parameter)

    args = jnp.zeros((64, 7)), jnp.ones(7)
    assert_donated(jax.jit(step, donate_argnums=0), *args)
    kept, given = (jax.jit(step, donate_argnums=i).lower(*args).compile().memory_analysis() for i in ((), 0))
    assert (kept.alias_size_in_bytes, given.alias_size_in_bytes) == (0, 4 * 64 * 7)


def test_what_is_asked_to_depend_is_computed_though_only_its_order_matters():
    def assign_then_add(x: jax.Array) -> Any:
        assigned = jnp.cos(x)
        y, assigned = depend(x + 1.0, assigned)
        return y, assigned

    text = jax.jit(assign_then_add).lower(jnp.ones(3)).compile().as_text() or ""
    assert "cosine" in text


class Wrapped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mod = nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mod(x)


class Model(nnx.Module):
    """PyTorch's model: two convolutions and a batch norm, another pair that is nested, and one that is wrapped."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1, self.bn1, self.conv2 = (
            nnx.Conv(1, 1, (1, 1), rngs=rngs),
            nnx.BatchNorm(1, rngs=rngs),
            nnx.Conv(1, 1, (1, 1), rngs=rngs),
        )
        self.nested = nnx.Sequential(nnx.BatchNorm(1, rngs=rngs), nnx.Conv(1, 1, (1, 1), rngs=rngs))
        self.wrapped = Wrapped(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wrapped(self.nested(self.conv2(self.bn1(self.conv1(x)))))


@pytest.fixture(scope="module")
def model() -> Model:
    model = Model(nnx.Rngs(0))
    for i, part in enumerate(part for _, part in nnx.iter_modules(model) if isinstance(part, nnx.BatchNorm)):
        for j, array in enumerate((part.mean, part.var, part.scale, part.bias)):
            assert array is not None
            array[...] = jnp.asarray([0.3 + 0.4 * i + 0.1 * j])
    model.eval()
    return model


IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(6, 9, 7, 1)), jnp.float32)


def test_all_batch_norms_of_the_model_are_folded(model: Model):
    folded, params, report = fold_bn(lambda model, x: model(x), model, IMAGES)
    assert (len(report.folded), len(report.kept)) == (3, 0)
    np.testing.assert_allclose(folded(params, IMAGES), model(IMAGES), atol=1e-5)
    graphdef, state = nnx.split(model)
    before = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, IMAGES).compile()
    after = jax.jit(folded).lower(params, IMAGES).compile()
    assert "rsqrt" in (before.as_text() or "")
    assert "rsqrt" not in (after.as_text() or "")
    traffic = [dict(program.cost_analysis() or {})["bytes accessed"] for program in (before, after)]
    assert traffic[1] < traffic[0]


def test_the_two_models_differ_by_the_batch_norms(model: Model):
    folded, params, _ = fold_bn(lambda model, x: model(x), model, IMAGES)
    found = trace_diff(lambda x: model(x), lambda x: folded(params, x), IMAGES, repeats=2)
    gone = {(row.op, row.scope) for row in found.deleted}
    assert {("rsqrt", "bn1"), ("rsqrt", "nested/layers/0"), ("rsqrt", "wrapped/mod")} <= gone
    assert not any(row.diff_counts > 0 for row in found.differences())


def test_the_profile_names_each_layer(model: Model):
    rows = profile(model, IMAGES, mode="eager", repeats=1).operations
    named = {row.scope for row in rows if row.op == "conv_general_dilated"}
    assert named == {"conv1", "conv2", "nested/layers/1"}

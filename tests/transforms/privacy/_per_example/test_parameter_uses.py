"""Rearrangements of parameters keep the norm of every gradient that passes through them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from plurax.transforms.privacy._per_example.loss import ExampleProgram
from plurax.transforms.privacy._per_example.parameter_uses import _REARRANGING
from plurax.transforms.privacy._per_example.perturbations import operands

MESH = jax.make_mesh((1,), ("x",))
W = np.random.default_rng(0).normal(size=(3, 1, 4))
# Keyed by the tested operation of the table.
MOVES: dict[str, Any] = {
    "copy": jnp.array,
    "device_put": lambda w: jax.device_put(w, jax.memory.Space.Device),
    "name": lambda w: checkpoint_name(w, "w"),
    "optimization_barrier": lambda w: lax.optimization_barrier(w),
    "one of several barriers": lambda w: lax.optimization_barrier((jnp.exp(w), w.T, jnp.ones(3)))[1],
    "one of several placed": lambda w: jax.device_put((w * w, -w))[1],
    "reshard": lambda w: jax.sharding.reshard(w, jax.sharding.NamedSharding(MESH, jax.P())),
    "neg": lambda w: -w,
    "reshape": lambda w: w.reshape(4, 3),
    "rev": lambda w: w[::-1],
    "sharding_constraint": lambda w: lax.with_sharding_constraint(
        w, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    "squeeze": lambda w: w.squeeze(1),
    "transpose": lambda w: w.transpose(2, 0, 1),
    "convert_element_type": lambda w: w.astype(jnp.float32),
    "broadcast_in_dim": lambda w: lax.broadcast_in_dim(w, (1, 3, 1, 4), (1, 2, 3)),
    "slice": lambda w: lax.slice(w, (1, 0, 0), (3, 1, 4), (1, 1, 2)),
    "split": lambda w: jnp.split(w, [1], 2)[1],
    "several": lambda w: -w[1:].T.reshape(4, 2)[::2],
}
# Operations that do not keep the norm, or not of every gradient.
OTHERS: dict[str, Any] = {
    "a cast to complex numbers": lambda w: w.astype(complex),
    "a cast to complex numbers and back": lambda w: w.astype(complex).real,
    "adding 0j": lambda w: w + 0j,
    "rounding": lambda w: jnp.round(w),
    "clipping": lambda w: jnp.clip(w, -1, 1),
    "copies": lambda w: jnp.broadcast_to(w, (3, 2, 4)),
    "padding with itself": lambda w: jnp.pad(w, ((1, 1), (0, 0), (0, 0)), mode="edge"),
    "rows taken twice": lambda w: w[np.array([0, 0, 1])],
    "a part concatenated with itself": lambda w: jnp.concatenate([w[:2], w[1:]]),
    "a product": lambda w: w * jnp.arange(1.0, 5.0),
    "a factor": lambda w: 0.5 * w.T,
    "a quotient": lambda w: w / 3,
    "another one of several barriers": lambda w: lax.optimization_barrier((w, jnp.exp(w)))[1],
}


def layout_and_operand(move: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the layout of the rearranged parameters and the linear function to them, or None."""

    def loss(parameters: Any, example: Any) -> Any:
        moved = move(parameters[0])
        return jnp.real(jnp.sum(moved * example[0][0].astype(moved.dtype))), []

    program = ExampleProgram(loss, [jnp.asarray(W, dtype)], [jnp.ones((5, 2), dtype)])
    (use,) = program.uses
    if use.value.layout is None:
        return None, None
    return use.value.layout, lambda w: operands(program.plan, [w], frozenset([0]), wider=True)[0]


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", MOVES)
def test_a_rearrangement_keeps_the_norm_of_every_gradient(name: str, dtype: Any) -> None:
    with jax.enable_x64(True):
        layout, linear = layout_and_operand(MOVES[name], dtype)
        w = jnp.asarray(W, jnp.promote_types(dtype, jnp.float32))
        assert layout is not None
        if "several" not in name and not (name == "convert_element_type" and dtype == jnp.float32):
            assert name in str(layout) or name in ("slice", "split")
        out, back = jax.vjp(linear, w)
        cotangent = np.random.default_rng(1).normal(size=out.shape).astype(out.dtype)
        (gradient,) = back(cotangent)
        np.testing.assert_allclose(np.sum(np.square(gradient)), np.sum(np.square(cotangent)), rtol=1e-6)
        # Applying it to the gradient gives back the cotangent, so it is an isometry; and it is the program's own
        # operation.
        np.testing.assert_allclose(linear(gradient), cotangent, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(MOVES[name](w)), np.asarray(out), rtol=1e-6)


def test_every_operation_of_the_table_is_tried() -> None:
    assert set(MOVES) >= _REARRANGING


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_have_no_layout(name: str) -> None:
    with jax.enable_x64(True):
        assert layout_and_operand(OTHERS[name], jnp.float64) == (None, None)


def test_complex_parameters_have_no_layout() -> None:
    assert layout_and_operand(lambda w: w.T, jnp.complex64) == (None, None)

"""Batches sharded over four devices give the sums of one device. It is run as a script, with four CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from plurax.transforms import clipped_grad, per_sample_grad, per_sample_norm

assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
array = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"e": array(9, 6), "w": array(6, 6), "b": array(6), "k": array(3, 6, 4)}
x, y = rng.integers(9, size=(8, 5)), array(8, 5, 4)
padding = np.arange(8) % 5 == 1


def loss(p, x, y):
    h = jnp.tanh(p["e"][x] @ p["w"] + p["b"])
    h = jax.lax.conv_general_dilated(h, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.sum((h - y) ** 2), {"h": h}


def check(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * (10 + np.abs(b).max()))


put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
for method in ("auto", "vmap", "ghost", "book_keeping"):
    of = clipped_grad(
        loss, has_aux=True, l2_clip_norm=3.0, batch_argnums=(1, 2), return_values=True, return_grad_norms=True,
        method=method,
    )
    expected = jax.jit(of)(params, x, y, is_padding_example=padding)
    assert expected[1].grad_norms.max() > 3.0
    # Automatic sharding: the compiler divides the work.
    sharded = put((x, y, padding), P("data"))
    of_padded = jax.jit(lambda params, x, y, padding: of(params, x, y, is_padding_example=padding))
    found = of_padded(put(params, P()), *sharded)
    check(found, expected)
    assert not found[1].grad_norms.sharding.is_fully_replicated

    # By hand: each device sums over its part of the batch.
    def of_part(params, x, y, padding):
        total, aux = of(params, x, y, is_padding_example=padding)
        return jax.lax.psum(total, "data"), aux

    specs = (P(), P("data"), P("data"), P("data"))
    by_hand = jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=(P(), P("data")), check_vma=False)
    check(jax.jit(by_hand)(params, x, y, padding), expected)
    norms = jax.jit(per_sample_norm(lambda *args: loss(*args)[0], batch_argnums=(1, 2), method=method))
    check(norms(put(params, P()), *sharded[:2]), expected[1].grad_norms)
    named = clipped_grad(
        lambda *args: loss(*args)[0], l2_clip_norm=3.0, batch_argnums=(1, 2), spmd_axis_name="data", method=method
    )
    of_named = jax.jit(lambda params, x, y, padding: named(params, x, y, is_padding_example=padding))
    check(of_named(put(params, P()), *sharded), expected[0])
each = jax.jit(per_sample_grad(loss, has_aux=True, batch_argnums=(1, 2)))
parts = [each(params, x[i : i + 1], y[i : i + 1]) for i in range(8)]
check(each(put(params, P()), *sharded[:2]), jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts))
print("all alike")
"""


def test_sharded_batches_give_the_sums_of_one_device() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment: Any = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=root, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "all alike"

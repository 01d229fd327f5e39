"""Statistics of batches that are sharded over four devices. This file is also the script that has four devices."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_on_four_devices() -> None:
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["automatic", "explicit", "shard_map"]


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from plurax.transforms import (
        empirical_ntk,
        gradient_noise_scale,
        per_sample_gram,
        per_sample_jvp,
        per_sample_moments,
        per_sample_projection,
    )

    rng = np.random.default_rng(0)
    p = {name: jnp.asarray(rng.normal(size=shape), "f") for name, shape in (("a", (5, 6)), ("b", (6,)), ("c", (6, 3)))}
    x = jnp.asarray(rng.normal(size=(8, 4, 5)), "f")
    key = jax.random.key(0)

    def apply(p: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ p["a"] + p["b"]).mean(1) @ p["c"])

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(apply(p, x) ** 2)

    def every(p: Any, x: Any) -> Any:
        return (
            per_sample_gram(loss)(p, x),
            per_sample_moments(loss)(p, x),
            gradient_noise_scale(loss)(p, x),
            per_sample_projection(loss, 5)(key, p, x),
            per_sample_jvp(loss)(p, p, x),
            empirical_ntk(apply)(p, x),
            empirical_ntk(apply, trace=True)(p, x),
        )

    def assert_close(found: Any, expected: Any) -> None:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5 * float(np.abs(b).max())), found, expected
        )

    expected = jax.jit(every)(p, x)
    for kind, name in ((AxisType.Auto, "automatic"), (AxisType.Explicit, "explicit")):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        whole = jax.device_put(p, NamedSharding(mesh, PartitionSpec()))
        found = jax.jit(every)(whole, spread)
        assert_close(found, expected)
        sys.stdout.write(f"{name}\n")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.shard_map(
        lambda p, x: per_sample_gram(loss)(p, x, other=(jax.lax.all_gather(x, "data", tiled=True),)),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
    )
    assert_close(jax.jit(rows)(p, x), expected[0])
    sys.stdout.write("shard_map\n")


if __name__ == "__main__":
    main()

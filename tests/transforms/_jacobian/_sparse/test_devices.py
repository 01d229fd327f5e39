"""Patterns of programs on several devices: detected with explicit axes; a `shard_map` mixes everything."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from plurax.transforms import jacobian
from plurax.transforms._calls.call import Call
from plurax.transforms._jacobian._sparse.pattern import found_pattern

pytestmark = pytest.mark.slow

X = np.linspace(-1, 2, 12, dtype=np.float32)
MASK = np.array([1, 0, 1] * 4, bool)
MIXES = "the results of `shard_map` are assumed to depend on all operands"
AROUND = [(i, (i + 1) % 4) for i in range(4)]


def whole_rows(x: Any) -> Any:
    return jax.vmap(lambda r: jnp.linalg.solve(jnp.outer(r, r) + jnp.eye(3), r))(x.reshape(4, 3))


def by_keys_of_devices(x: Any) -> Any:
    """Keys from one `shard_map` are passed to another."""
    split = lambda: jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index("i")), 1)
    keys = jax.shard_map(split, in_specs=(), out_specs=P("i"))()
    masked = lambda x, key: jnp.where(jax.random.uniform(key[0], (3,)) < 0.5, x, 0.0)
    return jax.shard_map(masked, in_specs=(P("i"), P("i")), out_specs=P("i"))(x, keys)


def by_constants_of_devices(x: Any) -> Any:
    """A `shard_map` makes a mask, whose values count as unknown."""
    return jnp.where(jax.shard_map(lambda: lax.axis_index("i")[None] > 0, in_specs=(), out_specs=P("i"))().any(), x, 0)


# A function of three values on each device.
LOCAL: dict[str, Any] = {
    "apart": lambda x: x * x[::-1] + lax.axis_index("i"),
    "only the first": lambda x: jnp.where(lax.axis_index("i") == 0, x, 0.0) ** 2,
    "at its index": lambda x: lax.dynamic_slice(x, (lax.axis_index("i"),), (1,)) * jnp.ones(3),
    "from its index on": lambda x: jnp.where(jnp.arange(3) + lax.axis_index("i") < 2, x, 0.0) ** 2,
    "by random numbers": lambda x: (
        x * (jax.random.uniform(jax.random.fold_in(jax.random.key(1), lax.axis_index("i")), (3,)) < 0.5)
    ),
    "loop": lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) * x, x),
    "long loop": lambda x: lax.fori_loop(0, 40, lambda _, c: lax.ppermute(c, "i", AROUND) * x, x),
    "compiled": jax.jit(lambda x: x + lax.ppermute(x, "i", AROUND) ** 2),
    "total": lambda x: x * lax.psum(x.sum(), "i"),
    "around": lambda x: x * lax.ppermute(x, "i", AROUND),
    "total in a loop": lambda x: lax.scan(lambda c, y: (c, lax.psum(y, "i") * y), 0, x)[1],
    "around in a loop": lambda x: lax.fori_loop(0, 2, lambda _, c: lax.ppermute(c, "i", AROUND) * x, x),
    "total in a branch": lambda x: lax.cond(x.shape[0] == 3, lambda x: lax.psum(x, "i") * x, jnp.sin, x),
    "around in some branch": lambda x: lax.cond(
        lax.pmax(lax.stop_gradient(x[0]), "i") > 0, lambda x: lax.ppermute(x, "i", AROUND) ** 2, lambda x: x**2, x
    ),
    "to some devices": lambda x: x + lax.ppermute(x, "i", [(0, 2)]) ** 2,
    "all": lambda x: x * lax.all_gather(x, "i").sum(0),
    "all in a row": lambda x: x * lax.all_gather(x, "i", tiled=True)[:3],
    "sums": lambda x: lax.psum_scatter(jnp.append(x, x[0]), "i", tiled=True) ** 2,
    "exchanged": lambda x: lax.all_to_all(jnp.append(x, x[1]), "i", 0, 0, tiled=True) ** 2,
}
# On two axes, in another order than the mesh's.
GRID: dict[str, Any] = {
    "around, by two axes": lambda x: x * lax.ppermute(x, ("b", "a"), [(0, 2), (2, 1)]),
    "moved, by two axes": lambda x: lax.ppermute(x, ("b", "a"), [(0, 2), (2, 1)]) ** 2,
    "all, by two axes": lambda x: lax.all_gather(x, ("b", "a"), tiled=True)[3:6] ** 2,
    "sums, by two axes": lambda x: lax.psum_scatter(jnp.append(x, x[0]), ("b", "a"), tiled=True) ** 2,
    "exchanged, by two axes": lambda x: lax.all_to_all(jnp.append(x, x[1]), ("b", "a"), 0, 0, tiled=True) ** 2,
    "index, by two axes": lambda x: jnp.where(lax.axis_index(("b", "a")) == 1, x, 0.0) ** 2,
}
LOCAL["keys of devices"] = by_keys_of_devices
WHOLE: dict[str, tuple[Any, int]] = {
    "number by number": (jnp.sin, 12),
    "mask": (lambda x: jnp.where(MASK, x, 0.0), 8),
    "solves": (whole_rows, 36),
    "sums of rows": (lambda x: (x.reshape(4, 3) ** 2).sum(1), 12),
    "by constants of devices": (by_constants_of_devices, 12),
    "moved": (lambda x: jax.sharding.reshard(x, P()) ** 2, 12),
}


def warning_of(name: str) -> Any:
    """Return a context that expects a warning: a `shard_map` has no rule, so all results depend on all operands."""
    return contextlib.nullcontext() if name in WHOLE else pytest.warns(UserWarning, match=MIXES)


def check(name: str) -> None:
    axes = ("a", "b") if name in GRID else ("i",)
    mesh = jax.make_mesh((2, 2) if name in GRID else (4,), axes)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P(axes)))
        fun = WHOLE[name][0] if name in WHOLE else {**LOCAL, **GRID}[name]
        if name not in (*WHOLE, "keys of devices"):
            fun = jax.shard_map(fun, in_specs=P(axes), out_specs=P(axes))
        push = jax.jit(lambda x, t: jax.jvp(fun, (x,), (t,))[1])
        expected = np.stack([np.ravel(push(x, jax.device_put(t, x.sharding))) for t in np.eye(12, dtype=X.dtype)], 1)
        entries = WHOLE[name][1] if name in WHOLE else expected.size
        for mode in ("forward", "reverse"):
            with warning_of(name):
                found = found_pattern("jacobian", Call("jacobian", fun, (0,), False, (x,), {}), mode)
            beside = expected.copy()
            beside[found.rows, found.cols] = 0
            np.testing.assert_allclose(beside, 0, atol=1e-6)
            assert len(found.rows) == entries, (mode, len(found.rows), entries)
        with warning_of(name):
            sparse = jax.jit(jacobian(fun, sparsity="auto"))(x)
        given = jax.jit(jacobian(fun, sparsity=expected != 0))(x)
        assert given.nse == np.count_nonzero(expected)
        for found in (sparse, given):
            matrix = np.asarray(found.todense()).reshape(expected.shape)
            np.testing.assert_allclose(matrix, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [*LOCAL, *GRID, *WHOLE])
def test_four_devices(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


def failure_of(name: str) -> str:
    try:
        check(name)
    except Exception:  # reported to the test, in another process
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    if "jax_raise_on_ppermute_sort_diff" in jax.config.values:  # otherwise jax 0.11 takes axes only in the mesh's order
        jax.config.update("jax_raise_on_ppermute_sort_diff", False)
    warnings.simplefilter("error")
    Path("/dev/stdout").write_text(json.dumps({name: failure_of(name) for name in [*LOCAL, *GRID, *WHOLE]}))

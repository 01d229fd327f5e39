"""`batch_jacobian`, mapped or by the summing trick, against a loop over samples."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import batch_jacobian

W = np.sin(np.arange(6.0)).reshape(2, 3).astype(np.float32)
BATCH = np.cos(np.arange(15.0)).reshape(5, 3).astype(np.float32)


def layer(x: Any, scale: Any = 1.0) -> Any:
    return {"out": jnp.tanh(x @ W.T) * scale, "norm": jnp.sum(x**2, 1)}


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))


@pytest.fixture(scope="module")
def expected() -> Any:
    one = jax.jit(jax.jacrev(lambda x: jax.tree.map(lambda y: y[0], layer(x[None], 2.0))))
    return jax.tree.map(lambda *rows: jnp.stack(rows), *[one(x) for x in BATCH])


@pytest.mark.parametrize("rows", ["vmap", "independent"])
@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("limit", [{}, {"chunk_size": 2}, {"memory_budget": "1MB"}], ids=["", "chunks", "budget"])
def test_every_method_equals_the_loop(rows: str, mode: str, limit: Any, expected: Any) -> None:
    every = jax.jit(batch_jacobian(layer, rows=rows, mode=mode, **limit))
    assert_close(every(BATCH, scale=2.0), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["vmap", "independent"])
def test_axes_argnums_and_aux(rows: str, expected: Any) -> None:
    fun = lambda scale, x: (layer(x.T, scale), {"y": x.T, "text": "a string", "host": np.ones((x.shape[1], 2))})
    every = batch_jacobian(fun, (-1,), True, in_axes=(None, -1), rows=rows)
    found, aux = every(2.0, BATCH.T)
    assert_close({name: leaf[0] for name, leaf in found.items()}, expected)
    assert_close(aux["y"], jnp.asarray(BATCH))
    assert aux["text"] == "a string"
    np.testing.assert_array_equal(aux["host"], np.ones((5, 2)))
    pair = batch_jacobian(lambda x, y: x * y[:, :1], (1, 0), rows=rows)(BATCH, W[:, [0, 1]].repeat(3, 0)[:5])
    assert [leaf.shape for leaf in pair] == [(5, 3, 2), (5, 3, 3)]


@pytest.mark.parametrize("rows", ["vmap", "independent"])
def test_an_empty_batch(rows: str) -> None:
    assert batch_jacobian(jnp.sin, rows=rows)(BATCH[:0]).shape == (0, 3, 3)


def test_dependent_samples_are_detected_and_named() -> None:
    check = {"rows": "independent", "check": True}
    assert_close(batch_jacobian(jnp.sin, **check)(BATCH), jax.vmap(jax.jacfwd(jnp.sin))(BATCH))
    shift = lambda x: x.at[3].add(x[1])
    with pytest.raises(ValueError, match=r"samples depend on others \(3 on 1\); use rows=\"vmap\""):
        batch_jacobian(shift, **check)(BATCH)
    with pytest.raises(ValueError, match=r"samples depend on others \(1 on 0, 2 on 0, .*; and 15 more pairs\)"):
        batch_jacobian(lambda x: x - x.mean(0), **check)(BATCH)
    with pytest.raises(ValueError, match=r"check=True needs values, not traced arguments; check outside jit"):
        jax.jit(batch_jacobian(jnp.sin, **check))(BATCH)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.gain = nnx.Param(jnp.array([1.0, -2.0, 3.0]))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.counts = True

    def __call__(self, x: Any) -> jax.Array:
        if self.counts:
            self.count[...] += 1
        return jnp.sin(x * self.gain[...])


@pytest.mark.slow
@pytest.mark.parametrize("as_fun", [False, True])
def test_modules(as_fun: bool) -> None:
    model = Net()
    gain = np.array([1.0, -2.0, 3.0], np.float32)
    expected = jnp.asarray((np.cos(BATCH * gain) * gain)[:, :, None] * np.eye(3, dtype=np.float32))
    fun, args, options = (
        (model, (BATCH,), {}) if as_fun else (lambda m, x: m(x), (model, BATCH), {"argnums": 1, "in_axes": (None, 0)})
    )
    assert_close(batch_jacobian(fun, rows="independent", **options)(*args), expected)
    assert int(model.count[...]) == 1
    batch_jacobian(fun, rows="independent", check=True, **options)(*args)
    assert int(model.count[...]) == 2
    with pytest.raises(ValueError, match=r"changes the state of Net \(`count`\), which would be lost"):
        batch_jacobian(fun, **options)(*args)
    model.counts = False
    assert_close(batch_jacobian(fun, **options)(*args), expected)
    assert int(model.count[...]) == 2


def test_parameters_of_a_module_by_sample() -> None:
    model = Net()
    model.counts = False
    rows = batch_jacobian(lambda m, x: m(x), in_axes=(None, 0))(model, BATCH)
    assert_close(rows["gain"][...], (jnp.cos(BATCH * model.gain[...]) * BATCH)[:, :, None] * jnp.eye(3))
    with pytest.raises(ValueError, match=r"^batch_jacobian: all samples share `m`; use rows=\"vmap\""):
        batch_jacobian(lambda m, x: m(x), in_axes=(None, 0), rows="independent")(model, BATCH)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rows": "sum"}, ValueError, r"rows must be one of 'vmap', 'independent', but got 'sum'"),
        ({"check": True}, ValueError, r'check=True is for rows="independent"'),
        ({"mode": "fwd"}, ValueError, r"mode must be one of 'auto', 'forward', 'reverse', but got 'fwd'"),
        ({"chunk_size": 0}, ValueError, r"chunk_size must be at least 1"),
        ({"chunk_size": 1, "memory_budget": 1}, ValueError, r"chunk_size and memory_budget both set the chunk"),
        ({"argnums": ()}, ValueError, r"argnums is empty"),
        ({"in_axes": "x"}, TypeError, r"in_axes must be an int, None, or a tuple"),
    ],
)
def test_invalid_options_are_refused_at_once(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"^batch_jacobian: {match}"):
        batch_jacobian(layer, **options)


@pytest.mark.parametrize("rows", ["vmap", "independent"])
def test_invalid_calls_are_refused(rows: str) -> None:
    refused = lambda error, match: pytest.raises(error, match=f"^batch_jacobian: {match}")
    with refused(ValueError, r"`output` is an array of shape \(\) .* but axis 0 must be the \d samples"):
        batch_jacobian(jnp.mean, rows=rows)(BATCH)
    with refused(TypeError, r"with has_aux=True, fun must return a pair \(output, aux\), not an array of"):
        batch_jacobian(jnp.sin, has_aux=True, rows=rows)(BATCH)
    with refused(TypeError, r"argument `x` is an array of .* int\d+, but only (real )?floating-point arrays"):
        batch_jacobian(layer, rows=rows)(np.arange(6).reshape(2, 3))
    with refused(ValueError, r"argnums selects argument 2, but the call has 1 positional"):
        batch_jacobian(layer, 2, rows=rows)(BATCH)
    with refused(ValueError, r"axis 0 of argument `x` has size 5, but .* `scale` has size 2"):
        batch_jacobian(layer, rows=rows)(BATCH, W)


def test_auxiliary_arrays_without_a_sample_axis_are_refused() -> None:
    """Regression: auxiliary arrays without a sample axis lost all rows but the first."""
    with pytest.raises(ValueError, match=r"^batch_jacobian: `aux\['w'\]` is an .*, but axis 0 must be the 1"):
        batch_jacobian(lambda x: (jnp.sin(x), {"w": W, "n": 3, "text": "a string"}), has_aux=True)(BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["vmap", "independent"])
@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_holomorphic_functions_have_complex_jacobians(rows: str, mode: str, chunk_size: Any) -> None:
    batch = (BATCH + 1j * BATCH[::-1]).astype(np.complex64)
    fun = lambda z: jnp.stack([jnp.sin(z[..., 0]) * z[..., 1], z[..., 2] ** 3], axis=-1)
    expected = jax.vmap(jax.jacfwd(fun, holomorphic=True))(batch)
    found = batch_jacobian(fun, rows=rows, mode=mode, chunk_size=chunk_size, holomorphic=True)(batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_batch_that_branches_on_values_may_be_independent() -> None:
    branching = lambda x: x**2 if x[0, 0] < 10 else x
    found = batch_jacobian(branching, rows="independent")(BATCH)
    chex.assert_trees_all_close(found, jax.vmap(jax.jacrev(jnp.square))(BATCH), rtol=1e-6)

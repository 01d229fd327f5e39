"""`clipped_fun` and sums on a grid: against jax-privacy, and against each sample's value by itself."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from jax_privacy import clipping as theirs

from plurax.transforms import clipped_grad
from plurax.transforms.privacy import clipped_fun

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")  # in jax-privacy
GENERATOR = np.random.default_rng(0)
BATCH = 6
X, Y, W = (jnp.asarray(GENERATOR.normal(size=s), jnp.float32) for s in ((BATCH, 4), (BATCH, 3), (4, 3)))
PADDING = np.arange(BATCH) == 2


def values(w: Any, x: Any, y: Any) -> Any:
    assert x.shape == (1, 4)
    return {"product": (x @ w)[0], "scaled": (x.sum() * y)[0]}


def with_aux(w: Any, x: Any, y: Any) -> Any:
    return values(w, x, y), {"mean": x.mean(), "rows": x, "doubled": 2 * y}


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), found, expected)


def each() -> Any:
    return {"product": np.asarray(X @ W, np.float64), "scaled": np.asarray(X.sum(1, keepdims=True) * Y, np.float64)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rescale_to_unit_norm": True},
        {"normalize_by": 3.0},
        {"microbatch_size": 2},
        {"microbatch_size": 1},
        {"has_aux": True},
        {"has_aux": True, "return_norms": True},
        {"l2_clip_norm": 0.0},
        {"l2_clip_norm": 0.0, "rescale_to_unit_norm": True},
        {"l2_clip_norm": math.inf},
    ],
    ids=str,
)
def test_as_jax_privacy(options: Any) -> None:
    options = {"l2_clip_norm": 1.3, "batch_argnums": (1, 2), **options}
    fun = with_aux if options.get("has_aux") else values
    ours, other = clipped_fun(fun, **options), theirs.clipped_fun(fun, **options)
    for call in (ours, jax.jit(ours)):
        assert_close(call(W, X, Y, is_padding_example=PADDING), other(W, X, Y, is_padding_example=PADDING))
    assert ours.has_aux == other.has_aux
    for relation in NeighboringRelation:
        assert ours.sensitivity(relation) == other.sensitivity(relation)


@pytest.mark.parametrize("size", [None, 3])
def test_a_norm_for_each_part(size: int | None) -> None:
    norms = {"product": 0.6, "scaled": 0.9}
    of = clipped_fun(values, batch_argnums=(1, 2), l2_clip_norm=norms, return_norms=True, microbatch_size=size)
    found, sizes = of(W, X, Y)
    for name, part in each().items():
        expected = np.linalg.norm(part, axis=1)
        np.testing.assert_allclose(sizes[name], expected, 1e-5)
        np.testing.assert_allclose(found[name], np.minimum(1, norms[name] / expected) @ part, 1e-4, 1e-5)
    assert of.sensitivity() == pytest.approx(math.hypot(0.6, 0.9))


def test_automatic() -> None:
    found = clipped_fun(values, batch_argnums=(1, 2), l2_clip_norm=0.5, automatic=0.1)(W, X, Y)
    parts = each()
    norms = np.linalg.norm(np.concatenate([*parts.values()], axis=1), axis=1)
    assert_close(found, {name: np.float32(0.5 / (norms + 0.1) @ part) for name, part in parts.items()})


def test_values_that_are_not_finite_contribute_zero() -> None:
    x = X.at[1, 0].set(jnp.nan).at[4, 2].set(jnp.inf)
    kept = np.array([0, 2, 3, 5])
    of = clipped_fun(values, batch_argnums=(1, 2), l2_clip_norm=0.7)
    assert_close(of(W, x, Y), of(W, X[kept], Y[kept]))
    unsafe = clipped_fun(values, batch_argnums=(1, 2), l2_clip_norm=0.7, nan_safe=False)
    assert jnp.isnan(unsafe(W, x, Y)["product"]).all()


@pytest.mark.parametrize("keep", [True, False])
def test_keywords_have_no_axis_of_a_batch_of_one(keep: bool) -> None:
    def scaled(x: Any, scale: Any) -> Any:
        assert (x.ndim, scale.ndim) == (1 + keep, 1)
        return jnp.sum(x) * scale

    options: Any = {"l2_clip_norm": 0.8, "keep_batch_dim": keep}
    expected = theirs.clipped_fun(scaled, **options)(X, scale=Y)
    assert_close(clipped_fun(scaled, **options)(X, scale=Y), expected)


def test_keys_keywords_and_no_batch_axis() -> None:
    draw = lambda x, key, scale: scale * jax.random.normal(key) * x
    key = jax.random.key(3)
    of = clipped_fun(draw, l2_clip_norm=math.inf, prng_argnum=1, keep_batch_dim=False)
    found = of(X, key, scale=jnp.arange(6.0))
    keys = jax.random.split(key, BATCH)
    expected = sum(draw(X[i], keys[i], float(i)) for i in range(BATCH))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    mapped = jax.vmap(lambda scale: clipped_fun(jnp.mean, l2_clip_norm=scale)(X))(jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(mapped, [clipped_fun(jnp.mean, l2_clip_norm=s)(X) for s in (0.1, 0.2)], rtol=1e-6)
    slope = jax.grad(lambda w: clipped_fun(values, batch_argnums=(1, 2), l2_clip_norm=9.0)(w, X, Y)["product"].sum())
    np.testing.assert_allclose(slope(W), jnp.broadcast_to(X.sum(0)[:, None], W.shape), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: Any) -> None:
    ones = jnp.ones((4096, 1), dtype)
    assert clipped_fun(lambda x: x[0], l2_clip_norm=1.0)(ones)[0] == 4096
    wide = clipped_fun(lambda x: x[0], l2_clip_norm=1.0, dtype=jnp.float32)(ones)
    assert wide.dtype == jnp.float32


def test_an_empty_batch() -> None:
    found = clipped_fun(values, batch_argnums=(1, 2))(W, X[:0], Y[:0])
    assert_close(found, {"product": jnp.zeros(3), "scaled": jnp.zeros(3)})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"microbatch_size": 4}, ValueError, "microbatch_size=4 does not divide the batch of 6"),
        ({"l2_clip_norm": -1.0}, ValueError, "l2_clip_norm must be at least 0"),
        ({"l2_clip_norm": {"other": 1.0}}, ValueError, "which is not a prefix of"),
        ({"normalize_by": 0.0}, ValueError, "normalize_by must be positive"),
        ({"dtype": int}, TypeError, "dtype must be floating point"),
        ({"batch_argnums": ()}, ValueError, "batch_argnums is empty"),
        ({"batch_argnums": 9}, (ValueError, TypeError), "batch_argnums"),
        ({"prng_argnum": "key"}, TypeError, "prng_argnum must be an int or None"),
        ({"has_aux": True}, TypeError, "with has_aux, fun must return"),
        ({"prng_argnum": 1}, ValueError, "prng_argnum=1 is in batch_argnums"),
    ],
)
def test_errors(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        clipped_fun(values, **{"batch_argnums": (1, 2), **options})(W, X, Y)


def test_errors_of_values() -> None:
    for dtype in (None, jnp.float32):  # an imaginary part is not dropped
        with pytest.raises(TypeError, match="fun must return real floating-point numbers"):
            clipped_fun(lambda x: x + 1j, dtype=dtype)(X)
    with jax.enable_x64(True):
        of = clipped_grad(lambda w, x: jnp.abs(x @ w).sum(), l2_clip_norm=1.0, grid_scale=99)
        with pytest.raises(TypeError, match="grid_scale needs real gradients"):
            of(jnp.ones(4, complex), X)
    with pytest.raises(TypeError, match=r"fun must return real floating-point numbers, but `value\['n'\]` is"):
        clipped_fun(lambda x: {"n": jnp.argmax(x)})(X)
    with pytest.raises(ValueError, match="is_padding_example is"):
        clipped_fun(jnp.mean)(X, is_padding_example=PADDING[1:])


# Sums on a grid.


def loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.sum((x @ w - y) ** 2)


@pytest.mark.parametrize("size", [None, 1, 3])
def test_clipped_gradients_on_a_grid(size: int | None) -> None:
    with jax.enable_x64(True):
        of = clipped_grad(
            loss, l2_clip_norm=0.7, batch_argnums=(1, 2), grid_scale=1000, microbatch_size=size, return_grad_norms=True
        )
        found, aux = jax.jit(of)(W, X, Y, is_padding_example=PADDING)
        gradients = jax.vmap(jax.grad(lambda w, x, y: loss(w, x[None], y[None])), (None, 0, 0))(W, X, Y)
        norms = np.sqrt(np.square(gradients).sum((1, 2)))
        factors = np.minimum(1, 0.7 * (1 - 0.5 * math.sqrt(12) / 1000) / norms)
        expected = np.round(np.asarray(gradients) * factors[:, None, None] * (1000 / 0.7))[~PADDING].sum(0)
        assert found.dtype == jnp.int64
        np.testing.assert_allclose(found, expected, atol=1)  # products may round to either neighbor
        np.testing.assert_allclose(aux.grad_norms, norms, rtol=1e-5)
        assert of.sensitivity() == 1000.0
        assert of.explain(W, X, Y).method == "vmap"


def test_one_sample_on_a_grid_is_within_the_sensitivity() -> None:
    with jax.enable_x64(True):
        for scale, size in ((10, 100), (50, 100), (1000, 7)):
            many = jnp.asarray(GENERATOR.normal(size=(50, size)) * 10.0 ** GENERATOR.uniform(-2, 3, (50, 1)))
            of = clipped_fun(lambda x: x[0], l2_clip_norm=0.3, grid_scale=scale)
            one = np.stack([of(x[None]) for x in many])
            norms = np.linalg.norm(np.asarray(one, np.float64), axis=1)
            assert norms.max() <= scale
            assert norms.max() > 0.5 * scale


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"grid_scale": 0}, ValueError, "grid_scale must be at least 1"),
        ({"grid_scale": 1.5}, TypeError, "grid_scale must be an int"),
        ({"grid_scale": 9, "normalize_by": 2.0}, ValueError, "without normalize_by"),
        ({"grid_scale": 9, "rescale_to_unit_norm": True}, ValueError, "without rescale_to_unit_norm"),
        ({"grid_scale": 9, "dtype": jnp.float32}, ValueError, "without dtype"),
        ({"grid_scale": 9, "automatic": 0.1}, ValueError, "without automatic"),
        ({"grid_scale": 9, "l2_clip_norm": [1.0]}, ValueError, "without a tree as l2_clip_norm"),
        ({"grid_scale": 1}, ValueError, "too small for 12 numbers"),
        ({"grid_scale": 9, "method": "ghost"}, ValueError, 'grid_scale needs each gradient, which method="ghost"'),
    ],
)
def test_errors_of_grids(options: Any, error: type[Exception], match: str) -> None:
    with jax.enable_x64(True), pytest.raises(error, match=match):
        clipped_grad(loss, batch_argnums=(1, 2), **{"l2_clip_norm": 1.0, **options})(W, X, Y)


def test_grids_need_64_bits() -> None:
    with jax.enable_x64(True):
        made = clipped_fun(lambda x: x, l2_clip_norm=1.0, grid_scale=100)
    with pytest.raises(ValueError, match="grid_scale needs 64-bit integers"):
        made(jnp.ones((4, 2)))
    with pytest.raises(ValueError, match="grid_scale needs 64-bit integers"):
        clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=1.0, grid_scale=9)(W, X, Y)
